"""A plan for a compiled step as text: what each `activation_memory_budget` takes, beside the plan of eager code."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.records.plan import CompilePlan
from fxmem.records.profile import Peak
from fxmem.records.units import exact_bytes, format_bytes, percent
from fxmem.show.facts import header_facts, target_facts
from fxmem.show.sections import Fact
from fxmem.show.text.tables import facts, label_content, render, ruled

_WIDE = 72
"""Columns from which on what the allocator reserves is shown."""


def table(plan: CompilePlan, *, width: int = 100, color: bool = False) -> str:
    """The plan as text whose lines are at most `width` columns wide (at least 60)."""
    left = format_bytes(plan.budget_bytes - plan.after.counted_bytes)
    found = [
        Fact("Budget", f"{exact_bytes(plan.budget_bytes)}: kept, {left} to spare"),
        *target_facts(plan, plan.after),
        Fact("Code", "from torch._functorch import config"),
        Fact("", f"config.activation_memory_budget = {plan.chosen:g}"),
    ]
    wide = width >= _WIDE
    steps = ruled("", "Step", "Peak", "of", *(["Reserved"] if wide else []), left=("", "Step"))
    for mark, name, peak in _rows(plan):
        reserved = "-" if peak.reserved_bytes is None else format_bytes(peak.reserved_bytes)
        share = percent(peak.counted_bytes, plan.eager.counted_bytes)
        steps.add_row(mark, name, format_bytes(peak.counted_bytes), share, *([reserved] if wide else []))
    parts = [facts(header_facts(plan)), label_content("Steps", steps), facts(found)]
    return render(parts, max(width, 60), color)


def _rows(plan: CompilePlan) -> Iterator[tuple[str, str, Peak]]:
    yield "", "eager", plan.eager
    if plan.plan is not None and plan.plan.regions:
        extra = plan.plan.extra_fraction
        again = "" if extra is None else f", {100 * extra:+.1f} %"
        yield "", f"eager, {plan.plan.chosen}{again}", plan.plan.after
    for point in plan.points:
        share = point.activation_memory_budget
        yield "->" if share == plan.chosen else "", f"compiled, {share:g}" if share < 1 else "compiled", point.peak
