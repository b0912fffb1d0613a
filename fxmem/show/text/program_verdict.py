"""A recorded program beside a real run of it, round by round, as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from fxmem.records.units import format_bytes, printable
from fxmem.records.validation import ProgramVerdict
from fxmem.show.text.tables import RULED, facts, item_list, render
from fxmem.show.text.verdict import LABELS, describe_machine


def table(verdict: ProgramVerdict, *, width: int = 80, color: bool = False) -> str:
    """The verdict as text whose lines are at most `width` columns wide, at least 80."""
    return render(_parts(verdict), max(width, 80), color)


def _parts(verdict: ProgramVerdict) -> Iterator[RenderableType]:
    measured = verdict.measurement
    yield facts(
        [
            ("Program", f"{printable(verdict.program)}, predicted for {verdict.target}"),
            ("Measured", f"on {describe_machine(measured.machine)}"),
            ("Runs", f"predicted: {printable(verdict.ending)}; measured: {printable(measured.ending)}"),
        ]
    )
    yield _rounds(verdict)
    if measured.notes:
        yield item_list("Not shown", [("", printable(note)) for note in measured.notes])
    errors = [each.error for found in verdict.rounds for each in found.comparisons if each.quantity is verdict.judged]
    worst = max(map(abs, errors), default=0.0)
    within, sign = ("within", "<=") if worst <= verdict.tolerance else ("NOT within", ">")
    counts = len(verdict.rounds), len(measured.rounds)
    missing = "" if counts[0] == counts[1] else f"; {counts[1]} steps were measured, {counts[0]} predicted"
    yield facts([("Verdict", f"{within} tolerance: {worst:.4%} {sign} {verdict.tolerance:.4%}{missing}")])


def _rounds(verdict: ProgramVerdict) -> Table:
    rows = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    rows.add_column("Step", width=36, no_wrap=True)
    for heading in ("Predicted", "Measured", "Error"):
        rows.add_column(heading, width=12, justify="right", no_wrap=True)
    for found in verdict.rounds:
        for each in found.comparisons:
            mark = "*" if each.quantity is verdict.judged else " "
            error, sizes = f"{each.error:+.4%}", (each.predicted_bytes, each.measured_bytes)
            rows.add_row(f"{mark} {found.number} {LABELS[each.quantity]}", *map(format_bytes, sizes), error)
    return rows
