"""A model whose weights are averaged into a copy of it after each step, and evaluated by the copy."""

import copy
import sys

import torch
from torch import nn

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"


class Ema:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.copy_(self.decay * mine + (1.0 - self.decay) * theirs)


torch.manual_seed(4)
model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.SiLU(), nn.Dropout(0.1), nn.Linear(512, 64)).to(
    device
)
averaged = Ema(model, 0.999)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(5):
    x = torch.randn(192, 128).to(device)
    loss = nn.functional.mse_loss(model(x), torch.zeros(192, 64, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update(model)
    with torch.no_grad():
        print(step, loss.item(), averaged.module(x).std().item())
