"""A program that trains on a loader and evaluates on another after each epoch: `evaluating.py DEVICE KIND`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset


class _Ahead:
    """Fetches a batch ahead, as accelerate's loaders do."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        current = next(batches)
        while True:
            try:
                following = next(batches)
            except StopIteration:
                yield current
                return
            yield current
            current = following


def make_loader(samples: int, batch: int) -> Any:
    """A loader of rows of 64 numbers."""
    data = TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, shuffle=True)
    return _Ahead(loader) if kind == "ahead" else loader


device, kind = sys.argv[1:]
torch.manual_seed(0)
train, valid = make_loader(320, 32), make_loader(128 * (128 if kind == "long" else 16), 128)
if kind == "varied":
    rows = [torch.randn(n, 64) for n in torch.randint(1, 40, (320,)).tolist()]
    valid = ((x, None) for x in DataLoader(rows, batch_size=16, collate_fn=pad_sequence))
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2000)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def evaluate() -> list[torch.Tensor]:
    net.eval()
    preds: list[torch.Tensor] = []
    with torch.set_grad_enabled(kind in ("graphs", "long", "ahead")):
        for x, _ in valid:
            out = net(x.to(device))
            if kind == "joined":
                preds = [torch.cat([*preds, out])]
            elif kind in ("graphs", "long", "ahead", "outputs"):
                preds.append(out)
    while kind == "endless":
        (net(torch.ones(1, 64, device=device)) + 1).sum()
    if kind == "raises":
        raise RuntimeError("one class alone")
    return preds


def fit() -> None:
    kept: list[torch.Tensor] = []
    for _ in range(2):
        net.train()
        for x, y in train:
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        kept.clear()
        kept += evaluate() if kind != "none" else []
        if kind != "outputs":
            kept.clear()


if kind == "next":
    batches = iter(train)
    for _ in range(10):
        nn.functional.cross_entropy(
            net(next(batches)[0].to(device)), torch.zeros(32, dtype=torch.int64, device=device)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    fit()
