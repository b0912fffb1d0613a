"""What went wrong with a card's memory, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.records.shortage import Explanation
from fxmem.show.export.markdown_parts import write_sections
from fxmem.show.sections import Section
from fxmem.show.shortage_facts import reproduction_sections, shortage_sections, snapshot_sections
from fxmem.show.text.tables import render_sections


def table(explanation: Explanation, *, width: int = 100, color: bool = False) -> str:
    """The explanation as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    return render_sections(_sections(explanation, width), width, color)


def markdown(explanation: Explanation) -> str:
    """The same as Markdown."""
    return write_sections(_sections(explanation))


_SUMMARY: Final = ("Cause", "To do", "Predicted", "Fits with")


def summarize(explanation: Explanation) -> str:
    """The cause and what to do, in a few sentences."""
    told = (fact for section in _sections(explanation) for fact in section.facts if fact.label in _SUMMARY)
    return ". ".join(f"{fact.label}: {fact.text}" for fact in told)


def _sections(explanation: Explanation, width: int = 100) -> Iterator[Section]:
    """The message or the snapshot; tables in text of this width."""
    if explanation.shortages:
        yield from shortage_sections(explanation.shortages, width, is_tried=explanation.reproduction is not None)
    if explanation.snapshot is not None:
        yield from snapshot_sections(explanation.snapshot, width)
    if explanation.reproduction is not None:
        yield from reproduction_sections(explanation.reproduction, width)
