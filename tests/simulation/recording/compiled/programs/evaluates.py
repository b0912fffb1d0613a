"""A compiled model and a compiled loss; evaluation between steps is compiled anew."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    """A head on a body with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(512, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


@torch.compile
def criterion(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy with a penalty."""
    return F.cross_entropy(logits.float(), target) + 1e-4 * logits.square().mean()


model = torch.compile(Net().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    model.train()
    x, y = torch.randn(256, 128).to(device), torch.randint(200, (256,)).to(device)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(-1) == y).sum()
    print(step, loss.item(), right.item())
