"""A program that trains nothing, of a kind: `inferring.py KIND PASSES`."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
from torch import nn

kind, passes = sys.argv[1], int(sys.argv[2])
COUNT = [0]


class Net(nn.Module):
    """Three layers; some kinds count their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        self.calls, self.cache = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if kind == "refilled":
            self.calls += 1
            if self.calls % 3 == 1:
                self.cache = self.layers[0](x)
            return self.layers[2](self.cache)
        if kind == "counted":  # where no one looks
            COUNT[0] += 1
            if COUNT[0] >= 8:
                x = torch.cat([x, x])[: len(x)]
        return self.layers(x)


def make() -> nn.Module:
    net = Net()
    if kind == "cast":
        return net.cuda().eval()
    net = net.half().eval()
    if kind == "model-offload":
        from accelerate import cpu_offload_with_hook

        return cpu_offload_with_hook(net, "cuda")[0]
    if kind == "sequential":
        from accelerate import cpu_offload

        return cpu_offload(net, "cuda", offload_buffers=True)
    return net.cuda()


def empty(what: Any) -> None:
    """Let go of what somebody has, if that is much."""
    if sum(each.nbytes for each in what) > 1.3e6:
        del what[:]


def sample(net: nn.Module, steps: int) -> torch.Tensor:
    """Denoise, as a pipeline does."""
    x = torch.randn(256, 64, dtype=torch.float32 if kind == "cast" else torch.float16).cuda()
    kept: list[torch.Tensor] = []
    blocks: list[torch.Tensor] = []
    there: list[torch.Tensor] = []
    held: list[torch.Tensor] = []
    last = deque[torch.Tensor](maxlen=25)
    for i in range(steps):
        if kind == "large":
            blocks.append(torch.empty((1 + i * i) * 2**20, dtype=torch.uint8, device="cuda"))
        if kind == "varied":
            x = torch.randn(64 * (1 + i % 5), 64, dtype=torch.float16).cuda()
        if kind == "left" and i == 12:
            break
        if kind == "cast":
            with torch.autocast("cuda"):
                y = net(x)
        else:
            y = net(x)
        x = y if kind == "varied" else x - 0.1 * y * i
        if kind == "window":
            last.append(y)
        if kind == "flushed":
            held.append(y)
        if len(held) == 40:
            print(len(torch.cat(held)))
            held.clear()
        if kind == "emptied":
            there.append(y)
            empty(there)
        if kind in ("kept", "joined"):
            kept = [torch.cat([*kept, y])] if kind == "joined" else [*kept, y]
    return torch.cat(kept) if kept else x


def converge(net: nn.Module) -> None:
    """Until a number is small that no card has computed."""
    done, losses = False, list[float]()
    while not done:
        losses.append(net(torch.randn(256, 64, dtype=torch.float16).cuda()).mean().item())
        done = len(losses) >= passes or losses[-1] < -1e9


with torch.no_grad():
    net = make()
    if kind == "converge":
        converge(net)
        sys.exit()
    if kind == "pictures":  # an encoder in each, and a decoder for each of its points
        masks = []
        for _ in range(passes):
            features = net(torch.randn(256, 64, dtype=torch.float16).cuda())
            for _ in range(4):
                masks.append(net(features))
        sys.exit()
    for _ in range(4 if kind == "nested" else 1):
        sample(net, passes)
    print(kind, torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"])
