"""What a message of a card that ran out of memory says, and the cause that follows from its numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fxmem.records.advice import Advice
from fxmem.records.findings import Finding
from fxmem.records.parts import Bytes, Count, Many, Record
from fxmem.records.profile import Kind, Versioned

Cause = Literal[
    "request",
    "size",
    "fragmentation",
    "other-process",
    "context",
    "limit",
    "free",
    "host",
    "shm",
    "files",
    "kernel",
    "unknown",
]
"""Why a request was refused.

- `request`: the request alone is larger than the card;
- `size`: what the program has allocated, and the request, are more than the card has room for;
- `fragmentation`: the allocator holds enough unused bytes, in pieces that are too small;
- `other-process`: other processes hold what is missing;
- `context`: the process itself holds what is missing outside the allocator (libraries, process groups);
- `limit`: the process may take a share of the card only, and has it;
- `free`: the card had the bytes when they were counted, so that its size is not the reason;
- `host`: the host's memory ran out, not the card's;
- `shm`: the memory that processes share (/dev/shm) ran out, of a size that the host or the container sets;
- `files`: the process has as many files open as it may, and no memory ran out;
- `kernel`: a kernel needs more shared memory than a multiprocessor has;
- `unknown`: the message has no numbers, or not those of what was free.
"""


class ProcessUse(Record):
    """A process that the message names."""

    pid: Count
    nbytes: Bytes
    is_rank: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether it is another rank of the same job, which opens this card as well as its own."""


class OutOfMemoryMessage(Record):
    """One message. Sizes are rounded as the message rounds them: to 0.01 of its unit. None: it does not say."""

    line: Count
    """Where it stands in the text, from 1."""
    count: Count = 1
    """How often it stands there, with the same numbers."""
    api: str
    """Whose memory: `CUDA`, `HIP`, `XPU`, `NPU`, `MPS`, or `CPU` for the host's."""
    source: str = ""
    """Who says it, where that is not PyTorch's allocator: `cuBLAS`, `NCCL`, `driver`, `Slurm`, ...; in
    `memory/shortage_formats.toml`."""
    device: Count | None = None
    rank: Count | None = None
    place: str = ""
    """`file:line` of the user's own code in the traceback above it. Untrusted text."""
    is_setup: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether the traceback ends where a model is moved, loaded or wrapped, in which no batch plays a part."""
    requested_bytes: Bytes | None = None
    """What was asked of the driver: the request, rounded up to a segment."""
    capacity_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    """Free on the card when the request had failed."""
    allocated_bytes: Bytes | None = None
    """In the allocator's blocks that the program holds."""
    private_pool_bytes: Bytes | None = None
    """Of these, in private pools: CUDA graphs."""
    cached_bytes: Bytes | None = None
    """In the allocator's segments, in no block that the program holds."""
    reserved_bytes: Bytes | None = None
    """In the allocator's segments: allocated and cached."""
    limit_bytes: Bytes | None = None
    """What the process may take."""
    process_bytes: Bytes | None = None
    """What the process takes of the card, its context and libraries included."""
    others: Many[ProcessUse] = ()
    """Other processes, as far as the message names them."""
    outside_bytes: Bytes | None = None
    """Neither free nor reserved: contexts, libraries, other processes."""
    cause: Cause = "unknown"
    missing_bytes: int | None = None
    """How many bytes more the request needs than the card had free; negative where it had more."""
    missing_packed_bytes: int | None = None
    """The same if every cached byte could be used; negative where that would have been enough."""


# --- what a memory snapshot of a card says: who held the memory, what grew, what lay in pieces ------------------------
# Sizes are requested bytes, but those of segments and of what is unused in them.


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


# --- what went wrong with a card's memory: a message, a snapshot, and the same under prediction -----------------------


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
