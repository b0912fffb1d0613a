"""The `activation_memory_budget` with which a compiled step keeps a budget in bytes.

torch's setting is a share of what its partitioner estimates that could be freed, within each graph. What the step takes
at its peak does not follow from it, and may rise where less is kept: what is recomputed at once has to be somewhere. So
each share that is tried is compiled and analysed, from the largest down.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from fxmem.errors import ExceededError, UsageError
from fxmem.hardware.context import room_bytes
from fxmem.memory.budget import Budget, BudgetLike, parse_budget
from fxmem.records.plan import BudgetPoint, CompilePlan, Plan
from fxmem.records.units import exact_bytes
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif import verified_plan
from fxmem.whatif.plans.proposals import REFUSALS

_PARTS: Final = 32
"""Shares are whole numbers of this part."""
_STRIDE: Final = 4
"""Tried at first are those so many parts apart; then, by bisection, those above the first that keeps the budget."""


def plan_compiled(
    analysis: Analysis, budget: BudgetLike, progress: Callable[[str], None] = lambda _: None
) -> CompilePlan:
    """Find the largest `activation_memory_budget` whose true peak keeps the budget.

    Args:
        analysis: of a compiled training step.
        budget: bytes, or a share of the peak of the compiled step as it is.
        progress: called with a few words before each analysis.

    Raises:
        UsageError: not a compiled training step.
        ExceededError: none keeps it; says what the least is.
    """
    settings = analysis.request.compile
    if settings is None or settings.as_is or analysis.profile.step.mode != "train":
        raise UsageError("expected a training step that is compiled as a whole: --compile, with --mode train")
    limit = parse_budget(budget).resolve(analysis.peak.counted_bytes).bound(room_bytes(analysis.profile.target))
    analyses = {_PARTS: analysis}

    def keeps(share: int) -> bool:
        if share not in analyses:
            progress(f"compiling with activation_memory_budget={share / _PARTS:g}")
            changed = settings.model_copy(update={"activation_memory_budget": share / _PARTS})
            analyses[share] = analysis.vary(compile=changed)
        found = analyses[share]
        return limit.keeps(found.profile, found.peak, os.environ)

    chosen = next(filter(keeps, range(_PARTS, -1, -_STRIDE)), None)
    if chosen is None:
        least = min(analyses, key=lambda share: analyses[share].peak.counted_bytes)
        raise ExceededError(
            f"expected a compiled step within {exact_bytes(limit.nbytes)}; the least, with "
            f"activation_memory_budget={least / _PARTS:g}, is {exact_bytes(analyses[least].peak.counted_bytes)}: "
            "a smaller batch, or fxmem plan without --compile"
        )
    above = min(chosen + _STRIDE, _PARTS)
    while above - chosen > 1:
        middle = (chosen + above) // 2
        chosen, above = (middle, above) if keeps(middle) else (chosen, middle)
    progress("analysing and planning the step that is not compiled")
    eager = analysis.vary(compile=None)
    points = [
        BudgetPoint(activation_memory_budget=share / _PARTS, peak=analyses[share].peak)
        for share in sorted(analyses, reverse=True)
    ]
    return CompilePlan(
        **analysis.profile.heading(),
        budget_bytes=limit.stated_bytes,
        eager=eager.peak,
        plan=_plan_eager(eager, limit, progress),
        chosen=chosen / _PARTS,
        points=tuple(points),
        assumptions=analyses[chosen].profile.assumptions,
    )


def _plan_eager(eager: Analysis, limit: Budget, progress: Callable[[str], None]) -> Plan | None:
    try:
        return verified_plan.plan(eager, "auto", limit, progress=progress)
    except REFUSALS:
        return None
