"""Parts of Markdown, as GitHub reads it: what is the model's own cannot become a link, a mention or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fxmem.records.units import printable
from fxmem.show.sections import Section, Table, TableColumn, make_table


def fold_list(label: str, items: Iterable[str]) -> str:
    """A list that opens under its label."""
    text = "\n".join(f"- {item}" for item in items)
    return f"<details><summary>{label}</summary>\n\n{fence_text(text)}\n\n</details>"


def fence_text(text: str) -> str:
    """A block of text as it stands."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def write_table(table: Table) -> str:
    """A table; its cells are Markdown already."""
    rows = [
        [column.heading for column in table.columns],
        ["---:" if column.is_number else ":---" for column in table.columns],
        *([cell.text for cell in row.cells] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_sections(sections: Iterable[Section]) -> str:
    """Sections, what is a text's or a file's own in code spans."""
    blocks = []
    for section in sections:
        if section.table is not None:
            rows = ([code_span(cell.text) for cell in row.cells] for row in section.table.rows)
            blocks.append(write_table(make_table(section.table.label, section.table.columns, rows)))
        if section.facts:
            facts = ((fact.label, code_span(fact.text)) for fact in section.facts)
            blocks.append(write_table(make_table("", [TableColumn(), TableColumn()], facts)))
        blocks += section.notes
    return "\n\n".join(blocks) + "\n"


def code_span(text: str) -> str:
    """A code span that ends where it should, fit for a cell of a table."""
    shown = printable(text).strip().replace("|", "\\|")
    if not shown:
        return ""
    fence = "`" * (_longest_run(shown) + 1)
    gap = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{gap}{shown}{gap}{fence}"


def _longest_run(text: str) -> int:
    """Backticks in a row."""
    return max(map(len, re.findall("`+", text)), default=0)
