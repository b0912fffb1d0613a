"""What people read of a record, as data: text, HTML and Markdown lay it out, each in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fxmem.records.profile import Kind
from fxmem.records.units import printable

Tone = Literal["", "good", "best", "over", "bad"]
"""How good something is; colour repeats what the words say."""

Part = tuple[str, str]
"""One of several things that a text lists: its label, which may be empty, and itself."""


def join_parts(parts: Iterable[Part]) -> str:
    """The parts as one text."""
    return "; ".join(f"{label}: {text}" if label else text for label, text in parts)


@dataclass(frozen=True)
class Fact:
    """A label, and what it labels."""

    label: str
    """Empty: it continues the one before."""
    text: str
    key: str = ""
    """What it is about, by which some facts are picked out of several."""
    tone: Tone = ""
    parts: Sequence[Part] = ()
    """What the text lists; empty where it is one thing."""


Facts = list[Fact]


def make_printable(facts: Facts) -> Facts:
    """Facts whose text may come from the model, fit for a terminal."""
    return [
        replace(fact, text=printable(fact.text), parts=[(label, printable(text)) for label, text in fact.parts])
        for fact in facts
    ]


class TableColumn(NamedTuple):
    """A column of a table."""

    heading: str = ""
    meaning: str = ""
    is_number: bool = False
    is_head: bool = False
    """Whether its cells head their rows."""
    style: str = ""
    """In HTML the class of cells of text: `o` for a shape, `s` for a source line."""
    width: int | None = None
    """In text its columns; None: as many as its cells need."""
    wraps: bool = False
    """Whether longer cells take several lines."""
    is_plotted: bool = False
    """Whether it is drawn with characters, which only text needs."""

    @property
    def classes(self) -> str:
        """The classes of its cells."""
        return "r" if self.is_number else self.style


class Cell(NamedTuple):
    """What stands in one cell."""

    text: str
    value: int | None = None
    """What a number is sorted by; None comes last."""
    notes: tuple[str, ...] = ()
    """Smaller, below it, where there is room."""
    kind: Kind | None = None
    """Its colour stands in front."""
    tone: Tone = ""


class TableRow(NamedTuple):
    """A row, with the attributes of its element."""

    cells: Sequence[Cell]
    attributes: Mapping[str, str | None] = {}


class Table(NamedTuple):
    """A table."""

    label: str
    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    name: str = ""
    """Id of its body, for the page's script, which sorts it; empty for a table that is not sorted."""
    sorted_by: int = 0
    order: str = "ascending"

    @property
    def has_heads(self) -> bool:
        """Whether any column has a heading."""
        return any(column.heading for column in self.columns)


def make_table(label: str, columns: Sequence[TableColumn], rows: Iterable[Iterable[str | Cell]]) -> Table:
    """A table that is not sorted."""
    cells = ([each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows)
    return Table(label, columns, [TableRow(row) for row in cells])


def numbers(*headings: str) -> list[TableColumn]:
    """Columns of numbers."""
    return [TableColumn(heading, is_number=True) for heading in headings]


@dataclass(frozen=True)
class Section:
    """A table, facts below it, and notes on both."""

    table: Table | None = None
    facts: Sequence[Fact] = ()
    notes: Sequence[str] = ()
    label: str = ""
    """Stands beside the table in text."""
