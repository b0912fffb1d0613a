"""What went wrong with a card's memory: a message, a snapshot, and the same under prediction."""

from __future__ import annotations

from fxmem.records.parts.base import Many
from fxmem.records.profile import Versioned
from fxmem.records.shortage import Shortage


class Explanation(Versioned):
    """What a text says about memory that ran out."""

    source: str
    """The file that was read; `-` for standard input."""
    shortages: Many[Shortage] = ()
    """Every message, in the order of the text."""
