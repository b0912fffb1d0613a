"""Text tables: how every command lays out what it says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import Box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

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
    for mark, text in items:
        table.add_row(Text(mark), Text(text))
    return label_content(label, table)


TONES: dict[Tone, str] = {"": "", "good": "green", "best": "bold green", "bad": "bold red"}
"""The style of a text by how good what it says is."""


def facts(found: Iterable[Fact]) -> Table:
    """Labels in bold, a fact beside each."""
    return add_facts(grid(LABEL, None), found)


def add_facts(table: Table, found: Iterable[Fact]) -> Table:
    """The same, below what is already there."""
    for fact in found:
        table.add_row(Text(fact.label, style="bold"), Text(fact.text, style=TONES[fact.tone]))
    return table


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
        table.add_column(
            justify="right" if width is not None and width < 0 else "left",
            width=None if width is None else abs(width),
            overflow="fold",
        )
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
