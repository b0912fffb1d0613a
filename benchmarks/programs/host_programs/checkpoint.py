"""A checkpoint with optimizer state that is loaded whole, averaged with another, and written through a buffer."""

import io
import sys

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
first, second = (torch.load(sys.argv[1], map_location="cpu") for _ in range(2))
mean = {name: (tensor + second[name]) / 2 for name, tensor in first.items()}
del first, second
buffer = io.BytesIO()
torch.save(mean, buffer)
del buffer
model = nn.Linear(4096, 4096)
model.load_state_dict({"weight": mean["0.weight"], "bias": mean["0.bias"]})
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 4096).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
