"""What a memory snapshot of a card says: who held the memory, what grew, what lay in pieces.

Sizes are requested bytes, but those of segments and of what is unused in them.
"""

from __future__ import annotations

from typing import Literal

from fxmem.records.parts.base import Bytes, Count, Many, Record
from fxmem.records.shortage import OutOfMemoryMessage

PieceState = Literal["used", "waiting", "free"]
"""`waiting`: freed by the program, and not yet to be used again, because another stream may still use it."""


class Holder(Record):
    """Blocks that one line of the program, or one stack, allocated."""

    place: str
    """`file:line` of the user's own code, innermost; else of an installed package; else an operator; else empty.
    Untrusted text."""
    nbytes: Bytes
    count: Count
    """Blocks."""
    frames: Many[str] = ()
    """The stack, or of a line the stack with most bytes, innermost first."""


class GrownLine(Record):
    """What a line keeps more with time."""

    place: str
    nbytes: Bytes
    """From the first of `SnapshotReport.marks` to the last."""
    blocks: Count


class InTheWay(Record):
    """Blocks of one line in segments of which more than half is unused."""

    place: str
    nbytes: Bytes
    """Of the blocks."""
    count: Count
    free_bytes: Bytes
    """Unused in these segments."""


class Piece(Record):
    """A stretch of a segment."""

    nbytes: Bytes
    state: PieceState


class SegmentMap(Record):
    """A segment, in the order of its addresses."""

    nbytes: Bytes
    pieces: Many[Piece]


class Level(Record):
    """The most in a stretch of the history."""

    event: Count
    """Where the stretch begins."""
    requested_bytes: Bytes
    reserved_bytes: Bytes


class SnapshotReport(Record):
    """One device's part of a snapshot."""

    device: Count
    others: Count = 0
    """Devices whose shorter history is left out."""
    allocator_settings: str = ""
    events: Count
    """Allocations, frees and segments in the history; 0 where the file has none, and the peak is what it ends with."""
    peak_bytes: Bytes
    """The most requested and alive at once, in the history."""
    peak_event: Count
    reserved_peak_bytes: Bytes
    """The most reserved, in the history."""
    reserved_at_peak_bytes: Bytes | None = None
    """Reserved where the most was requested; None in reports of older versions."""
    older_bytes: Bytes
    """Of the peak, in blocks that are older than the history."""
    waiting_bytes: Bytes
    """The most that the program had freed and another stream kept from being used, when something was allocated."""
    lines: Many[Holder]
    """By line, what was alive at the peak, most bytes first."""
    stacks: Many[Holder]
    """The same by stack, the largest."""
    marks: Many[Count] = ()
    """Events between which growth is counted: the ends of the optimizer's steps, or quarters of the history."""
    steps: Count = 0
    """Steps of an optimizer that the history has; 0 where it does not say."""
    grown: Many[GrownLine] = ()
    reserved_bytes: Bytes
    """At the end, as all that follows."""
    allocated_bytes: Bytes
    cached_bytes: Bytes
    """Reserved, and in no block that the program holds."""
    releasable_bytes: Bytes
    """Of these, in segments with nothing in use, which go back to the driver where it is asked for more."""
    largest_free_bytes: Bytes
    """The largest unused stretch."""
    sizes: Many[tuple[Bytes, Count]] = ()
    """Sizes of blocks that the program holds, each with the number of blocks; most bytes first."""
    in_the_way: Many[InTheWay] = ()
    segments: Many[SegmentMap] = ()
    """The largest."""
    levels: Many[Level] = ()
    shortages: Many[OutOfMemoryMessage] = ()
    """Requests that were refused in the history."""
