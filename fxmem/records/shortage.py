"""What a message of a card that ran out of memory says, and the cause that follows from its numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fxmem.records.parts.base import Bytes, Count, Many, Record

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
    `memory/shortage/formats.toml`."""
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
