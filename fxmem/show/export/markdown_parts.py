"""Parts of Markdown, as GitHub reads it: what is the model's own cannot become a link, a mention or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fxmem.records.units import printable


def fold_list(label: str, items: Iterable[str]) -> str:
    """A list that opens under its label."""
    text = "\n".join(f"- {item}" for item in items)
    return f"<details><summary>{label}</summary>\n\n{fence_text(text)}\n\n</details>"


def fence_text(text: str) -> str:
    """A block of text as it stands."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def make_table(head: Sequence[str], lines: Iterable[Sequence[str]], justify: str) -> str:
    """A table; `justify` has `l` or `r` for each column."""

    def line(parts: Iterable[str]) -> str:
        return f"| {' | '.join(parts)} |"

    def all_lines() -> Iterator[str]:
        yield line(head)
        yield line("---:" if side == "r" else ":---" for side in justify)
        yield from map(line, lines)

    return "\n".join(all_lines())


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
