"""Checkpoint plans for some of the measured steps, which `make_plans.py` made where there is no card.

They are kept in benchmarks/accuracy/plans, because a plan is what a user brings to the card: `gpu.py` applies each to
its model, measures the step with it as any other, and times it beside the step without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import fxmem
from fxmem.planning import OperatorPlanner
from fxmem.records.plan import Plan
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif import verified_plan

__all__ = ["FOLDER", "PLANNED", "Planned", "of_any_size", "plan_of"]

FOLDER = Path(__file__).parent / "plans"


@dataclass(frozen=True)
class Planned:
    """A plan for a case."""

    case: str
    budget: float
    """Share of the unplanned peak."""
    application: Application

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.case.replace('/', '-')}-{self.application.value}"


PLANNED = tuple(
    Planned(case, budget, application)
    for case, budget, applications in (
        ("tv/resnet50/train", 0.6, tuple(Application)),
        ("tv/densenet121/train", 0.5, (Application.OPERATORS,)),
        ("timm/vit_base_patch16_224/train", 0.6, (Application.OPERATORS, Application.MODULES)),
        ("hf/gpt2/train-bf16-weights", 0.7, (Application.OPERATORS, Application.MODULES)),
        ("hf/llama-8b-2layers/train-bf16-weights", 0.92, (Application.OPERATORS, Application.MODULES)),
    )
    for application in applications
)


def plan_of(name: str) -> Plan:
    """The kept one of that name."""
    return fxmem.load_plan(FOLDER / f"{name}.json")


def of_any_size(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], application: Application
) -> Plan:
    """A plan for the training step of a model on the CPU that makes a lot again, whatever its size."""
    analysis = analyze_step(model, StepRequest(args=args, kwargs=kwargs, name="tiny", target="cpu", optimizer=None))
    if application is Application.OPERATORS:
        return OperatorPlanner(analysis.profile, lambda: verified_plan.survey(analysis)).smallest()
    return fxmem.plan(analysis, "sqrt", application=application)
