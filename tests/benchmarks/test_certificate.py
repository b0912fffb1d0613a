"""Bounds of checkpoint plans against every plan of small steps, and against plans carried out and analysed."""

from __future__ import annotations

import builtins
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.planning.certificate import certify
from benchmarks.planning.lower_bound import relax
from fxmem import analyze, checkpointing
from fxmem.errors import EnvironmentLacksError, FxmemError, UsageError
from fxmem.hardware.op_classes import is_product
from fxmem.planning import Planner
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Phase, Profile
from fxmem.records.units import Application
from fxmem.whatif.plan_search import apply_regions
from tests.planning.legality import is_legal
from tests.random_models import BATCH, WIDTH, RandomModel
from tests.small_steps import every_outcome, small_step


def plan_of(
    profile: Profile,
    peak: int,
    extra_flops: int,
    application: Application = Application.GRAPH,
    *,
    analysed: bool = True,
) -> Plan:
    """A plan of which no more is known than its peak and its cost."""
    nothing = Planner(profile, application).plan("flat", None)
    after = nothing.after.model_copy(update={"requested_bytes": peak})
    return nothing.model_copy(update={"after": after, "extra_flops": extra_flops, "analysed": analysed})


@pytest.mark.truth
def test_no_plan_of_a_small_step_is_below_the_bound_and_most_optima_meet_it() -> None:
    compared = met = 0
    for seed in range(32):
        profile, outcomes = small_step(seed), every_outcome(seed)
        peaks = sorted({peak for peak, _ in outcomes})
        for budget in {peaks[len(peaks) * part // 8] for part in range(8)}:
            cheapest = min(flops for peak, flops in outcomes if peak <= budget)
            certificate = certify(profile, plan_of(profile, budget, cheapest))
            assert certificate.complete
            assert certificate.lower_bound_flops is not None
            assert certificate.lower_bound_flops <= cheapest, (seed, budget)
            assert certificate.optimal == (certificate.lower_bound_flops == cheapest)
            met += certificate.optimal
            compared += 1
    assert compared > 95
    assert met > 0.75 * compared


def random_regions(profile: Profile, names: tuple[str | None, ...], rng: random.Random) -> list[Region]:
    units = Planner(profile, Application.GRAPH).tables.units

    def region(first: int, last: int, inner: tuple[Region, ...] = ()) -> Region:
        products = sum(
            op.phase is Phase.FORWARD and first <= op.node < last and is_product(op.name) for op in profile.ops
        )
        keeps = tuple(number for number in range(0 if inner else products) if rng.random() < 0.5)
        return Region(
            first_node=first,
            last_node=last,
            nodes=tuple(name for name in names[first:last] if name),
            regions=inner,
            keeps=keeps,
        )

    borders = sorted(rng.sample(range(units.first, units.last + 1), rng.choice((2, 2, 4))))
    found = []
    for first, last in zip(borders[::2], borders[1::2], strict=True):
        middle = (first + last) // 2
        inner = (
            (region(first, middle),)
            if last - first > 3 and is_legal(units, first, middle) and rng.random() < 0.5
            else ()
        )
        if is_legal(units, first, last):
            found.append(region(first, last, inner))
    return found


@pytest.mark.truth
def test_no_plan_that_was_carried_out_is_below_the_bound() -> None:
    compared = bound = 0
    for seed in range(24):
        model, rng = RandomModel(seed), random.Random(seed)
        model.statements = [
            (name, places)
            for name, places in model.statements
            if "checkpoint" not in name and name not in ("reentrant", "nested")
        ]
        model.statements = [
            (name, tuple(min(place, at) for place in places)) for at, (name, places) in enumerate(model.statements)
        ]
        analysis = analyze(model, torch.zeros(BATCH, WIDTH, device="meta"), target="cpu", optimizer=None)
        try:
            names = checkpointing.graph_names(
                analysis.model, analysis.profile, analysis.request.args, analysis.request.kwargs
            )
            for _ in range(3):
                regions = random_regions(analysis.profile, names, rng)
                real = apply_regions(analysis, regions, Application.GRAPH)
                extra = sum(op.flops or 0 for op in real.profile.ops) - sum(
                    op.flops or 0 for op in analysis.profile.ops
                )
                certificate = certify(analysis.profile, plan_of(analysis.profile, real.peak.requested_bytes, extra))
                assert certificate.lower_bound_flops is not None, (seed, regions)
                assert certificate.lower_bound_flops <= extra, (seed, regions)
                compared, bound = compared + 1, bound + (certificate.lower_bound_flops > 0)
        except FxmemError:  # not to be traced symbolically
            continue
    assert compared > 24
    assert bound > 2


class Block(nn.Module):
    """Layers that are no module together, but for the whole block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


class Blocks(nn.Module):
    """Four of them, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_budget_that_no_plan_keeps_is_said_to_be_one() -> None:
    profile = small_step(0)
    certificate = certify(profile, plan_of(profile, min(peak for peak, _ in every_outcome(0)) // 2, 0, analysed=False))
    assert certificate.lower_bound_flops is None
    assert certificate.gap_flops is None
    assert not certificate.optimal
    assert relax(profile, 1000, Application.GRAPH).short > 0


def test_whole_modules_cost_no_less_than_any_regions() -> None:
    analysis = analyze(Blocks(), torch.zeros(512, 64), target="cpu", optimizer=None)
    bounds = {}
    for way in (Application.MODULES, Application.GRAPH):
        plan = plan_of(analysis.profile, int(0.75 * analysis.peak.requested_bytes), 0, way)
        bounds[way] = certify(analysis.profile, plan).lower_bound_flops
    assert bounds[Application.GRAPH] is not None
    assert bounds[Application.MODULES] is not None
    assert bounds[Application.MODULES] > bounds[Application.GRAPH]


def test_a_plan_of_single_operators_is_none_of_those_that_a_certificate_speaks_of(tmp_path: Path) -> None:
    analysis = analyze(Blocks(), torch.zeros(512, 64), target="cpu", optimizer=None)
    with pytest.raises(UsageError, match="expected a plan of regions, which certificates speak of"):
        certify(analysis.profile, fxmem.plan(analysis, budget=0.75))
    certified = certify(analysis.profile, fxmem.plan(analysis, budget=0.75, regions_only=True))
    assert certified.lower_bound_flops is not None


def test_a_search_that_is_cut_short_gives_a_lower_bound_and_says_so() -> None:
    profile = small_step(1)
    peaks = sorted({peak for peak, _ in every_outcome(1)})
    plan = plan_of(profile, peaks[0], min(flops for peak, flops in every_outcome(1) if peak == peaks[0]))
    whole, short = certify(profile, plan), certify(profile, plan, 1e-9)
    assert not short.complete
    assert (short.lower_bound_flops or 0) <= (whole.lower_bound_flops or 0)
    assert certify(profile, plan) == whole


def test_what_cannot_be_certified_is_answered_with_what_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = small_step(0)
    plan = plan_of(profile, 1 << 20, 0)
    with pytest.raises(UsageError, match="positive effort"):
        certify(profile, plan, 0)
    with pytest.raises(UsageError, match="the profile that the plan was made from"):
        certify(profile.model_copy(update={"model": "Other"}), plan)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentLacksError, match=r"pip install ortools"):
        certify(profile, plan)
