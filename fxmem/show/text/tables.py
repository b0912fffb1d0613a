"""Text tables: how every command lays out what it says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Generic, Literal, TypeVar

from rich.box import Box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.records.units import printable
from fxmem.show import sections
from fxmem.show.sections import Fact, Tone

LABEL = 10
"""Columns of the labels on the left."""
GAP = 2
"""Columns between two of a table's."""
RULED = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
"""A line below the head and above the sums, in ASCII."""


def item_list(label: str, items: Sequence[tuple[str, str]]) -> Table:
    """Marked items beside a label."""
    table = grid(-max(len(mark) for mark, _ in items), None)
    for row in items:
        table.add_row(*row)
    return label_content(label, table)


def numbered(label: str, sentences: Sequence[str]) -> Table:
    """Sentences with their numbers, beside a label."""
    return item_list(label, [(f"{number}.", printable(text)) for number, text in enumerate(sentences, 1)])


TONES: dict[Tone, str] = {"": "", "good": "green", "best": "bold green", "bad": "bold red", "over": "red"}
"""The style of a text by how good what it says is."""


def facts(found: Iterable[Fact]) -> Table:
    """Labels in bold, a fact beside each."""
    return add_facts(grid(LABEL, None), found)


def add_facts(table: Table, found: Iterable[Fact]) -> Table:
    """The same, below what is already there."""
    for fact in found:
        table.add_row(Text(fact.label, style="bold"), Text(fact.text, style=TONES[fact.tone]))
    return table


def ruled(*headings: str | tuple[str, int | None], left: Sequence[str] = ("",), padding: int = 1) -> Table:
    """An empty table with a line below its head; headings, with widths or without, `left` being those of words."""
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, padding, 0, 0), header_style="bold")
    for each in headings:
        heading, width = (each, None) if isinstance(each, str) else each
        table.add_column(heading, width=width, justify="left" if heading in left else "right", no_wrap=True)
    return table


def lay_out(table: sections.Table) -> Table:
    """A table of a section: notes in its cells are left out, and what is untrusted is made printable."""
    laid = ruled()
    for column in table.columns:
        side: Literal["left", "right"] = "right" if column.is_number else "left"
        overflow: Literal["fold", "ellipsis"] = "fold" if column.wraps else "ellipsis"
        laid.add_column(column.heading, width=column.width, justify=side, no_wrap=not column.wraps, overflow=overflow)
    for row in table.rows:
        cells = []
        for column, cell in zip(table.columns, row.cells, strict=True):
            text = printable(cell.text)
            if column.wraps and column.width is not None:
                text = textwrap.fill(text, column.width, subsequent_indent="   ", break_on_hyphens=False)
            cells.append(Text(text, style=TONES[cell.tone]))
        laid.add_row(*cells)
    return laid


def render_sections(found: Iterable[sections.Section], width: int, color: bool) -> str:
    """Sections as text whose lines are at most `width` columns wide (at least 60)."""
    return render(lay_out_sections(found), max(width, 60), color)


def lay_out_sections(found: Iterable[sections.Section]) -> Iterator[RenderableType]:
    """Sections as `render` takes them."""
    for section in found:
        below = [replace(fact, text=printable(fact.text)) for fact in section.facts]
        if section.table is not None:
            table = lay_out(section.table)
            yield add_facts(label_content(section.label, table), below) if section.label else table
        elif below:
            yield facts(below)
        yield from (note(printable(each)) for each in section.notes)


def note(text: str) -> Table:
    """A sentence in the place of a fact."""
    return facts([Fact("", text)])


def label_content(label: str, content: RenderableType) -> Table:
    """Anything beside a label."""
    table = grid(LABEL, None)
    table.add_row(Text(label, style="bold"), content)
    return table


def grid(*widths: int | None) -> Table:
    """A table without lines; a negative width is that of a right-justified column, None takes what is left."""
    table = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        side: Literal["left", "right"] = "right" if width is not None and width < 0 else "left"
        table.add_column(justify=side, width=None if width is None else abs(width), overflow="fold")
    return table


def render(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """The parts as text, an empty line between them, no line wider than `width`."""
    out = StringIO()
    # An empty environment: what is written depends on the arguments alone.
    console = Console(
        file=out, width=width, force_terminal=color, force_jupyter=False, color_system="standard" if color else None,
        no_color=not color,
        highlight=False, emoji=False, markup=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    for index, part in enumerate(parts):
        if index:
            console.print()
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def fit(text: str, width: int) -> str:
    """The text, its end cut off where it is wider."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 2, 0)).rstrip() + ".."


def fit_left(text: str, width: int) -> str:
    """The text, its beginning cut off where it is wider."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 2:
        text = text[1:]
    return ".." + text


# --- tables with a column of names, and as many others as there is room for -------------------------------------------


Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A figure of each row."""

    heading: str
    width: int
    cell: Callable[[Row], str]
    justify: Literal["left", "right"] = "right"


def choose_columns(
    always: Sequence[Column[Row]], more: Sequence[Column[Row]], *, width: int, narrowest: int, gap: int
) -> tuple[list[Column[Row]], int]:
    """Choose the columns that fit, and the width left for the first.

    These are all of `always`, and of `more` the first few that leave the first column `narrowest`."""
    columns, names = list(always), width - sum(gap + column.width for column in always)
    for column in more:
        if names - gap - column.width < narrowest:
            break
        columns.append(column)
        names -= gap + column.width
    return columns, names


def ruled_table(heading: str, names: int, columns: Sequence[Column[Row]], *, padding: int = 1) -> Table:
    """The empty table; its first column is `names` wide."""
    left = [heading, *(column.heading for column in columns if column.justify == "left")]
    return ruled((heading, names), *((column.heading, column.width) for column in columns), left=left, padding=padding)


def name_cell(title: str, kind: str, level: int, width: int) -> Text:
    """A row's first cell: its title as deep as it stands, and its class where there is room."""
    name = Text(fit("  " * level + printable(title), width))
    room = width - name.cell_len - len(" ()")
    if kind and room >= 6:
        name.append(f" ({fit(printable(kind), room)})", style="dim")
    return name
