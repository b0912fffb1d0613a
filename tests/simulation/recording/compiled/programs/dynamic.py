"""A compiled part with a graph break and batches of several sizes, beside a part that is not compiled."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Part(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x)) * 2
        torch._dynamo.graph_break()
        out: torch.Tensor = torch.sigmoid(self.down(x)) + 1
        return out


class Net(nn.Module):
    """The compiled part between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.part = torch.compile(Part(), dynamic=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(torch.relu(self.embed(x)))
        return out


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters())
for size in (96, 160, 128, 160):
    loss = model(torch.randn(size, 32).to(device)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
