"""What went wrong with a card's memory: a message, a snapshot, and the same under prediction."""

from __future__ import annotations

from fxmem.records.advice import Advice
from fxmem.records.findings import Finding
from fxmem.records.parts.base import Bytes, Count, Many, Record
from fxmem.records.profile import Kind, Versioned
from fxmem.records.shortage import OutOfMemoryMessage
from fxmem.records.snapshot import SnapshotReport


class PeakHolder(Record):
    """Storages alive at the predicted peak that one line made, of one kind."""

    kind: Kind
    holder: str = ""
    """What keeps the largest of them, where that is known. Untrusted text."""
    place: str = ""
    """`file:line`; empty for what no line made."""
    nbytes: Bytes
    count: Count


class JoinedLine(Record):
    """What one line holds on the card and under prediction, each at its own peak, of all kinds."""

    place: str
    """`file:line`, as the prediction has it where both do; empty for all that no line is known of."""
    measured_bytes: Bytes
    predicted_bytes: Bytes


class Reproduction(Record):
    """The program or the model under prediction, in the room that the message leaves it."""

    target: str
    """Name of the card it is predicted for."""
    room_bytes: Bytes
    """What the allocator may have: the card's memory less what the message, or a context, takes of it."""
    fits: bool | None
    """Whether it does as it is."""
    place: str = ""
    """Where it runs out, `file:line`; empty where it does not, or no line is known."""
    shortage: str = ""
    """The same in words."""
    same_line: bool | None = None
    """Whether the message names that line; None where one of the two is not known."""
    holders: Many[PeakHolder]
    """What is alive at the peak, most bytes first."""
    lines: Many[JoinedLine] = ()
    """The same beside a snapshot, most bytes first; empty without one."""
    found: Many[Finding] = ()
    """What is probably not meant."""
    advice: Advice
    """Every change that was tried; `together` is the smallest set with which it fits."""


class Explanation(Versioned):
    """What a text says about memory that ran out, or what a snapshot does."""

    source: str
    """The file that was read; `-` for standard input."""
    shortages: Many[OutOfMemoryMessage] = ()
    """Every message, in the order of the text."""
    snapshot: SnapshotReport | None = None
    """What the file says, if it is a snapshot."""
    reproduction: Reproduction | None = None
    """The same under prediction, where a program or a model was given."""
