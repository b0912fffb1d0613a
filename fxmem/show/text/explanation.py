"""What went wrong with a card's memory, as text."""

from __future__ import annotations

from fxmem.records.explanation import Explanation
from fxmem.show.shortage_facts import shortage_sections
from fxmem.show.text.tables import render_sections


def table(explanation: Explanation, *, width: int = 100, color: bool = False) -> str:
    """The explanation as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    return render_sections(shortage_sections(explanation.shortages, width), width, color)
