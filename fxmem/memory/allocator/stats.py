"""What the caching allocator reports: statistics, a snapshot of its segments, refused requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fxmem.errors import ExceededError
from fxmem.records.profile import Bytes, Record


class Stat:
    """A number of bytes that goes up and down, and the largest since the start or the last `reset_peak_stats`."""

    __slots__ = ("current", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def add(self, amount: int) -> None:
        """Go up by `amount`, or down where it is negative."""
        self.current += amount
        if self.current > self.peak:  # `max` takes twice the time, where time is spent
            self.peak = self.current


class Stats(NamedTuple):
    """What `torch.cuda.memory_stats` would say (pool `all`)."""

    requested_bytes: Stat
    allocated_bytes: Stat
    active_bytes: Stat
    """Equal to `allocated_bytes`: nothing waits for another stream."""
    reserved_bytes: Stat
    segments: int
    """Segments from cudaMalloc; PyTorch does not count expandable ones."""
    alloc_retries: int
    """How often cached segments had to be given back before a request was tried again."""
    ooms: int


_POOLS: Final = "all", "small_pool", "large_pool"
_BYTES: Final = {"inactive_split": "inactive_split_bytes", "segment": "reserved_bytes", "allocation": "allocated_bytes"}
"""Of what is counted, by what name its bytes are."""
_ALSO: Final = {"active": "allocation", "active_bytes": "allocated_bytes"}
"""What equals something else, as no block waits for another stream."""


class _Count:
    """A number that goes up and down: now, at most, and all that has come."""

    __slots__ = ("came", "now", "peak")

    def __init__(self) -> None:
        self.now = self.peak = self.came = 0

    def add(self, amount: int) -> None:
        """Go up by `amount`, or down where it is negative."""
        self.now = now = self.now + amount
        if amount > 0:
            self.came += amount
            if now > self.peak:
                self.peak = now


class _PoolCount:
    """What is counted of one pool, or of all."""

    def __init__(self) -> None:
        self.of = {kind: _Count() for kind in (*_BYTES, *_BYTES.values(), "requested_bytes")}

    def taken(self) -> tuple[_Count, _Count, _Count]:
        """What a block that is handed out changes."""
        return self.of["allocation"], self.of["allocated_bytes"], self.of["requested_bytes"]


class PoolCounts:
    """What `torch.cuda.memory_stats` counts by pool: what is there now and at most, what came and what went.

    The bytes of all pools are not counted here: the allocator does.

    Source: `DeviceStats` of c10/core/CachingDeviceAllocator.h and its updates in CUDACachingAllocator.cpp (torch 2.11).
    """

    def __init__(self) -> None:
        self._every, self._small, self._large = _PoolCount(), _PoolCount(), _PoolCount()
        self._small_taken, self._large_taken = self._small.taken(), self._large.taken()
        self._small_splits, self._large_splits = (
            [(each.of["inactive_split"], each.of["inactive_split_bytes"]) for each in (self._every, pool)]
            for pool in (self._small, self._large)
        )
        self._blocks = self._every.of["allocation"]

    def add(self, kind: str, amount: int, *, small: bool) -> None:
        """One kind goes up by `amount`, or down where it is negative."""
        for pool in (self._every, self._small if small else self._large):
            pool.of[kind].add(amount)

    def add_segment(self, nbytes: int, *, small: bool) -> None:
        """One more segment, of so many bytes, or one less where they are negative."""
        self.add("segment", 1 if nbytes > 0 else -1, small=small)
        self.add("reserved_bytes", nbytes, small=small)

    def take_block(self, small: bool, size: int, nbytes: int) -> None:
        """A block is handed out for so many bytes. Written out: a run of a generation comes here a million times."""
        blocks, sizes, requested = self._small_taken if small else self._large_taken
        sizes.came += size
        sizes.now = now = sizes.now + size
        if now > sizes.peak:
            sizes.peak = now
        requested.came += nbytes
        requested.now = now = requested.now + nbytes
        if now > requested.peak:
            requested.peak = now
        blocks.came += 1
        blocks.now = now = blocks.now + 1
        if now > blocks.peak:
            blocks.peak = now
        every = self._blocks
        every.now = now = every.now + 1
        if now > every.peak:
            every.peak = now

    def free_block(self, small: bool, size: int, nbytes: int) -> None:
        """A block is given back. What goes down is no peak."""
        blocks, sizes, requested = self._small_taken if small else self._large_taken
        sizes.now -= size
        requested.now -= nbytes
        blocks.now -= 1
        self._blocks.now -= 1

    def split(self, small: bool, splits: int, split_bytes: int) -> None:
        """Splits that are not in use change by so many, and their bytes."""
        for number, nbytes in self._small_splits if small else self._large_splits:
            number.now = now = number.now + splits
            if splits > 0:
                number.came += splits
                if now > number.peak:
                    number.peak = now
            nbytes.now = now = nbytes.now + split_bytes
            if split_bytes > 0:
                nbytes.came += split_bytes
                if now > nbytes.peak:
                    nbytes.peak = now

    def reset_peaks(self) -> None:
        """Let every peak begin anew at the current value."""
        for pool in (self._every, self._small, self._large):
            for count in pool.of.values():
                count.peak = count.now

    def flatten(self, stats: Stats) -> dict[str, int]:
        """By torch's names, such as `active.all.current`, with what the allocator counts."""
        for kind, stat in {"allocated_bytes": stats.allocated_bytes, "requested_bytes": stats.requested_bytes}.items():
            of = self._every.of[kind]
            of.now, of.peak = stat.current, stat.peak
            of.came = self._small.of[kind].came + self._large.of[kind].came
        self._blocks.came = self._small_taken[0].came + self._large_taken[0].came
        found: dict[str, int] = {}
        for name, pool in zip(_POOLS, (self._every, self._small, self._large), strict=True):
            for kind, count in [*pool.of.items(), *((also, pool.of[kind]) for also, kind in _ALSO.items())]:
                values = {"current": count.now, "peak": count.peak, "allocated": count.came}
                found |= {f"{kind}.{name}.{which}": value for which, value in values.items()}
                found[f"{kind}.{name}.freed"] = count.came - count.now
        return found


