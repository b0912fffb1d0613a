"""Memory by source line as text: the annotated source, as line-by-line trackers print it."""

from __future__ import annotations

import linecache
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from fxmem.records.breakdown import LineFigures, LineReport, LineRow, TensorGroup
from fxmem.records.units import exact_bytes, format_bytes, package_path, printable, short_bytes, to_words
from fxmem.show.facts import header_facts
from fxmem.show.sections import Fact, Facts
from fxmem.show.text.tables import Column, choose_columns, facts, fit, note, render

MEANINGS = (
    ("Calls", "nodes of the graph: a line in a loop has one for each call and turn"),
    ("Allocated", "all that the line allocates in forward, its runs added up"),
    ("Kept", "of that, what is alive when the run is over"),
    ("Freed", "what was there before a run and is gone after it"),
    ("Saved", "what it is the first to keep for backward, by whatever line it was allocated"),
    ("Alive", "everything alive when its last run is over"),
    ("Backward", "what is allocated while its gradients are computed"),
)
"""What the columns say."""
_AROUND = 2
"""Lines shown before and after one that has figures."""
_LARGEST_FILE = 4 << 20

_COLUMNS: tuple[Column[LineFigures], ...] = (
    Column("Allocated", 9, lambda row: short_bytes(row.allocated_bytes)),
    Column("Kept", 9, lambda row: short_bytes(row.kept_bytes)),
    Column("Saved", 9, lambda row: short_bytes(row.saved_bytes)),
)
_MORE_COLUMNS: tuple[Column[LineFigures], ...] = (
    Column("Alive", 9, lambda row: _known(row.after_bytes, format_bytes)),
    Column("Backward", 9, lambda row: _known(row.backward_allocated_bytes, short_bytes)),
    Column("Freed", 9, lambda row: short_bytes(row.freed_bytes)),
    Column("Calls", 5, lambda row: str(row.calls)),
)


def _known(nbytes: int | None, write: Callable[[int], str]) -> str:
    return "" if nbytes is None else write(nbytes)


_NUMBER = 5
"""Columns of a line's number."""
_NARROWEST_CODE = 38


def table(report: LineReport, *, width: int = 100, tensors: int = 3, color: bool = False) -> str:
    """The annotated source as text whose lines are at most `width` columns wide.

    Args:
        report: from `fxmem.memory.by_line.by_line`.
        width: columns of the terminal, at least 60. Wider terminals get more columns, in the order alive, backward,
            freed, calls.
        tensors: how many kinds of tensors to list below a line, most bytes first; 0 lists none.
        color: whether to write ANSI colours.

    A file's text is shown if it can be read here and is the one that was analysed, by the lines that have figures; else
    those lines alone.
    """
    width = max(width, 60)
    columns, _ = choose_columns(_COLUMNS, _MORE_COLUMNS, width=width - _NUMBER - 2, narrowest=_NARROWEST_CODE, gap=1)
    parts: list[RenderableType] = [facts([*_most_saved(report), *first_facts(report)])]
    if tensors and report.resident:
        parts.append(Text("\n".join(_tensors(report.resident, (), tensors, width))))
    parts += [_file(report, file, columns, tensors, width) for file in report.files]
    if report.rest:
        parts.append(_rest(report, columns, tensors, width))
    parts.append(facts(sum_facts(report)))
    shown = {column.heading for column in columns}
    parts.append(note("; ".join(f"{heading}: {meaning}" for heading, meaning in MEANINGS if heading in shown) + "."))
    return render(parts, width, color)


def _most_saved(report: LineReport) -> Iterator[Fact]:
    """The line that keeps most for backward."""
    most = max(report.lines, key=lambda line: line.saved_bytes, default=None)
    if most is not None and most.saved_bytes:
        place = f"{short_file(most.file)}:{most.line}"
        yield Fact("Most saved", printable(f"{place}: {format_bytes(most.saved_bytes)}, {most.code}"))


def first_facts(report: LineReport) -> Facts:
    """What was analysed, and what was there before."""
    return [*header_facts(report), Fact("Before", f"{exact_bytes(report.resident_bytes)} alive before the step")]


def format_group(group: TensorGroup) -> str:
    """`7 x (512, 512, 3, 3) float32 63.0 MiB parameter`. Untrusted text."""
    kind, size = to_words(group.kind), format_bytes(group.nbytes)
    return f"{group.count} x " + (f"{group.shape} {group.dtype} {size} {kind}" if group.dtype else f"{kind} {size}")


def short_file(file: str) -> str:
    """A path as people know it: an installed one from its package on, one below the working directory from there."""
    installed = package_path(file)
    try:
        return installed.replace("\\", "/") if installed != file else str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def source_text(report: LineReport, file: str) -> Mapping[int, str]:
    """The lines of a file by number; only those with figures where the file has changed.

    A report may come from elsewhere: what is named in it is read only where its own lines show that it is Python code
    already known.
    """
    known = {line.line: line.code for line in report.lines if line.file == file}
    text = _read_lines(file)
    matches = any(known.values()) and all(
        0 < number <= len(text) and text[number - 1].strip() == code for number, code in known.items()
    )
    return {number: line.rstrip() for number, line in enumerate(text, 1)} if matches else known


