"""Where the card's rates are known, a plan is chosen by the estimated time of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

import fxmem
from fxmem.errors import ExceededError
from fxmem.hardware.step_time import step_seconds
from fxmem.planning import STRATEGIES, OperatorPlanner, Planner
from fxmem.records.plan import Plan
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.plan_search import apply_regions
from fxmem.whatif.verified_plan import survey

pytestmark = pytest.mark.truth


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@functools.cache
def layers(rows: int, target: str) -> Analysis:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Layer(64) for _ in range(4))), torch.zeros(rows, 64)
    return fxmem.analyze(model, x, target=target, optimizer=None)


@functools.cache
def resnet(target: str, blocks: int = 1) -> Analysis:
    """ResNet-18, or with a block less in each of its four stages."""
    with torch.device("meta"):
        model, x = ResNet(BasicBlock, [blocks] * 4), torch.zeros(32, 3, 128, 128)
    return fxmem.analyze(model, x, target=target, optimizer=None)


def find(analysis: Analysis, strategy: str, share: float, application: Application | None = None) -> Plan | None:
    try:
        return fxmem.plan(analysis, strategy, share, application=application)
    except ExceededError:
        return None


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (functools.partial(resnet, "h100"), 0.9),  # Python bounds the step
        (functools.partial(layers, 262_144, "rtx4090"), 0.6),  # the card does
        (functools.partial(layers, 262_144, "h100"), 0.5),
        (functools.partial(layers, 262_144, "cpu"), 0.6),  # no rates: by FLOPs
    ],
)
def test_auto_is_never_dearer_than_another_strategy_within_the_budget(
    step: Callable[[], Analysis], share: float
) -> None:
    analysis = step()
    best = find(analysis, "auto", share)
    assert best is not None
    others = {
        (strategy, application): plan
        for strategy in STRATEGIES.briefs
        for application in STRATEGIES.get(strategy).applications
        if (plan := find(analysis, strategy, share, application)) is not None
    }
    assert len(others) > 3

    def price(plan: Plan) -> float:
        return (plan.extra_flops if plan.after_seconds is None else plan.after_seconds) or 0.0

    assert {name for name, plan in others.items() if price(plan) < price(best)} == set()


@pytest.mark.parametrize("application", [Application.MODULES, Application.OPERATORS])
def test_the_time_of_a_plan_is_estimated_before_it_is_applied(application: Application) -> None:
    analysis = resnet("h100", blocks=2)
    is_taped = application is Application.OPERATORS
    planner = (
        OperatorPlanner(analysis.profile, functools.partial(survey, analysis))
        if is_taped
        else Planner(analysis.profile, application)
    )
    proposed = planner.plan("auto", round(0.9 * analysis.peak.requested_bytes))
    assert proposed.regions
    assert proposed.before_seconds is not None
    assert proposed.after_seconds is not None
    applied = apply_regions(analysis, proposed.regions, application).profile
    assert proposed.before_seconds < proposed.after_seconds
    assert proposed.after_seconds == pytest.approx(step_seconds(applied, taped=is_taped), rel=0.06)
