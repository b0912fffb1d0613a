"""Calls of a model that look alike and are not, of a kind: `unlike.py KIND`. What differs stands in none of their
arguments' layouts, and in most of them the largest call is one of them in the middle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

STEP, SEEN = 0, list[torch.Tensor]()
ROWS = 512


class Net(nn.Module):
    """Two layers, on as many copies of its rows as `widen` says."""

    def __init__(self, widen: Callable[..., int] = lambda self: 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.settings, self.times, self.widen = SimpleNamespace(times=1), 1, widen

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.layers(x.repeat(self.widen(self, *more), 1))[: len(x)]


def attribute(net: Net, step: int) -> None:
    """The program sets a number of the model's."""
    net.times = 6 if step == 6 else 1
    net.widen = widen_by_attribute


def widen_by_attribute(net: Net) -> int:
    return net.times


def of_a_part(net: Net, step: int) -> None:
    """The same of an object that the model has, as a configuration."""
    net.settings.times = 6 if step == 6 else 1
    net.widen = widen_by_settings


def widen_by_settings(net: Net) -> int:
    return net.settings.times


def named(net: Net, step: int) -> None:
    """A helper names a global."""
    global STEP
    STEP = step
    net.widen = widen_by_step


def widen_by_step(net: Net) -> int:
    return 6 if STEP == 6 else 1


def collected(net: Net, step: int) -> None:
    """A helper keeps something where no module sees it."""
    net.widen = keep_one


def keep_one(net: Net) -> int:
    SEEN.append(torch.empty(2**20, device="cuda"))
    return 1


def hooked(net: Net, step: int) -> None:
    """A hook comes later."""
    if step == 6:
        net.layers[1].register_forward_hook(lambda module, given, made: SEEN.append(made))


def halved(net: Net, step: int) -> None:
    """The weights get another dtype."""
    if step == 6:
        net.double()


def replaced(net: Net, step: int) -> None:
    """A part becomes another."""
    if step == 6:
        net.layers = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)).cuda()


def counting() -> Net:
    """A closure that is put in the place of `forward` counts its calls."""
    net, calls = Net(), [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return net.layers(x.repeat(6 if calls[0] % 5 == 0 else 1, 1))[: len(x)]

    net.forward = forward
    return net


class Attention(nn.Module):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, -1, 3, 2, 32).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def run(kind: str) -> None:
    x = torch.randn(ROWS, 64).cuda()
    net: nn.Module = counting() if kind == "counting" else Net()
    if kind == "lengths":
        net = Net(lambda self, lengths: int(lengths.max()))
    if kind == "attention":
        net, x = Attention().half(), x.half()
    net = net.eval().cuda()
    kept = list[torch.Tensor]()
    for step in range(15):
        if kind in globals() and kind not in ("counting", "run"):
            globals()[kind](net, step)
        lengths = torch.tensor([1, 1, 6 if step == 6 else 1]).cuda()
        given = [lengths] if kind == "lengths" else []
        one = SDPBackend.MATH if step == 6 else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(one) if kind == "attention" else torch.no_grad(), torch.no_grad():
            kept.append(net(x.double() if kind == "halved" and step >= 6 else x, *given))


run(sys.argv[1])
