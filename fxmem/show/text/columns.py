"""Tables with a column of names, and as many others as there is room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich.table import Table
from rich.text import Text

from fxmem.records.units import printable
from fxmem.show.text.tables import fit, ruled

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
