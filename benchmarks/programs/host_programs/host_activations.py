"""Activations that wait on the host between forward and backward (`save_on_cpu`)."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randn(65_536, 256).to(device)
    with save_on_cpu():
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
