"""Memory by source line as one HTML page: the annotated source, without a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fxmem.records.breakdown import LineFigures, LineReport, LineRow, TensorGroup
from fxmem.records.units import short_bytes
from fxmem.show.html.page import fill_page
from fxmem.show.text.by_line import MEANINGS, first_facts, format_group, pick_shown, short_file, source_text, sum_facts

_MEANINGS = dict(MEANINGS) | {
    "Most": "most bytes alive during its runs, everything counted",
}
_HEADS = [(head, _MEANINGS[head]) for head in "Calls Allocated Kept Freed Saved Most Alive Backward".split()]
_AROUND = 10
"""Lines shown before and after one that has figures."""


class PageLine(NamedTuple):
    """One row of a file's table."""

    code: str
    number: int | None = None
    """None: a gap between lines, or of no line shown."""
    figures: Sequence[tuple[str, str]] = ()
    """What stands under each heading, and the percent of its bar; empty for a line that does nothing."""
    tensors: tuple[int, Sequence[str]] = (0, ())
    """Those that come and go there: how many, and their names."""


def lines_html(report: LineReport) -> str:
    """Write the page of the memory by source line, of `fxmem.memory.by_line.by_line`."""
    mode = "training" if report.step.mode == "train" else "inference"
    title = f"{report.model}: memory by source line of one {mode} step"
    files = [
        (f"file{index}", short_file(file), list(_file_lines(report, file))) for index, file in enumerate(report.files)
    ]
    return fill_page(
        "by_line",
        report,
        title=title,
        heading=title,
        sections={**{anchor: name for anchor, name, _ in files}, "rest": "Of no line shown"},
        header=[*first_facts(report), *sum_facts(report)],
        meanings="; ".join(f"{heading}: {meaning}" for heading, meaning in MEANINGS),
        resident=_list_tensors(report.resident, ()),
        heads=_HEADS,
        files=files,
        rest=[PageLine(row.what, None, _figures(row, 0), _list_tensors(row.came, row.went)) for row in report.rest],
    )


def _file_lines(report: LineReport, file: str) -> Iterator[PageLine]:
    lines: Mapping[int, LineRow] = {line.line: line for line in report.lines if line.file == file}
    source = source_text(report, file)
    most = max((line.kept_bytes for line in lines.values()), default=0)
    last = 0
    for number in pick_shown(lines, source, _AROUND):
        if number > last + 1:
            yield PageLine("")
        last, line, code = number, lines.get(number), source[number].expandtabs()
        if line is None:
            yield PageLine(code, number)
        else:
            yield PageLine(code, number, _figures(line, most), _list_tensors(line.came, line.went))


def _figures(row: LineFigures, most: int) -> list[tuple[str, str]]:
    """What stands under each heading. Kept bytes have a bar, relative to the most of any line."""
    names = ("allocated", "kept", "freed", "saved", "peak", "after", "backward_allocated")
    sizes = {name: getattr(row, f"{name}_bytes") for name in names}
    bars = {"kept": f"{100 * row.kept_bytes / most:.1f}" if most else ""}
    cells = [("" if size is None else short_bytes(size), bars.get(name, "")) for name, size in sizes.items()]
    return [(str(row.calls), ""), *cells]


def _list_tensors(came: Sequence[TensorGroup], went: Sequence[TensorGroup]) -> tuple[int, Sequence[str]]:
    names = [f"{sign} {format_group(group)}" for sign, groups in (("+", came), ("-", went)) for group in groups]
    return sum(group.count for group in (*came, *went)), names
