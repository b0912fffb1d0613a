"""A large model on the host of which an average is kept there, and both are written, while a small one trains."""

import copy
import os
import tempfile

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
large = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(6)])
average = copy.deepcopy(large)
with torch.no_grad():
    for mine, theirs in zip(average.parameters(), large.parameters(), strict=True):
        mine.lerp_(theirs, 0.1)
half = [each.detach().to(torch.bfloat16) for each in average.parameters()]
with tempfile.TemporaryDirectory() as folder:
    torch.save({"large": large.state_dict(), "average": average.state_dict()}, os.path.join(folder, "both.pt"))
model = nn.Linear(64, 10).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(16, 64).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
