"""Make the plans of `planned.py` anew, where there is no card: `python -m benchmarks.accuracy.make_plans [NAME ...]`.

Made for an H200; each keeps its share of the unplanned peak there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import fxmem
from benchmarks.accuracy.cases import build, every_case, kernel_settings
from benchmarks.accuracy.planned import FOLDER, PLANNED, Planned
from fxmem.records.plan import Plan, Region
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest

CARD = "h200"


def made(planned: Planned) -> Plan:
    """The plan, made anew."""
    case = every_case()[planned.case]
    with kernel_settings(case):
        built = build(case, "meta")
        analysis = analyze_step(
            built.module,
            StepRequest(
                args=built.args,
                kwargs=built.kwargs,
                name=planned.case,
                target=CARD,
                optimizer=case.optimizer_spec,
                keep_outputs=False,
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
