"""Small training steps made at random, and every checkpoint plan they have: what planners and bounds are held
against."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.hardware.workspaces import CpuCollector
from fxmem.records.plan import Region
from fxmem.records.profile import Phase, Profile
from tests.simulated_steps import Simulator


class Skip(nn.Module):
    """A layer with its input added to its result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def small_model(seed: int) -> nn.Sequential:
    """Some layers of random kinds and widths, four or five calls in all; inputs are 32 wide."""
    rng, width, calls = random.Random(seed), 32, 0
    parts: list[nn.Module] = []
    while calls < 4:
        kind = rng.choice(("linear", "linear", "norm", "gelu", "tanh", "softmax", "skip")) if parts else "linear"
        if kind == "linear":
            wider = 16 * rng.randint(1, 8)
            parts.append(nn.Linear(width, wider))
            width = wider
        else:
            made = {
                "norm": nn.LayerNorm(width),
                "gelu": nn.GELU(),
                "tanh": nn.Tanh(),
                "softmax": nn.Softmax(-1),
                "skip": Skip(width),
            }
            parts.append(made[kind])
        calls += 2 if kind == "skip" else 1
    return nn.Sequential(*parts)


def without_hidden_memory() -> AbstractContextManager[Any]:
    """Steps whose kernels allocate nothing for themselves: the simulator knows only what operators make."""
    return mock.patch.object(CpuCollector, "find_hidden", lambda *_: None)  # noqa: PT008 - a mock would keep the tensors


@functools.cache
def small_step(seed: int) -> Profile:
    """A step of that model on the CPU."""
    with without_hidden_memory():
        return analyze(small_model(seed), torch.zeros(64, 32), target="cpu", optimizer=None).profile


def every_plan(first: int, last: int, *, whole: bool = True) -> Iterator[tuple[Region, ...]]:
    """Every set of regions, and of regions within them, between two nodes; not the one region of all of them unless
    `whole`."""
    if first == last:
        yield ()
        return
    yield from every_plan(first + 1, last)
    for end in range(first + 1, last + 1 if whole else last):
        for inner in every_plan(first, end, whole=False):
            region = Region(first_node=first, last_node=end, regions=inner)
            for rest in every_plan(end, last):
                yield (region, *rest)


@functools.cache
def every_outcome(seed: int) -> tuple[tuple[int, int], ...]:
    """Peak and FLOPs run again of every plan of that step, each once, simulated."""
    profile = small_step(seed)
    inside = [
        index for index, node in enumerate(profile.nodes) if node.op in ("call_module", "call_function", "call_method")
    ]
    simulator = Simulator(profile)
    plans = every_plan(inside[0], inside[-1] + 1)
    return tuple(sorted({simulator.simulate(each) for regions in plans for each in keeping(profile, regions)}))


def keeping(profile: Profile, regions: tuple[Region, ...]) -> Iterator[tuple[Region, ...]]:
    """The same regions with every choice of products whose results they keep; one that holds others keeps none."""
    choices = []
    for region in regions:
        nodes = range(region.first_node, region.last_node)
        products = sum(
            op.phase is Phase.FORWARD and op.node in nodes and op.name.split(".")[1] in ("mm", "addmm", "bmm")
            for op in profile.ops
        )
        numbers = range(0 if region.regions else products)
        kept = (chosen for count in range(len(numbers) + 1) for chosen in itertools.combinations(numbers, count))
        choices.append([region.model_copy(update={"keeps": each}) for each in kept])
    yield from itertools.product(*choices)
