"""What went wrong with a card's memory, as sections that text, Markdown and HTML lay out."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.records.explanation import Explanation
from fxmem.show.reproduction_facts import reproduction_sections
from fxmem.show.sections import Section
from fxmem.show.shortage_facts import shortage_sections
from fxmem.show.snapshot_facts import snapshot_sections


def explanation_sections(explanation: Explanation, width: int = 100) -> Iterator[Section]:
    """The message or the snapshot; tables in text of this width."""
    if explanation.shortages:
        yield from shortage_sections(explanation.shortages, width)
    if explanation.snapshot is not None:
        yield from snapshot_sections(explanation.snapshot, width)
    if explanation.reproduction is not None:
        yield from reproduction_sections(explanation.reproduction, width)
