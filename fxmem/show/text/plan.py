"""A checkpoint plan as text: its effect, its regions, and the curve it was chosen from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.memory.module_tree import find_runs
from fxmem.records.plan import Certificate, CurvePoint, Plan, Region
from fxmem.records.profile import Peak, SourceLine
from fxmem.records.units import exact_bytes, format_bytes, format_flops, format_seconds, percent, printable
from fxmem.show.facts import header_facts
from fxmem.show.sections import Fact
from fxmem.show.text.tables import RULED, add_facts, facts, fit, fit_left, item_list, label_content, note, render

_PLACES = 34
"""Columns that a region's name needs; what is left is its source line's."""


def table(plan: Plan, *, width: int = 100, color: bool = False) -> str:
    """The plan as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    parts: list[RenderableType] = [facts([*header_facts(plan), Fact("Plan", _summary(plan))]), _effect(plan)]
    if plan.curve:
        parts.append(label_content("Curve", _curve(plan, width)))
        parts.append(
            note("Extra: forward FLOPs run again. ->: the plan below, with the smallest product of peak and FLOPs.")
        )
    if plan.regions:
        parts.append(label_content("Regions", _regions(plan.regions, width)))
        if plan.application == "operators":
            made = "Made: so many results, saved for backward, are recomputed when it asks for them. Nothing of the "
            sent = "Sent: so many wait in the host's memory until then."
            parts.append(note(f"{made}program runs twice.{f' {sent}' if plan.host_bytes else ''}"))
        if any(region.keeps for region in plan.regions):
            products = "results of so many products (matrix products, convolutions, attention)"
            parts.append(note(f"Keeps: {products}, which then do not run again."))
    own = [assumption.text for assumption in plan.assumptions if assumption.topic == "plan"]
    if own:
        parts.append(item_list("Assumed", [(f"{number}.", printable(text)) for number, text in enumerate(own, 1)]))
    return render(parts, width, color)


def _summary(plan: Plan) -> str:
    if not plan.regions:
        return "none needed: the step keeps the budget as it is" if plan.budget_bytes is not None else "no checkpoints"
    strategy = plan.chosen if plan.chosen == plan.strategy else f"{plan.strategy}: {plan.chosen}"
    return f"{strategy}, {plan.extent}"


