"""The optimizer within backward: the same weights to the bit, the predicted peak, and what cannot go with it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fxmem
from fxmem.errors import ExceededError, UsageError
from fxmem.records.profile import Kind
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def train(
    optimizer: Callable[[list[dict[str, Any]]], Optimizer],
    *,
    release: bool = True,
    backwards: int = 1,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
    scaler: torch.amp.GradScaler | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Four steps with two learning rates and a schedule."""
    model, generator = small(), torch.Generator().manual_seed(1)
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": 0.01 * dim} for dim in (1, 2)]
    stepper = optimizer(groups)
    if release:
        fxmem.release_gradients(stepper)
    schedule = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.9)
    for _ in range(4):
        for _ in range(backwards):
            loss = model(torch.randn(3, 8, generator=generator)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        before_step(model)
        stepper.step() if scaler is None else scaler.step(stepper)
        stepper.zero_grad()
        schedule.step()
    return model, stepper


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_weights_and_states_are_those_of_the_ordinary_loop_to_the_bit(form: dict[str, bool]) -> None:
    plain, ordinary = train(lambda groups: torch.optim.AdamW(groups, **form), release=False)
    model, stepper = train(lambda groups: torch.optim.AdamW(groups, **form))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.state_dict().keys() == plain.state_dict().keys()
    expected, found = ordinary.state_dict(), stepper.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert all(torch.equal(found["state"][index][name], value) for name, value in state.items())


def test_what_was_loaded_is_stepped_and_what_was_removed_is_not() -> None:
    model = small()
    stepper = torch.optim.AdamW(model.parameters())
    handle = fxmem.release_gradients(stepper)
    model(torch.ones(2, 8)).sum().backward()
    stepper.load_state_dict(copy.deepcopy(stepper.state_dict()))
    model(torch.ones(2, 8)).sum().backward() if not stepper.step() else None
    assert {int(state["step"]) for state in stepper.state.values()} == {2}
    handle.remove()
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(2, 8)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "loop",
    [
        {"before_step": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)},
        {"backwards": 2},
        {"scaler": torch.amp.GradScaler("cpu")},
    ],
    ids=["clipping", "accumulation", "scaler"],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_that_needs_all_gradients_is_refused(loop: dict[str, Any], fused: bool) -> None:
    with pytest.raises(UsageError, match="clipping by global norm, GradScaler and accumulation need all of them"):
        train(lambda groups: torch.optim.AdamW(groups, fused=fused), **loop)


class Counting(Optimizer):
    """Keeps one number for all parameters, as those that learn their own rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"steps": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1


def test_optimizers_that_cannot_step_one_parameter_at_a_time() -> None:
    model = small()
    with pytest.raises(UsageError, match=r"LBFGS calls the model again"):
        fxmem.release_gradients(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="found none"):
        fxmem.release_gradients(torch.optim.SGD([torch.zeros(2)]))
    stepper = torch.optim.SGD(model.parameters())
    fxmem.release_gradients(stepper)
    with pytest.raises(UsageError, match="steps within backward already"):
        fxmem.release_gradients(stepper)
    with pytest.raises(UsageError, match="its step changes 'steps' of all parameters together"):
        train(lambda groups: Counting(groups))


# --- its memory -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(4)))


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum()


@pytest.mark.parametrize("optimizer", ["adamw:in-backward", "adamw:fused,in-backward", "adafactor:in-backward"])
def test_the_peak_is_what_a_real_run_has(optimizer: str) -> None:
    x = torch.randn(8, 64)
    analysis = fxmem.analyze(deep(), x, optimizer=optimizer, loss=squares, target="cpu")
    measured = measure_cpu(deep(), StepRequest(args=(x,), optimizer=optimizer, loss=squares))
    assert 0 <= measured.peak_without_scratch_bytes - analysis.peak.requested_bytes <= 8
    assert measured.retained_bytes == 0
    assert measured.resident_by_kind[Kind.OPTIMIZER_STATE] == analysis.peak.by_kind[Kind.OPTIMIZER_STATE]
    assert Kind.GRADIENT not in analysis.peak.by_kind
    ordinary = fxmem.analyze(deep(), x, optimizer=optimizer.partition(":")[0], loss=squares, target="cpu")
    assert ordinary.peak.requested_bytes - analysis.peak.requested_bytes > 0.5 * ordinary.peak.by_kind[Kind.GRADIENT]
    assert analysis.profile.step.optimizer == f"{ordinary.profile.step.optimizer} within backward"


@pytest.mark.truth
def test_a_plan_on_top_of_it_keeps_its_promise() -> None:
    x = torch.randn(512, 64)
    analysis = fxmem.analyze(deep(), x, optimizer="adamw:in-backward", loss=squares, target="cpu")
    plan = fxmem.plan(analysis, budget=0.7)
    measured = measure_cpu(
        fxmem.checkpoint(deep(), plan), StepRequest(args=(x,), optimizer="adamw:in-backward", loss=squares)
    )
    assert plan.regions
    assert measured.peak_without_scratch_bytes == plan.after.requested_bytes <= 0.7 * analysis.peak.requested_bytes


def test_micro_batches_are_refused_before_they_are_analysed() -> None:
    with pytest.raises(UsageError, match="accumulate=1 with an optimizer that steps within backward"):
        fxmem.analyze(deep(), torch.zeros(4, 64), optimizer="adamw:in-backward", accumulate=2)
    with pytest.raises(UsageError, match="no option 'in-backwards'; closest: in-backward"):
        fxmem.analyze(deep(), torch.zeros(4, 64), optimizer="adamw:in-backwards")


def test_a_refused_plan_names_it_where_it_keeps_the_budget() -> None:
    wide = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    analysis = fxmem.analyze(wide, torch.zeros(8, 256), optimizer="sgd", target="cpu")
    alone = analysis.vary(optimizer="sgd:in-backward").peak.requested_bytes
    with pytest.raises(ExceededError, match=re.escape("within backward (fxmem.release_gradients) takes")) as refused:
        fxmem.plan(analysis, budget=alone)
    assert "which is within it" in str(refused.value)
    with pytest.raises(ExceededError, match=r"in optimizer .*; a plan with the same optimizer within") as refused:
        fxmem.plan(fxmem.analyze(deep(), torch.zeros(32, 64), target="cpu"), budget=0.87, application="modules")
    assert "which is within it" in str(refused.value)
