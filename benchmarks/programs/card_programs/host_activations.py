"""Activations that go to pinned memory of the host between forward and backward."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    with save_on_cpu(pin_memory=True):
        loss = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
kept = torch.cuda.host_memory_stats()
print(kept["allocated_bytes.current"], kept["allocated_bytes.peak"], kept["num_host_alloc"])
