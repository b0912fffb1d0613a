"""What a process takes of a card beside the allocator's segments.

The CUDA context, loaded kernels and handles of libraries. Nothing computes it: the driver, the card's multiprocessors
and which kernels have run move it. So it is a range over what was measured and published, `context_sizes.json` beside
this file, each row with its source. `make accuracy ACCURACY_ARGS=--bounds` adds those of the measurements that are
kept.

Which rows count: one process, without a process group, whose kernels are loaded when they are first used
(`CUDA_MODULE_LOADING=LAZY`, torch 1.13 and later). A bare context bounds the range from below; a process that has run a
program bounds it from above. A group adds 560 MiB (one rank) to 900 MiB (eight) on an H100, and 2,880 with torch 2.6.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import Field, TypeAdapter

from fxmem.hardware.catalogue import is_alike, same_card
from fxmem.records.profile import Bytes, ProcessBytes, Record, Target
from fxmem.records.units import format_bytes

CONTEXT_SIZES = Path(__file__).with_name("context_sizes.json")
"""What has been measured of `ContextSize`, a JSON list."""
HOST_BYTES = 240 << 20
"""What the driver and libraries of a card have in the host's memory after a first step, measured on an H200."""


class ContextSize(Record):
    """What one process took of a card beside the allocator's segments."""

    card: str
    """As the driver names it."""
    capability: tuple[int, int]
    """CUDA compute capability (major, minor)."""
    torch: str = ""
    """Release of torch, e.g. `2.11`; empty where the source does not say."""
    cuda: str = ""
    """CUDA release torch was built for; empty where the source does not say."""
    driver: str = ""
    """Empty where the source does not say."""
    state: str = Field(
        default="working", pattern="^(bare|working|process group( of [0-9]+)?|eager loading|other libraries)$"
    )
    """`bare`: a context and next to nothing run. `working`: in the middle of a program. The others do not count for one
    process on one card: a process group of so many ranks, all kernels loaded at the start, other libraries' memory."""
    nbytes: Bytes
    margin: Bytes = 0
    """How far off `nbytes` may be, because the source rounds."""
    source: str


@functools.cache
def known_context_sizes() -> tuple[ContextSize, ...]:
    """Every row of the table."""
    return TypeAdapter(tuple[ContextSize, ...]).validate_json(CONTEXT_SIZES.read_bytes())


def process_range(target: Target, reserved_bytes: int) -> ProcessBytes | None:
    """What a process takes that has so many bytes reserved, which may be more than there is. None: nothing is known."""
    context = context_range(target)
    if context is None:
        return None
    low, high = context.low + reserved_bytes, context.high + reserved_bytes
    return ProcessBytes(low=low, high=high, grounds=context.grounds)


def context_range(target: Target) -> ProcessBytes | None:
    """The range for a process on the target. None where nothing is known.

    Taken are the rows of the same card; without any, those of cards with the same compute capability and as many
    multiprocessors. Where these have no row of a process at work, rows of every card of the capability join them.
    """
    if target.device != "cuda":
        return None
    counted = [row for row in known_context_sizes() if row.state in ("bare", "working")]
    rows = [row for row in counted if same_card(target, row.card)]
    rows = rows or [row for row in counted if is_alike(target, row.card)]
    if not any(row.state == "working" for row in rows):
        rows = [row for row in counted if row in rows or row.capability == target.capability]
    if not rows:
        return None
    return ProcessBytes(
        low=min(row.nbytes - row.margin for row in rows),
        high=max(row.nbytes + row.margin for row in rows),
        grounds=f"{len(rows)} published measurement{'s' * (len(rows) != 1)} on "
        + ", ".join(dict.fromkeys(row.card for row in rows)),
    )


def room_bytes(target: Target) -> int | None:
    """What a context leaves of a card at most, with which every verdict compares; a CPU's memory is all room.

    All of the card where no context's size is known, or one would not fit. None where its memory is not known.
    """
    context, memory = context_range(target), target.memory_bytes
    return memory if memory is None or context is None or context.low >= memory else memory - context.low


def give_room(target: Target, nbytes: int) -> Target:
    """The same card with as much memory as leaves the allocator so many bytes beside a context."""
    context = context_range(target)
    return target.model_copy(update={"memory_bytes": nbytes + (0 if context is None else context.low)})


def explain_room(target: Target) -> str:
    """The room of a card, and why it is less than its memory; empty off a card, and where its memory is not known."""
    context, memory, room = context_range(target), target.memory_bytes, room_bytes(target)
    if target.device != "cuda" or memory is None:
        return ""
    if context is None:
        return f"{format_bytes(memory)}: what a CUDA context takes of it is not known"
    least = f"a CUDA context takes {format_bytes(context.low)} or more"
    return f"{format_bytes(room)} of {format_bytes(memory)}: {least}{' and leaves nothing' if room == memory else ''}"


def format_range(low: int, high: int) -> str:
    """Both ends, or one number where they are one: `495.0 MiB to 616.0 MiB`."""
    return format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
