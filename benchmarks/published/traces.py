"""Replay what real cards' programs requested through the caching allocator.

A file of `traces/` names its public snapshot (`source`, `file`) and has sizes only: the blocks that were live at the
start in order of address, then every malloc (its bytes) and free (-1 - the number of its block), and the cudaMallocs
that the card's allocator made (`segments`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxmem.memory.allocator.caching_allocator import CachingAllocator

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True)
class Replay:
    """A trace and what the allocator made of it."""

    name: str
    source: str
    mallocs: int
    card_segments: tuple[int, ...]
    segments: tuple[int, ...]
    """The sizes of the cudaMallocs in order, on the card and in the replay."""
    card_reserved_bytes: int
    reserved_bytes: int
    card_allocated_bytes: int
    allocated_bytes: int

    @property
    def error_percent(self) -> float:
        """Return the error of the reserved bytes."""
        return 100 * (self.reserved_bytes / self.card_reserved_bytes - 1)

    @property
    def is_exact(self) -> bool:
        """Whether every segment, the reserved and the allocated bytes are equal."""
        return (self.segments, self.reserved_bytes, self.allocated_bytes) == (
            self.card_segments,
            self.card_reserved_bytes,
            self.card_allocated_bytes,
        )


def replay_all(folder: Path = TRACES) -> Iterator[Replay]:
    """Replay every trace."""
    for path in sorted(folder.glob("*.json.gz")):
        yield replay(path)


def replay(path: Path) -> Replay:
    """Replay one trace."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    allocator = CachingAllocator()
    blocks = dict(enumerate(allocator.malloc(nbytes) for nbytes in trace["start"]))
    number, segments = len(blocks), []
    for event in trace["events"]:
        if event < 0:
            allocator.free(blocks.pop(-1 - event))
            continue
        before = allocator.reserved_bytes
        blocks[number] = allocator.malloc(event)
        number += 1
        if allocator.reserved_bytes != before:
            segments.append(allocator.reserved_bytes - before)
    return Replay(
        name=path.name.removesuffix(".json.gz"),
        source=f"{trace['source']}, {trace['file']}",
        mallocs=sum(event > 0 for event in trace["events"]),
        card_segments=tuple(trace["segments"]),
        segments=tuple(segments),
        card_reserved_bytes=trace["reserved"],
        reserved_bytes=allocator.reserved_bytes,
        card_allocated_bytes=trace["allocated"],
        allocated_bytes=allocator.allocated_bytes,
    )
