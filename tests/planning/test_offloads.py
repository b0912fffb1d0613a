"""Plans that leave results in the host's memory: what they estimate, and what their analysis finds."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import UsageError
from fxmem.hardware.step_time import step_seconds
from fxmem.planning import HostLink, OffloadPlanner, OperatorPlanner
from fxmem.planning.operators.offloads import OffloadChoices, pinned_bytes
from fxmem.records.plan import Plan
from fxmem.records.units import format_bytes
from fxmem.show.text.fits import fits_table
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif import card_fit
from fxmem.whatif.advice.changes import ModelBench
from fxmem.whatif.plan_search import apply_regions
from fxmem.whatif.verified_plan import survey

GIB = 1 << 30
ROWS, WIDTH = 16384, 2048


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(x)))


@functools.cache
def layers(target: str = "rtx4090") -> Analysis:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Layer() for _ in range(6))), torch.zeros(ROWS, WIDTH)
    return fxmem.analyze(model, x, target=target, optimizer=None)


@functools.cache
def planner() -> OperatorPlanner:
    return OperatorPlanner(layers().profile, functools.partial(survey, layers()))


def with_host(nbytes: int = 64 * GIB, rate: float = 26e9) -> OffloadPlanner:
    return OffloadPlanner(planner(), HostLink(nbytes, rate))


def sent(plan: Plan) -> int:
    return sum(len(region.offloads) for region in plan.regions)


@pytest.mark.parametrize("share", [0.85, 0.7, 0.6])
def test_the_estimated_peak_is_that_of_the_analysis(share: float) -> None:
    budget = int(share * layers().peak.requested_bytes)
    plan = with_host().find("auto", budget)
    assert plan is not None
    assert sent(plan)
    analysed = apply_regions(layers(), plan.regions, plan.application)
    assert analysed.peak.requested_bytes == plan.after.requested_bytes <= budget
    seconds = step_seconds(analysed.profile, taped=True)
    assert plan.after_seconds == pytest.approx(seconds, rel=0.1)


def test_results_wait_in_pinned_memory_of_powers_of_two() -> None:
    assert [pinned_bytes(nbytes) for nbytes in (1, 2, 3, 1 << 20, (1 << 20) + 1)] == [1, 2, 4, 1 << 20, 1 << 21]
    plan = with_host().find("auto", int(0.8 * layers().peak.requested_bytes))
    assert plan is not None
    results = ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4  # both are powers of two
    assert plan.host_bytes % min(results) == 0
    assert sent(plan) * min(results) <= plan.host_bytes <= sent(plan) * max(results)


def test_no_more_waits_there_than_there_is_memory() -> None:
    most, budget = ROWS * 4 * WIDTH * 4, int(0.7 * layers().peak.requested_bytes)
    plan, freely = with_host(nbytes=most).find("auto", budget), with_host().find("auto", budget)
    assert plan is not None
    assert freely is not None
    assert 0 < plan.host_bytes <= most < freely.host_bytes


def test_the_step_waits_no_longer_than_it_may() -> None:
    choices = OffloadChoices(planner()._cutter, HostLink(64 * GIB, 26e9))
    step = step_seconds(layers().profile, taped=True)
    assert step is not None
    hidden, any_wait = choices.choose(0.0, 0.01 * step), choices.choose(0.0, float("inf"))
    assert hidden.waited_seconds <= 0.01 * step < any_wait.waited_seconds
    assert 0 < sum(hidden.freed) < sum(any_wait.freed)
    slower = OffloadChoices(planner()._cutter, HostLink(64 * GIB, 2.6e9)).choose(0.0, 0.01 * step)
    assert sum(slower.freed) < sum(hidden.freed)


def test_no_more_is_offloaded_than_the_budget_asks_for() -> None:
    choices, peak = OffloadChoices(planner()._cutter, HostLink(64 * GIB, 26e9)), layers().peak.requested_bytes
    found = [len(choices.choose(share * peak, float("inf")).values) for share in (1.0, 0.9, 0.7, 0.5)]
    assert found[0] == 0
    assert found == sorted(set(found))


def test_the_plan_is_the_quicker_of_those_with_and_without() -> None:
    budget = "60%"
    without, found = (fxmem.plan(layers(), budget=budget, host_memory=each) for each in (None, "64GiB"))
    assert found.after_seconds <= without.after_seconds  # type: ignore[operator]
    assert without.host_bytes == 0
    assert sent(found)
    assert found.extra_flops < without.extra_flops  # type: ignore[operator]
    assert any("pinned memory" in each.text for each in found.assumptions)
    assert not any("pinned memory" in each.text for each in without.assumptions)
    read = Plan.model_validate_json(found.to_json())
    assert [each.offloads for each in read.regions] == [each.offloads for each in found.regions]
    assert read.host_bytes == found.host_bytes > 0
    assert "in the host's memory" in found.extent


def test_a_step_with_copies_repeats_itself() -> None:
    """The allocator's replay of a loop settles: each step allocates as the one before."""
    plan = fxmem.plan(layers(), budget="60%", host_memory="64GiB")
    assert plan.after.reserved_bytes is not None
    assert plan.after.reserved_bytes < plan.before.reserved_bytes  # type: ignore[operator]


@pytest.mark.truth
def test_advice_and_cards_offer_the_host_s_memory() -> None:
    bench = ModelBench(layers(), "64GiB")
    plan = bench.plan(None, "auto", "60%", lambda _: None)
    assert plan.host_bytes > 0
    assert "host_memory='64GiB'" in bench.plan_code(plan, 1 << 30)[0]
    with torch.device("meta"):
        model, x = nn.Sequential(*(Layer() for _ in range(6))), torch.zeros(int(5.7 * ROWS), WIDTH)
    without, with_host = (
        card_fit.cards(model, x, optimizer=None, keep_outputs=False, names=["rtx4090"], plans=True, host_memory=each)
        for each in (None, "64GiB")
    )
    alone, found = without.points[0].plan, with_host.points[0].plan
    assert alone is not None
    assert found is not None
    assert found.host_bytes > alone.host_bytes == 0
    assert found.after_seconds < alone.after_seconds  # type: ignore[operator]
    text = fits_table(with_host, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert f"{format_bytes(found.host_bytes)} wait in pinned memory" in " ".join(text.split())
    assert "pinned" not in fits_table(without, width=80)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fxmem.plan(layers(), budget="60%", host_memory="40%"), "expected host memory in bytes or with a unit"),
        (lambda: fxmem.plan(layers(), budget="60%", host_memory="much"), "expected host memory as bytes"),
        (
            lambda: fxmem.plan(layers(), budget="60%", host_memory="8GiB", application="modules"),
            "expected host memory with application 'operators'",
        ),
        (lambda: fxmem.plan(layers("cpu"), budget="60%", host_memory="8GiB"), "expected a card whose rates are known"),
        (
            lambda: fxmem.plan(lambda: None, budget="60%", host_memory="8GiB"),
            "plans of a program are about its modules",
        ),
        (lambda: fxmem.advise(lambda: None, host_memory="8GiB"), "plans of a program are about its modules"),
        (lambda: fxmem.cards(Layer(), torch.zeros(8, WIDTH), host_memory="8GiB"), "expected host_memory with plans"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(make: Callable[[], Plan], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
