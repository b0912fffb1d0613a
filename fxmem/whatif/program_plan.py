"""Checkpoint plans for a program: each is tried by running the program again with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fxmem.errors import AnalysisError
from fxmem.memory.budget import BudgetLike, parse_budget
from fxmem.planning import Planner, allowed_applications, estimate
from fxmem.records.names import Application
from fxmem.records.plan import Plan, Region
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.whatif.plans.plan_search import PlanSearch
from fxmem.whatif.plans.proposals import PlannedWay, check_training
from fxmem.whatif.program_edits import AS_IT_IS, ProgramEdits


def plan_program(
    run: Callable[[ProgramEdits], ProfiledStep],
    strategy: str = "auto",
    budget: BudgetLike | None = None,
    *,
    application: Application | str | None = None,
    edits: ProgramEdits = AS_IT_IS,
    before: ProfiledStep | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Plan, ProfiledStep]:
    """`fxmem.plan` for a program: of whole modules of one of its models, named as that model names them.

    Args:
        run: runs the program with edits.
        edits: what is changed besides, in the step without a plan as well.
        before: that step, where it has run already.
        strategy, budget, application, progress: as for `fxmem.plan`.

    Returns:
        The plan, and the step without it.

    Raises:
        UsageError: the program does not train, or would need a plan of several models; an argument that cannot be
            understood.
        AnalysisError: the program raised.
        ExceededError: no plan keeps the budget.
    """
    tell = progress or (lambda _: None)
    ways = allowed_applications(strategy, estimate.check_program_application(application))
    if before is None:
        tell("running the program as it is")
        before = run(edits)
    check_training(before)

    def run_planned(regions: tuple[Region, ...], _: Application) -> ProfiledStep:
        planned = run(dataclasses.replace(edits, regions=regions))
        if regions and not planned.profile.recomputed_ops:
            raise AnalysisError(f"the program, run again, did not recompute {estimate.find_root(regions)}")
        return planned

    search = PlanSearch(
        before,
        run_planned,
        None,
        strategy,
        None if budget is None else parse_budget(budget).resolve(before.peak.counted_bytes),
        tuple(PlannedWay(way, Planner(before.profile, way)) for way in ways),
        tell,
    )
    return estimate.name_in_model(search.run()), before