def pick_shown(lines: Mapping[int, LineRow], source: Mapping[int, str], around: int) -> list[int]:
    """Numbers of the lines with figures and as many around them. Empty ones at the edges are left out."""
    shown = {number + by for number in lines for by in range(-around, around + 1) if number + by in source}
    return sorted(number for number in shown if source[number].strip() or {number - 1, number + 1} <= shown)


def _read_lines(file: str) -> list[str]:
    if file.startswith("<"):
        return linecache.getlines(file)  # code that was generated in this process
    if file.startswith(("//", "\\\\")):
        return []  # on Windows another machine's file: to look at it would sign in there
    try:
        path = Path(file)
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            return []
        with tokenize.open(file) as lines:
            return lines.readlines()
    except (OSError, SyntaxError, ValueError):
        return []


# --- layout -----------------------------------------------------------------------------------------------------------


def _row(
    number: str, figures: LineFigures | None, columns: Sequence[Column[LineFigures]], code: str, width: int
) -> str:
    cells = " ".join(f"{'' if figures is None else column.cell(figures):>{column.width}}" for column in columns)
    return fit(f"{number:>{_NUMBER}} {cells}  {printable(code)}".rstrip(), width)


def _head(columns: Sequence[Column[LineFigures]], code: str, width: int) -> Text:
    heads = " ".join(f"{column.heading:>{column.width}}" for column in columns)
    rules = " ".join("-" * column.width for column in columns)
    text = Text(f"{'Line':>{_NUMBER}} {heads}  {fit(code, width - _NUMBER - len(heads) - 3)}\n", style="bold")
    return text.append(f"{'-' * _NUMBER} {rules}  {'-' * max(width - _NUMBER - len(rules) - 3, 0)}\n")


def _file(report: LineReport, file: str, columns: Sequence[Column[LineFigures]], tensors: int, width: int) -> Text:
    lines = {line.line: line for line in report.lines if line.file == file}
    source = source_text(report, file)
    text = Text(no_wrap=True).append(fit(printable(short_file(file)), width) + "\n", style="bold")
    text.append_text(_head(columns, "Code", width))
    # Numbers that follow one another have the same distance to their index.
    stretches = groupby(enumerate(pick_shown(lines, source, _AROUND)), lambda each: each[1] - each[0])
    for index, (_, stretch) in enumerate(stretches):
        text.append(f"{'...':>{_NUMBER}}\n" if index else "", style="dim")
        numbers = [number for _, number in stretch]
        codes = [source[number] for number in numbers]
        margin = min((len(code) - len(code.lstrip()) for code in codes if code.strip()), default=0)
        for number, code in zip(numbers, codes, strict=True):
            line = lines.get(number)
            text.append(_row(str(number), line, columns, code[margin:], width) + "\n", style="" if line else "dim")
            if line is not None:
                text.append(
                    "".join(f"{each}\n" for each in _tensors(line.came, line.went, tensors, width)), style="dim"
                )
    rules = " ".join("-" * column.width for column in columns)
    text.append(f"{'-' * _NUMBER} {rules}\n")
    return text.append(_row("", _sum(list(lines.values())), columns, "sum of these lines", width), style="bold")


def _tensors(came: Sequence[TensorGroup], went: Sequence[TensorGroup], most: int, width: int) -> Iterator[str]:
    indent = " " * (_NUMBER + 1)
    for sign, groups in (("+", came), ("-", went)) if most else ():
        for group in groups[:most]:
            yield fit(f"{indent}{sign} {printable(format_group(group))}", width)
        if rest := groups[most:]:
            count, nbytes = sum(group.count for group in rest), sum(group.nbytes for group in rest)
            yield f"{indent}{sign} {count} of other shapes {format_bytes(nbytes)}"


def _rest(report: LineReport, columns: Sequence[Column[LineFigures]], tensors: int, width: int) -> Text:
    text = Text(no_wrap=True).append("Of no line shown\n", style="bold").append_text(_head(columns, "What", width))
    for each in report.rest:
        text.append(_row("", each, columns, each.what, width) + "\n")
        text.append("".join(f"{line}\n" for line in _tensors(each.came, each.went, tensors, width)), style="dim")
    text.rstrip()
    return text


def _sum(rows: Sequence[LineFigures]) -> LineFigures:
    """What can be summed of them."""
    backward = [row.backward_allocated_bytes for row in rows if row.backward_allocated_bytes is not None]
    names = ("calls", "allocated_bytes", "kept_bytes", "freed_bytes", "saved_bytes")
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    return LineFigures(**sums, backward_allocated_bytes=sum(backward) if backward else None)


def sum_facts(report: LineReport) -> Iterator[Fact]:
    """What forward allocates, leaves and saves."""
    whole = f"{exact_bytes(report.forward_allocated_bytes)} allocated"
    yield Fact("Forward", f"{whole}, by lines and rest together (the optimizer's not counted)")
    left = f"{exact_bytes(report.forward_left_bytes)} alive"
    yield Fact("After it", f"{left}: before, and what lines and rest kept less what they freed")
    if report.step.mode == "train":
        yield Fact("Saved", f"{exact_bytes(report.saved_bytes)} of that is kept for backward")