def _effect(plan: Plan) -> Table:
    """The four numbers before and after, and what it costs."""
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("", "Before", "After", "Change"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    quantities = [
        ("Peak requested", "requested_bytes"),
        ("Peak allocated", "allocated_bytes"),
        ("Peak reserved", "reserved_bytes"),
    ]
    for label, name in quantities:
        before, after = getattr(plan.before, name), getattr(plan.after, name)
        if before is not None and after is not None:
            table.add_row(label, format_bytes(before), format_bytes(after), _change(before, after))
    if plan.forward_flops is not None and plan.extra_flops is not None:
        whole = plan.forward_flops
        table.add_row(
            "Forward FLOPs",
            format_flops(whole),
            format_flops(whole + plan.extra_flops),
            _change(whole, whole + plan.extra_flops),
        )
    if plan.before_seconds and plan.after_seconds:
        table.add_row(
            "Step time",
            format_seconds(plan.before_seconds),
            format_seconds(plan.after_seconds),
            _change(plan.before_seconds, plan.after_seconds),
        )
    if plan.host_bytes:
        table.add_row("Host memory", format_bytes(0), format_bytes(plan.host_bytes), "pinned")
    return add_facts(label_content("Effect", table), _effect_facts(plan))


def _effect_facts(plan: Plan) -> Iterator[Fact]:
    if plan.extra_flops is None and plan.regions:
        yield Fact("Extra", "FLOPs unknown: an operator that runs again has no formula")
    if plan.budget_bytes is not None:
        spare = plan.budget_bytes - plan.after.counted_bytes
        kept = f"kept, {format_bytes(spare)} to spare" if spare >= 0 else "exceeded"
        yield Fact("Budget", f"{exact_bytes(plan.budget_bytes)}: {kept}", tone="good" if spare >= 0 else "bad")
    if plan.certificate is not None:
        yield Fact("Proof", _proof(plan, plan.certificate))
    if not plan.analysed:
        yield Fact("Note", "an estimate from the report: the plan has not been applied and analysed again")


def _proof(plan: Plan, certificate: Certificate) -> str:
    """The certificate in a sentence."""
    those = "checkpoints of whole modules" if certificate.application == "modules" else "checkpoints"
    if certificate.lower_bound_flops is None:
        return f"no {those} keep {exact_bytes(certificate.budget_bytes)}: this plan's peak is an estimate, and too low"
    if certificate.optimal:
        return f"no {those} within the same peak run fewer FLOPs again"
    least = _share(certificate.lower_bound_flops, plan.forward_flops)
    bound = f"any {those} within the same peak run at least {least} of FLOPs again"
    if certificate.gap_flops is not None:
        bound += f"; this plan is within {_share(certificate.gap_flops, plan.forward_flops)} of the cheapest"
    return bound + ("" if certificate.complete else "; the search ended at its limit, a longer one may prove more")


def _share(flops: int, forward: int | None) -> str:
    return f"{100 * flops / forward:.1f} %" if forward else format_flops(flops)


def _change(before: float, after: float) -> str:
    return f"{100 * (after - before) / before:+.1f} %" if before else ""


def _curve(plan: Plan, width: int) -> Table:
    wide = width >= 100
    points = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    more = [("Reserved", 9), ("Step", 8)] if wide else []
    for heading, size in (("", 2), ("Peak", 9), ("of", 7), *more, ("Extra", 8), ("Regions", 7)):
        points.add_column(heading, width=size, justify="right", no_wrap=True)
    points.add_column(
        "Plan", width=min(width - 2 - 12 - sum((2, 9, 7, 8, 7)) - 2 * 6 - (21 if wide else 0), 24), no_wrap=True
    )
    whole = plan.before.counted_bytes
    for point in plan.curve:
        used, reserved = point.peak.counted_bytes, point.peak.reserved_bytes
        time = _change(plan.before_seconds, point.step_seconds) if plan.before_seconds and point.step_seconds else "-"
        points.add_row(
            "->" if _is_same_peak(point.peak, plan.after) and point.regions == plan.regions else "",
            format_bytes(used),
            percent(used, whole),
            *(["-" if reserved is None else format_bytes(reserved), time] if wide else []),
            _format_extra(point, plan.forward_flops),
            str(len(point.regions)),
            f"{point.strategy}, {point.application.value}" if point.regions else "no checkpoints",
        )
    return points


def _is_same_peak(one: Peak, other: Peak) -> bool:
    return one.counted_bytes == other.counted_bytes


def _format_extra(point: CurvePoint, forward: int | None) -> str:
    if point.extra_flops is None:
        return "unknown"
    return f"{100 * point.extra_flops / forward:+.1f} %" if forward else format_flops(point.extra_flops)


# --- regions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Equal regions, one after another."""

    name: str
    freed: int
    flops: int | None
    source: SourceLine | None
    level: int
    keeps: int = 0
    sent: int = 0
    count: int = 1


def _regions(regions: Sequence[Region], width: int) -> Table:
    rows = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    remade = any(region.remakes for region in regions)
    selective = remade or any(region.keeps for region in regions)
    offloaded = any(region.offloads for region in regions)
    room = width - 12 - 2 * 11 - 6 - 7 * (selective + offloaded)
    places = max(_PLACES, room // 2) if room > 2 * _PLACES else room
    rows.add_column("Region", width=places, no_wrap=True)
    rows.add_column("Frees", width=9, justify="right", no_wrap=True)
    rows.add_column("Runs again", width=10, justify="right", no_wrap=True)
    if selective:
        rows.add_column("Made" if remade else "Keeps", width=5, justify="right", no_wrap=True)
    if offloaded:
        rows.add_column("Sent", width=5, justify="right", no_wrap=True)
    beside = room - places - 2 if places < room else 0
    if beside:
        rows.add_column("From", width=beside, no_wrap=True)
    for line in _fold_lines(list(_lines(regions))):
        name = f"{'  ' * line.level}{printable(line.name)}"
        times = f"  x{line.count}" if line.count > 1 else ""
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
        yield _Line(
            region.title,
            region.freed_bytes,
            region.extra_flops,
            region.source,
            level,
            len(region.remakes or region.keeps),
            len(region.offloads),
        )
        yield from _lines(region.regions, level + 1)


def _fold_lines(lines: Sequence[_Line]) -> Iterator[_Line]:
    """Make one line of lines that differ only in the numbers of their names."""
    keys = [(re.sub(r"\d+", "#", line.name), replace(line, name="")) for line in lines]
    for start, _, count in find_runs(keys):
        first, last = lines[start], lines[start + count - 1]
        yield first if count == 1 else replace(first, name=_span(first.name, last.name), count=count)


def _span(first: str, last: str) -> str:
    """`layers.0.mlp` and `layers.31.mlp` are `layers.0-31.mlp`."""
    pairs = zip(re.split(r"(\d+)", first), re.split(r"(\d+)", last), strict=True)
    return "".join(one if one == other else f"{one}-{other}" for one, other in pairs)
