"""What went wrong with a card's memory, as text and as Markdown."""

from __future__ import annotations

from fxmem.records.explanation import Explanation
from fxmem.show.explanation_sections import explanation_sections
from fxmem.show.export.markdown_parts import write_sections
from fxmem.show.text.tables import render_sections


def table(explanation: Explanation, *, width: int = 100, color: bool = False) -> str:
    """The explanation as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    return render_sections(explanation_sections(explanation, width), width, color)


def markdown(explanation: Explanation) -> str:
    """The same as Markdown."""
    return write_sections(explanation_sections(explanation))
