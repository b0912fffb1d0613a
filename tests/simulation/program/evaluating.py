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
    stays = kind == "persists"
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=batch, shuffle=True, num_workers=int(stays), persistent_workers=stays
    )
    return _Ahead(loader) if kind == "ahead" else loader


MEASURED = ("collected", "named", "halves", "cast", "remembers", "hooked")
"""Kinds that make something of all that they kept."""

device, kind = sys.argv[1:]
torch.manual_seed(0)
train, valid = make_loader(320, 32), make_loader(128 * (128 if kind == "long" else 16), 128)
if kind == "varied":
    rows = [torch.randn(n, 64) for n in torch.randint(1, 40, (320,)).tolist()]
    valid = ((x, None) for x in DataLoader(rows, batch_size=16, collate_fn=pad_sequence))


class Net(nn.Module):
    """Returns logits, as this kind of program wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2000))
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers(x)
        if kind == "remembers":
            self.seen = out[:1].clone()
        if kind == "halves":
            return out.chunk(2)
        return {"logits": out, "also": out} if kind == "named" else out


net = Net().to(device)
if kind == "hooked":
    net.layers[0].register_forward_hook(lambda module, given, out: None)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def evaluate() -> list[torch.Tensor]:
    if kind == "persists" and not net.training:
        raise RuntimeError("an epoch without a batch")
    net.eval()
    preds: list[torch.Tensor] = []
    targets = []
    with torch.set_grad_enabled(kind in ("graphs", "long", "ahead")):
        for x, y in valid:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=kind == "cast"):
                out = net(x.to(device))
            if kind == "named":
                out = out["logits"]
            if kind == "halves":
                out = out[1]
            if kind == "joined":
                preds = [torch.cat([*preds, out])]
            elif kind in ("graphs", "long", "ahead", "outputs", *MEASURED):
                preds.append(out)
            if kind in MEASURED:
                targets.append(y[: len(out)])
        if kind in MEASURED:
            probabilities = torch.cat(preds).softmax(1)
            print((probabilities.argmax(1) == torch.cat(targets).to(device)).float().mean().item())
            preds = []
    while kind == "endless":
        (net(torch.ones(1, 64, device=device)) + 1).sum()
    if kind == "raises":
        raise RuntimeError("one class alone")
    return preds


def fit() -> None:
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for x, y in train:
            net.train()
            nn.functional.cross_entropy(net.layers(x.to(device)), y.to(device)).backward()
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
