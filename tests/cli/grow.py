"""Programs whose verdict is of the whole run; the argument says which."""

import sys

import torch
from torch import nn


def train(model: nn.Module, batch, kept: list, *, keep, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = batch()
        out = model(x)
        optimizer.zero_grad()
        out.float().pow(2).mean().backward()
        optimizer.step()
        kept += keep(x, out)


def lists(steps: int = 200) -> None:
    """Predictions in a list: 16,384 x 1,024 floats a step, 67,108,864 bytes; 9.75 GiB are full at step 150."""
    train(nn.Linear(1024, 1024).cuda(), _wide, [], keep=lambda x, out: [out], steps=steps)


def cat() -> None:
    """Predictions that are concatenated: 64 x 8 floats more with each step, whose sizes are never the same."""
    model, kept = nn.Linear(64, 8).cuda(), [torch.empty(0, 8, device="cuda")]

    def keep(x, out):
        kept[0] = torch.cat([kept[0], out.detach()])
        return []

    train(model, lambda: torch.randn(64, 64, device="cuda"), [], keep=keep, steps=10**8)


def steady() -> None:
    """Only the last four outputs are kept: as many bytes after each step from the fourth on."""
    recent = []

    def keep(x, out):
        del recent[:-3]
        recent.append(out)
        return []

    train(nn.Linear(64, 8).cuda(), lambda: torch.randn(64, 64, device="cuda"), [], keep=keep, steps=20)


def lengths() -> None:
    """Longer and longer batches, of which nothing is kept."""
    sizes = iter(range(64, 2000, 7))
    model = nn.Linear(64, 8).cuda()
    train(model, lambda: torch.randn(next(sizes) ** 2 // 64, 64, device="cuda"), [], keep=lambda x, out: [], steps=20)


def evaluate() -> None:
    """A larger batch after the last step: 131,072 x (1,024 + 10) floats and their input."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 10)).cuda()
    train(model, lambda: torch.randn(64, 256, device="cuda"), [], keep=lambda x, out: [], steps=2)
    with torch.no_grad():
        model.eval()(torch.randn(131072, 256, device="cuda"))
    print("MAX", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), file=sys.stderr)


def pairs() -> None:
    """2 x 80,000 x 80,000 distances: one request of 51,200,000,000 bytes (pytorch issue 57720)."""
    points = torch.randn(2, 80000, 5, device="cuda", requires_grad=True)
    torch.cdist(points, points).sum().backward()


def outputs() -> None:
    """Inference with gradients, whose outputs are kept: no optimizer, and out of memory."""
    model, kept = nn.Sequential(nn.Linear(1024, 1 << 14), nn.ReLU()).cuda().eval(), []
    for _ in range(100):
        kept.append(model(torch.randn(4096, 1024, device="cuda")))


def fails(step: str = "0") -> None:
    """An error of its own, within the step with this number."""

    def count(*_) -> None:
        calls.append(1)
        if len(calls) == int(step):
            raise ValueError("of its own")

    calls = []
    model = nn.Linear(64, 8).cuda()
    if step == "0":
        raise ValueError("of its own")
    model.register_forward_hook(count)
    train(model, lambda: torch.randn(64, 64, device="cuda"), [], keep=lambda x, out: [], steps=5)


def leaves(step: str = "1") -> None:
    """As `fails`, by sys.exit."""
    try:
        fails(step)
    except ValueError:
        sys.exit(3)


def _wide() -> torch.Tensor:
    return torch.randn(16384, 1024, device="cuda")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
