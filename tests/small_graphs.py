"""Small graphs made at random, the cheapest checkpoint plan of each by exhaustive search, and what `fxmem.plan` finds
within the same peak.

The search goes through every set of regions, flat or nested to any depth, and every choice of products that flat
regions may keep, with `tests.simulated_steps`, which shares nothing with the planners. What it takes for the cheapest
is then applied and analysed, and counts only if it keeps the budget there, too; so does what `fxmem.plan` finds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fxmem
from fxmem import analyze, checkpointing
from fxmem.errors import ExceededError
from fxmem.records.plan import Region
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.plan_search import apply_regions
from tests.simulated_steps import Simulator
from tests.small_steps import every_plan, keeping, without_hidden_memory

BATCH, WIDTH = 512, 32
KINDS = ("linear", "linear", "norm", "gelu", "tanh", "softmax", "add", "mul", "cat", "sum")
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1, keepdim=True),
}


class SmallGraph(nn.Module):
    """Some operators of random kinds and widths, each of one or two results before it; what nobody reads is summed
    up."""

    def __init__(self, seed: int, calls: int) -> None:
        super().__init__()
        rng, widths = random.Random(seed), [WIDTH]
        self.layers, self.steps = nn.ModuleDict(), list[tuple[str, tuple[int, ...]]]()
        for at in range(calls):
            kind = rng.choice(KINDS) if at else "linear"
            places = (len(widths) - 1, rng.randrange(len(widths)))
            width = widths[places[0]]
            if kind in _BINARY and widths[places[1]] not in (1, width) and width != 1:
                kind = "cat"
            if kind == "linear":
                wider = 16 * rng.randint(1, 8)
                self.layers[str(at)] = nn.Linear(width, wider)
                width = wider
            elif kind == "norm":
                self.layers[str(at)] = nn.LayerNorm(width)
            width = (
                1
                if kind == "sum"
                else sum(widths[p] for p in places)
                if kind == "cat"
                else max(width, widths[places[1]])
                if kind in _BINARY
                else width
            )
            self.steps.append((kind, places))
            widths.append(width)

    def forward(self, x: Tensor) -> Tensor:
        """The last operator's result. No variable outlives the last operator that reads it."""
        found = {0: x}
        del x
        for at, (kind, places) in enumerate(self.steps):
            found[at + 1] = self._made(at, kind, *(found[place] for place in places))
            for place in [
                place for place in found if place <= at and not any(place in later for _, later in self.steps[at + 1 :])
            ]:
                del found[place]
        return found[len(self.steps)]

    def _made(self, at: int, kind: str, one: Tensor, other: Tensor) -> Tensor:
        if kind in ("linear", "norm"):
            made: Tensor = self.layers[str(at)](one)
            return made
        if kind == "cat":
            return torch.cat([one, other], -1)
        return _BINARY[kind](one, other) if kind in _BINARY else _UNARY[kind](one)


@dataclass(frozen=True)
class Comparison:
    """The cheapest plan within a budget, and what `fxmem.plan` finds within it."""

    seed: int
    nested: bool
    """Whether regions may hold regions; else one level is searched, and asked for."""
    needed: bool
    """Whether no one level of regions keeps the budget at that cost."""
    spare: bool
    """Whether the budget is two hundredths more than the peak of a plan that is the cheapest for its own; else it is
    that peak, to the byte."""
    budget_bytes: int
    best_flops: int
    """Extra FLOPs of the cheapest."""
    found_flops: int | None
    """Of what was found; None if nothing was."""
    found_peak: int | None

    @property
    def verdict(self) -> str:
        """What it comes to, in a word."""
        if self.found_flops is None or self.found_peak is None:
            return "missed"
        if self.found_peak > self.budget_bytes:
            return "exceeded"
        return (
            "optimal"
            if self.found_flops == self.best_flops
            else "dearer"
            if self.found_flops > self.best_flops
            else "cheaper"
        )


def calls_of(seed: int) -> int:
    """How many operators its graph has: mostly four, sometimes five, of which the search takes ten times as long."""
    return 5 if seed % 4 == 3 else 4


def comparisons(seed: int) -> list[Comparison]:
    """One graph, at every peak that a cheapest plan of it has."""
    with without_hidden_memory():
        return list(_compare(seed))


def _compare(seed: int) -> Iterator[Comparison]:
    analysis = analyze(SmallGraph(seed, calls_of(seed)), torch.zeros(BATCH, WIDTH), target="cpu", optimizer=None)
    every = list(_outcomes(analysis))
    flat = _front(analysis, [plan for plan in every if not any(region.regions for region in plan[2])])
    for nested, known in ((False, flat), (True, _front(analysis, every))):
        for peak, _ in known[1:]:  # the first is the step without a plan
            for spare in (False, True):
                budget = peak + peak // 50 if spare else peak
                best = min(flops for other, flops in known if other <= budget)
                needed = not any(other <= budget and flops <= best for other, flops in flat)
                try:
                    plan = fxmem.plan(analysis, "auto" if nested else "flat", budget, application="graph")
                except ExceededError:
                    yield Comparison(seed, nested, needed, spare, budget, best, None, None)
                else:
                    yield Comparison(
                        seed, nested, needed, spare, budget, best, plan.extra_flops, plan.after.requested_bytes
                    )


def _outcomes(analysis: Analysis) -> Iterator[tuple[int, int, tuple[Region, ...]]]:
    """Peak and extra FLOPs of every plan, simulated."""
    profile = analysis.profile
    inside = [
        index for index, node in enumerate(profile.nodes) if node.op in ("call_module", "call_function", "call_method")
    ]
    simulator = Simulator(profile)
    for regions in every_plan(inside[0], inside[-1] + 1):
        for each in keeping(profile, regions):
            yield *simulator.simulate(each), each


def _front(analysis: Analysis, plans: Sequence[tuple[int, int, tuple[Region, ...]]]) -> list[tuple[int, int]]:
    """Peak and extra FLOPs of plans of which none is worse than another in both, as their analyses say; the cheapest
    first."""
    found = [(analysis.peak.requested_bytes, 0)]
    simulated = math.inf
    for peak, flops, regions in sorted(plans, key=lambda plan: (plan[1], plan[0], len(plan[2]))):
        if peak < min(simulated, found[-1][0]):
            simulated, real = peak, _carried_out(analysis, regions)
            if real[0] < found[-1][0] and real[1] == flops:
                found.append(real)
    return found


def _carried_out(analysis: Analysis, regions: Sequence[Region]) -> tuple[int, int]:
    """Peak and extra FLOPs of a plan that is applied and analysed."""
    names = checkpointing.graph_names(analysis.model, analysis.profile, analysis.request.args, analysis.request.kwargs)

    def named(region: Region) -> Region:
        nodes = tuple(name for name in names[region.first_node : region.last_node] if name is not None)
        return region.model_copy(update={"nodes": nodes, "random": False, "regions": tuple(map(named, region.regions))})

    after = apply_regions(analysis, [named(region) for region in regions], Application.GRAPH)
    before, planned = (sum(op.flops or 0 for op in each.profile.ops) for each in (analysis, after))
    return after.peak.requested_bytes, planned - before
