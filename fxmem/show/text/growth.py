"""A comparison of two steps as Markdown for a pull request: what grew, by module, and both timelines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fxmem.records.comparison import QuantityChange, StepComparison
from fxmem.records.profile import Timeline
from fxmem.records.units import format_bytes, percent, to_words
from fxmem.show.export.markdown_parts import code_span, fence_text, write_table
from fxmem.show.sections import TableColumn, make_table, numbers
from fxmem.show.text.comparison import format_delta, peak_changes, select_rows

_MODULES = 20
"""Rows of modules at most."""
_COLUMNS, _ROWS = 72, 6
"""Of a timeline drawn in text."""
_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Eighths of a character's height."""


def summarize_growth(comparison: StepComparison, before: Timeline, after: Timeline) -> str:
    """Peak, kinds and modules before and after, and the timelines on one scale.

    The first line is a comment of HTML, the same for the same model and target: by it an earlier summary is found.
    """
    about = comparison.after
    name = hashlib.sha256(f"{about.model} {about.target.name}".encode()).hexdigest()[:12]
    allocated = comparison.allocated_bytes
    change = comparison.requested_bytes if allocated.delta is None else allocated
    blocks = [
        f"<!-- fxmem {name} -->\n### Memory of {code_span(about.model)} on {code_span(about.target.name)}: "
        f"{_describe(change)}",
        _table("Peak", "before", "after", "change", rows=_totals(comparison)),
        _modules(comparison),
        _timelines(before, after),
        "Predicted without a card; two runs of the same code give the same bytes.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _describe(change: QuantityChange) -> str:
    delta, before = change.delta, change.before
    if not delta or not before:
        return "the same peak" if delta == 0 else format_delta(delta or 0, format_bytes)
    return f"{format_delta(delta, format_bytes)} ({percent(abs(delta), before)} {'more' if delta > 0 else 'less'})"


def _totals(comparison: StepComparison) -> Iterator[list[str]]:
    kinds = [(f"of it {to_words(kind)}", change) for kind, change in comparison.by_kind.items() if change.delta]
    for name, change in (*peak_changes(comparison), *kinds):
        if change.before is not None or change.after is not None:
            yield [name.removeprefix("Peak ").replace("Process", "process"), *_cells(change)]


def _cells(change: QuantityChange) -> Iterator[str]:
    for value in (change.before, change.after):
        yield "unknown" if value is None else format_bytes(value)
    yield "unknown" if change.delta is None else format_delta(change.delta, format_bytes)


def _modules(comparison: StepComparison) -> str:
    rows = list(select_rows(comparison, None))
    lines = [
        ["&emsp;" * row.depth + code_span(title), *_cells(row.at_peak), *list(_cells(row.saved))[-1:]]
        for row, title in islice(rows, _MODULES)
    ]
    more = f"\n\n{len(rows) - _MODULES} more changed." if len(rows) > _MODULES else ""
    if not lines:
        return "No module changed by a hundredth of the peak."
    return _table("Module", "at the peak before", "after", "change", "saved", rows=lines) + more


def _table(name: str, *figures: str, rows: Iterable[Sequence[str]]) -> str:
    return write_table(make_table(name, [TableColumn(name), *numbers(*figures)], rows))


def _timelines(before: Timeline, after: Timeline) -> str:
    highest = max(*before.live_bytes, *after.live_bytes, 1)
    parts = []
    for name, timeline in (("before", before), ("after", after)):
        peak = timeline.peak
        parts.append(f"{name}: peak {format_bytes(peak.requested_bytes)} in {peak.phase}")
        parts += draw_rows(timeline.live_bytes, highest)
    return f"<details><summary>Bytes alive over the step</summary>\n\n{fence_text(chr(10).join(parts))}\n\n</details>"


def draw_rows(live: Sequence[int], highest: int) -> list[str]:
    """Draw bytes over time with block characters, the highest of each column; the top row first.

    Args:
        live: bytes at each tick, at least one.
        highest: bytes at the top of the drawing.
    """
    columns = min(_COLUMNS, len(live))
    tops = [max(live[column * len(live) // columns : (column + 1) * len(live) // columns]) for column in range(columns)]
    eighths = [-(-top * 8 * _ROWS // highest) for top in tops]
    return [
        "".join(_BLOCKS[min(max(count - 8 * row, 0), 8)] for count in eighths).rstrip()
        for row in reversed(range(_ROWS))
    ]
