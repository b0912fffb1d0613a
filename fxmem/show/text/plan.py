"""A checkpoint plan as text: its effect, its regions, and the curve it was chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from fxmem.memory.module_tree import find_runs, mask_numbers, name_alike
from fxmem.records.plan import CompilePlan, CurvePoint, Plan, Region
from fxmem.records.profile import Peak, SourceLine
from fxmem.records.units import exact_bytes, format_bytes, format_flops, percent, printable
from fxmem.show.facts import header_facts, target_facts
from fxmem.show.plan_facts import effect_facts, effect_table, format_change, summarize
from fxmem.show.sections import Fact, Section
from fxmem.show.text.tables import facts, fit, fit_left, label_content, lay_out_sections, note, numbered, render, ruled

_PLACES = 34
"""Columns that a region's name needs; what is left is its source line's."""


def table(plan: Plan, *, width: int = 100, color: bool = False) -> str:
    """The plan as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    effect = Section(effect_table(plan.before, plan.after, plan), list(effect_facts(plan)), label="Effect")
    parts = [facts([*header_facts(plan), Fact("Plan", summarize(plan))]), *lay_out_sections([effect])]
    if plan.curve:
        chosen = "->: the plan below, with the smallest product of peak and FLOPs."
        parts += [label_content("Curve", _curve(plan, width)), note(f"Extra: forward FLOPs run again. {chosen}")]
    if plan.regions:
        parts.append(label_content("Regions", _regions(plan.regions, width)))
        if plan.application == "operators":
            made = "Made: saved tensors that backward recomputes; your Python code does not run twice."
            sent = "Sent: those that wait in the host's memory until then."
            parts.append(note(f"{made}{f' {sent}' if plan.host_bytes else ''}"))
        if any(region.keeps for region in plan.regions):
            products = "results of so many products (matrix products, convolutions, attention)"
            parts.append(note(f"Keeps: {products}, which then do not run again."))
    own = [assumption.text for assumption in plan.assumptions if assumption.topic == "plan"]
    if own:
        parts.append(numbered("Assumed", own))
    return render(parts, width, color)


def _curve(plan: Plan, width: int) -> Table:
    wide = width >= 100
    more = [("Reserved", 9), ("Step", 8)] if wide else []
    room = min(width - 59 - (21 if wide else 0), 24)
    columns = [("", 2), ("Peak", 9), ("of", 7), *more, ("Extra", 8), ("Regions", 7), ("Plan", room)]
    points = ruled(*columns, left=("Plan",))
    for point in plan.curve:
        used, reserved = point.peak.counted_bytes, point.peak.reserved_bytes
        is_chosen = used == plan.after.counted_bytes and point.regions == plan.regions
        is_timed = plan.before_seconds and point.step_seconds
        time = format_change(plan.before_seconds or 0.0, point.step_seconds or 0.0) if is_timed else "-"
        points.add_row(
            "->" if is_chosen else "",
            format_bytes(used),
            percent(used, plan.before.counted_bytes),
            *(["-" if reserved is None else format_bytes(reserved), time] if wide else []),
            _format_extra(point, plan.forward_flops),
            str(len(point.regions)),
            f"{point.strategy}, {point.application.value}" if point.regions else "no checkpoints",
        )
    return points


def _format_extra(point: CurvePoint, forward: int | None) -> str:
    if point.extra_flops is None:
        return "unknown"
    return f"{100 * point.extra_flops / forward:+.1f} %" if forward else format_flops(point.extra_flops)


# --- regions ----------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """Equal regions, one after another, and their sums."""

    name: str
    freed: int
    flops: int | None
    source: SourceLine | None
    level: int
    keeps: int = 0
    sent: int = 0
    times: int = 1


def _regions(regions: Sequence[Region], width: int) -> Table:
    remade = any(region.remakes for region in regions)
    selective = remade or any(region.keeps for region in regions)
    offloaded = any(region.offloads for region in regions)
    room = width - 12 - 2 * 11 - 6 - 7 * (selective + offloaded)
    places = max(_PLACES, room // 2) if room > 2 * _PLACES else room
    beside = room - places - 2 if places < room else 0
    more = [("Made" if remade else "Keeps", 5)] * selective + [("Sent", 5)] * offloaded
    from_where = [("From", beside)] if beside else []
    columns = [("Region", places), ("Frees", 9), ("Runs again", 10), *more, *from_where]
    rows = ruled(*columns, left=("Region", "From"))
    for line in _fold_lines(list(_lines(regions))):
        name = f"{'  ' * line.level}{printable(line.name)}"
        times = f"  x{line.times}" if line.times > 1 else ""
        place = "" if line.source is None else printable(f"{line.source.file}:{line.source.line}")
        cells = [
            fit(name, places - len(times)) + times,
            format_bytes(line.freed),
            format_flops(line.flops),
            *([str(line.keeps or "")] if selective else []),
            *([str(line.sent or "")] if offloaded else []),
        ]
        rows.add_row(*map(Text, cells), *([Text(fit_left(place, beside), style="dim")] if beside else []))
    return rows


def _lines(regions: Iterable[Region], level: int = 0) -> Iterator[_Line]:
    for region in regions:
        counts = len(region.remakes or region.keeps), len(region.offloads)
        yield _Line(region.title, region.freed_bytes, region.extra_flops, region.source, level, *counts)
        yield from _lines(region.regions, level + 1)


def _fold_lines(lines: Sequence[_Line]) -> Iterator[_Line]:
    """Make one line of lines that differ only in the numbers of their names, with their sums."""
    for start, _, count in find_runs([line._replace(name=mask_numbers(line.name)) for line in lines]):
        first = lines[start]
        yield first._replace(
            name=name_alike([line.name for line in lines[start : start + count]]),
            times=count,
            freed=count * first.freed,
            flops=None if first.flops is None else count * first.flops,
            keeps=count * first.keeps,
            sent=count * first.sent,
        )


# --- a plan for a compiled step as text -------------------------------------------------------------------------------
# What each `activation_memory_budget` takes, beside the plan of eager code.


_WIDE = 72
"""Columns from which on what the allocator reserves is shown."""


def budget_table(plan: CompilePlan, *, width: int = 100, color: bool = False) -> str:
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
    return render([facts(header_facts(plan)), label_content("Steps", steps), facts(found)], max(width, 60), color)


def _rows(plan: CompilePlan) -> Iterator[tuple[str, str, Peak]]:
    yield "", "eager", plan.eager
    if plan.plan is not None and plan.plan.regions:
        extra = plan.plan.extra_fraction
        again = "" if extra is None else f", {100 * extra:+.1f} %"
        yield "", f"eager, {plan.plan.chosen}{again}", plan.plan.after
    for point in plan.points:
        share = point.activation_memory_budget
        yield "->" if share == plan.chosen else "", f"compiled, {share:g}" if share < 1 else "compiled", point.peak
