"""Checkpoint plans for some of the measured steps, made where there is no card: `python benchmarks/planned.py` writes
them to benchmarks/plans.

They are kept, because a plan is what a user brings to the card: `gpu.py` applies each to its model, measures the step
with it as any other, and times it beside the step without. Made for an H200; each keeps its share of the unplanned peak
there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fxmem
from fxmem.planning import OperatorPlanner
from fxmem.records.names import Application
from fxmem.records.plan import Plan, Region
from fxmem.simulation.analysis import analyze_step
from fxmem.simulation.request import StepRequest
from fxmem.whatif import verified_plan

__all__ = ["CARD", "FOLDER", "PLANNED", "Planned", "made", "of_any_size", "plan_of"]

FOLDER = Path(__file__).parent / "plans"
CARD = "h200"


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


def made(planned: Planned) -> Plan:
    """It, made anew."""
    from cases import build, every_case, kernel_settings

    case = every_case()[planned.case]
    with kernel_settings(case):
        built = build(case, "meta")
        analysis = analyze_step(
            built.module,
            StepRequest(
                args=built.args, kwargs=built.kwargs, name=planned.case, target=CARD, optimizer=case.optimizer_spec
            ),
        )
        return fxmem.plan(analysis, budget=planned.budget, application=planned.application)


def _portable(plan: Plan) -> Plan:
    """Without places in source, which are paths on this machine."""
    return plan.model_copy(update={"regions": tuple(_placeless(region) for region in plan.regions)})


def _placeless(region: Region) -> Region:
    return region.model_copy(
        update={"source": None, "edit": None, "regions": tuple(_placeless(inner) for inner in region.regions)}
    )


def main(names: Sequence[str]) -> int:
    """Make the plans of which the name contains one of these, or all."""
    FOLDER.mkdir(exist_ok=True)
    for planned in PLANNED:
        if names and not any(name in planned.name for name in names):
            continue
        plan = _portable(made(planned))
        plan.to_json(FOLDER / f"{planned.name}.json")
        share = (plan.after.allocated_bytes or 0) / (plan.before.allocated_bytes or 1)
        print(
            f"{planned.name}: {plan.chosen}, {plan.extent}; {share:.1%} of the peak, "
            f"+{plan.extra_fraction or 0:.2%} "
            f"of the forward's FLOPs"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
