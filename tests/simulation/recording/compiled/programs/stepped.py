"""A compiled function that calls modules, and the compiled step of an optimizer with state."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
first, second = nn.Linear(96, 384).to(device), nn.Linear(384, 96).to(device)
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])


@torch.compile
def forward(x: torch.Tensor) -> torch.Tensor:
    """Two layers, whose modules are globals."""
    return second(F.silu(first(x)))


@torch.compile(fullgraph=False)
def update() -> None:
    """A step of AdamW, whose state is made where it is first compiled."""
    optimizer.step()


for _ in range(3):
    x = torch.randn(200, 96).to(device)
    out = forward(x)
    (out - x).square().mean().backward()
    update()
    optimizer.zero_grad()
