"""Text tables: how every command lays out what it says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import Box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

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


def facts(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Labels in bold, a fact beside each."""
    table = grid(LABEL, None)
    for label, value in pairs:
        table.add_row(Text(label, style="bold"), Text(value) if isinstance(value, str) else value)
    return table


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
