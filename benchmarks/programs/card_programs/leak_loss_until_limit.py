"""A sum of losses that keeps every graph, until the part of the card that the process may use is full."""

import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.02)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
total = 0
try:
    for step in range(1000):
        loss = model(torch.randn(4096, 512, device="cuda")).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss
        if step % 5 == 0:
            print(step, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
except torch.OutOfMemoryError as error:
    print("out of memory in step", step, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    print(error)
