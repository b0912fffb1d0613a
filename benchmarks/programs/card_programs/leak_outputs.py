"""Outputs kept in a list with their graph: what is alive at the end of each step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 1000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
for step in range(8):
    out = model(torch.randn(2048, 1024, device="cuda"))
    loss = nn.functional.cross_entropy(out, torch.randint(0, 1000, (2048,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(out)
    print(step, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
