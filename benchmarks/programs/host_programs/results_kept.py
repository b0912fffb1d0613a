"""Results that a program brings to the host and keeps, step by step, and joins at the end."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(64, 2048).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(12):
    out = model(torch.randn(6000, 64).to(device))
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(out.detach().cpu())
    del out, loss
joined = torch.cat(kept)
