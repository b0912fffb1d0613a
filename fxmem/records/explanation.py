"""What went wrong with a card's memory: a message, a snapshot, and the same under prediction."""

from __future__ import annotations

from fxmem.records.parts.base import Many
from fxmem.records.profile import Versioned
from fxmem.records.shortage import OutOfMemoryMessage
from fxmem.records.snapshot import SnapshotReport


class Explanation(Versioned):
    """What a text says about memory that ran out, or what a snapshot does."""

    source: str
    """The file that was read; `-` for standard input."""
    shortages: Many[OutOfMemoryMessage] = ()
    """Every message, in the order of the text."""
    snapshot: SnapshotReport | None = None
    """What the file says, if it is a snapshot."""
