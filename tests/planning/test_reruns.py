"""Results that are recomputed more than once: estimates beside analyses, reach beside regions, steps beside steps."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import fxmem
from fxmem.planning import OperatorPlanner
from fxmem.planning.operators.reruns import RerunCutter
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.plan_search import apply_regions
from fxmem.whatif.verified_plan import survey
from tests.checkpointing.test_regions import same, trained
from tests.planning.test_regions import Residual

SHAPE = (16, 4, 24, 24)


class Chain(nn.Module):
    """Convolutions of few numbers, with much between them, that no symbolic trace accepts."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            for block in self.blocks:
                x = x + block(x).sigmoid()
        return x.mean()


@functools.cache
def step(target: str = "h100") -> Analysis:
    return fxmem.analyze(Chain(), torch.empty(SHAPE, device="meta"), target=target, optimizer=None)


@functools.cache
def planner(target: str = "h100") -> OperatorPlanner:
    return OperatorPlanner(step(target).profile, functools.partial(survey, step(target)))


def budgets(target: str = "h100") -> list[float]:
    """Below what choices reach whose calls run once."""
    once, least = planner(target)._least_of_one_run.recomputed.peak, planner(target)._least.recomputed.peak
    return [least + (once - least) * share for share in (0.8, 0.5, 0.1)]


@pytest.mark.truth
@pytest.mark.parametrize("number", range(3))
def test_an_analysis_has_the_bytes_and_flops_of_the_estimate(number: int) -> None:
    found = planner()._find_reruns(budgets()[number])
    assert found
    before = sum(op.flops or 0 for op in step().profile.ops)
    for choice in found:
        after = apply_regions(step(), planner()._describe_regions(choice), Application.OPERATORS)
        assert after.peak.requested_bytes == choice.recomputed.peak <= budgets()[number]
        assert sum(op.flops or 0 for op in after.profile.ops) - before == choice.cutter.flops(choice.recomputed)


def test_plans_of_operators_reach_as_low_as_regions_within_regions() -> None:
    lowest, regions = planner().smallest(), planner().regions.smallest()
    assert regions.chosen == "nested"
    assert lowest.after.requested_bytes <= regions.after.requested_bytes
    assert lowest.after.requested_bytes < 0.9 * planner()._least_of_one_run.recomputed.peak
    assert any(region.frees for region in lowest.regions)
    assert planner().curve()[-1].after.requested_bytes < planner()._least_of_one_run.recomputed.peak


def test_some_calls_run_twice_and_their_flops_count_twice() -> None:
    choice = planner()._find_reruns(budgets()[2])[0]
    runs = [call for call, _ in choice.cutter.find_runs(choice.recomputed)]
    assert isinstance(choice.cutter, RerunCutter)
    assert len(runs) > len(set(runs)) == len(choice.recomputed.recomputed)
    regions = planner()._describe_regions(choice)
    assert sum(region.extra_flops or 0 for region in regions) == choice.cutter.flops(choice.recomputed)


def test_without_stretches_reruns_are_what_one_run_is() -> None:
    cutter = planner()._cutter
    again = RerunCutter(cutter, {})
    for choice in cutter.pool:
        found = again.evaluate(choice.recomputed)
        assert found.cost == pytest.approx(choice.cost)
        assert found.peak == pytest.approx(choice.peak, rel=0.005)
        assert len(found.runs) == len(choice.recomputed)


class Sines(nn.Module):
    """A chain of equal operators, each of which saves what it reads."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.weight = length, nn.Parameter(torch.ones(1 << 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.weight * x
        for _ in range(self.length):
            x = x.sin()
        return x.sum()


@functools.cache
def fewest_runs(length: int, slots: int) -> int:
    """Runs of a chain's operators before the backward of its last: the optimum (Griewank and Walther, Revolve, ACM
    TOMS 26, 2000), which is that of rotor's recurrence for equal stages."""
    if length <= 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(first + fewest_runs(length - first, slots - 1) + fewest_runs(first, slots) for first in range(1, length))


@pytest.mark.truth
def test_a_chain_is_recomputed_as_seldom_as_can_be_in_any_memory() -> None:
    length, unit = 14, 4 << 16
    analysis = fxmem.analyze(Sines(length), torch.empty(1 << 16, device="meta"), target="cpu", optimizer=None)
    sines = OperatorPlanner(analysis.profile, functools.partial(survey, analysis))
    whole = sines.find("auto", None)
    assert whole is not None
    for slots in range(length - 1, 0, -1):  # as it is, all inputs are there, but that of the operator that runs last
        freed = (length - 1 - slots) * unit
        found = sines.find("auto", whole.before.requested_bytes - freed)
        assert found is not None
        again = sum(region.extra_flops or 0 for region in found.regions) // of_a_sine(analysis)
        assert again == fewest_runs(length, slots) - (length - 1)
    assert sines.find("auto", whole.before.requested_bytes - freed - unit) is None


def of_a_sine(analysis: Analysis) -> int:
    """FLOPs of one sine."""
    return next(op.flops or 0 for op in analysis.profile.ops if "sin" in op.name)


@pytest.mark.truth
def test_a_step_trained_with_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain()
    x = torch.randn(SHAPE)
    share = budgets("cpu")[1] / step("cpu").peak.requested_bytes
    plan = fxmem.plan(step("cpu"), budget=share, application="operators")
    assert any(region.frees for region in plan.regions)
    assert plan.extent.endswith("parts of the model, some more than once")
    plan.to_json(tmp_path / "plan.json")
    planned = fxmem.checkpoint(copy.deepcopy(model), fxmem.load_plan(tmp_path / "plan.json"))
    assert same(trained(model, x), trained(planned, x))


@pytest.mark.truth
def test_every_budget_down_to_the_lowest_has_a_plan_and_less_costs_more() -> None:
    with torch.device("meta"):
        model = Residual(12)
    step = {"target": "cpu", "optimizer": None, "keep_outputs": False}
    analysis = fxmem.analyze(model, torch.zeros(2048, 64, device="meta"), **step)
    found = OperatorPlanner(analysis.profile, functools.partial(survey, analysis))
    lowest, once = found._least.recomputed.peak, found._least_of_one_run.recomputed.peak
    assert lowest < 0.6 * once
    asked = [round(lowest + (once - lowest) * eighth / 8) for eighth in (1, 2, 4, 7)]
    plans = [found.plan("mincut", budget) for budget in asked]
    assert all(plan.after.requested_bytes <= budget for plan, budget in zip(plans, asked, strict=True))
    costs = [plan.extra_flops for plan in plans]
    assert costs == sorted(costs, reverse=True)
    real = apply_regions(analysis, plans[2].regions, Application.OPERATORS)
    assert 0.98 * plans[2].after.requested_bytes <= real.peak.requested_bytes <= plans[2].after.requested_bytes