class BlockView(Record):
    """One block of a segment."""

    address: int
    size: Bytes
    requested_bytes: Bytes | None
    """None when the block is free."""


class Segment(Record):
    """A contiguous range of device memory: one cudaMalloc, or one mapped run of an expandable segment."""

    address: int
    large: bool
    """Which pool it belongs to."""
    expandable: bool
    stream: int = 0
    """The CUDA stream that may take its blocks."""
    blocks: tuple[BlockView, ...]
    """In order of address; together they cover the segment."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(block.size for block in self.blocks)

    def describe(self, frames: list[Any], frames_of: Callable[[int], list[Any]]) -> dict[str, Any]:
        """The segment as `torch.cuda.memory._snapshot` has it (torch 2.11).

        Args:
            frames: where it was asked of the driver.
            frames_of: where the block at an address was asked for.
        """
        live = [block for block in self.blocks if block.requested_bytes is not None]
        allocated = sum(block.size for block in live)
        return {
            "device": 0,
            "address": self.address,
            "total_size": self.size,
            "stream": self.stream,
            "segment_type": "large" if self.large else "small",
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(block.requested_bytes or 0 for block in live),
            "segment_pool_id": (0, 0),
            "is_expandable": self.expandable,
            "frames": frames,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested_bytes or 0,
                    "state": "inactive" if block.requested_bytes is None else "active_allocated",
                    "frames": [] if block.requested_bytes is None else frames_of(block.address),
                }
                for block in self.blocks
            ],
        }


@dataclass(eq=False)
class OutOfMemory(ExceededError):
    """The driver refused a request even after all cached segments were given back."""

    asked_bytes: int
    segment_bytes: int
    """What was asked of the driver for it, the figure in PyTorch's message."""
    free_bytes: int
    """What the driver had left."""
    allocated_bytes: int
    reserved_bytes: int
    largest_free_block_bytes: int
    """The largest block that the request's pool still caches."""

    def __str__(self) -> str:
        return (
            f"out of memory: {self.asked_bytes:,} bytes asked for ({self.segment_bytes:,} from the driver), "
            f"{self.free_bytes:,} free, {self.reserved_bytes:,} reserved of which {self.allocated_bytes:,} allocated, "
            f"largest free block {self.largest_free_block_bytes:,}"
        )
