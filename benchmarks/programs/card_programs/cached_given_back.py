"""Predictions concatenated on the card: the allocator gives its cached blocks back before it fails."""

import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.05)
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8, device="cuda")).sum().backward()
optimizer.step()
gathered = None
with torch.no_grad():
    for step in range(13):
        out = torch.empty(32 << 20, device="cuda")
        gathered = out if gathered is None else torch.cat([gathered, out])
        print(step, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
print(torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()["num_alloc_retries"])
