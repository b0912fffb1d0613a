"""A batch that is halved until it fits, as accelerate's `find_executable_batch_size` does."""

import gc

import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.03)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = 262144
while True:
    try:
        for _ in range(2):
            loss = model(torch.randn(batch, 1024, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
        loss = None
        print(batch, "does not fit")
        batch //= 2
    gc.collect()
    torch.cuda.empty_cache()
print(batch, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
