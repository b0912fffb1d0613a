"""What the caching allocator reports: statistics, a snapshot of its segments, refused requests."""

from __future__ import annotations

from fxmem.errors import ExceededError
from fxmem.records.profile import Bytes, Record


class Stat(Record):
    """A number of bytes now, and the largest since the start or the last `reset_peak_stats`."""

    current: Bytes
    peak: Bytes


class Gauge:
    """A number that goes up and down, and remembers how high it was."""

    __slots__ = ("current", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def add(self, amount: int) -> None:
        """Go up by `amount`, or down where it is negative."""
        self.current += amount
        if self.current > self.peak:  # `max` takes twice the time, where time is spent
            self.peak = self.current

    def stat(self) -> Stat:
        """As a record."""
        return Stat(current=self.current, peak=self.peak)


class Stats(Record):
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


class OutOfMemory(ExceededError):
    """The driver refused a request even after all cached segments were given back.

    `asked_bytes` is the request, `segment_bytes` what was asked of the driver for it (the figure in PyTorch's message),
    `free_bytes` what the driver had left, `largest_free_block_bytes` the largest block the request's pool still caches.
    """

    def __init__(
        self,
        *,
        asked_bytes: int,
        segment_bytes: int,
        free_bytes: int,
        requested: int,
        allocated: int,
        reserved: int,
        largest: int,
    ) -> None:
        self.asked_bytes = asked_bytes
        self.segment_bytes = segment_bytes
        self.free_bytes = free_bytes
        self.requested_bytes = requested
        self.allocated_bytes = allocated
        self.reserved_bytes = reserved
        self.largest_free_block_bytes = largest
        super().__init__(
            f"out of memory: {asked_bytes:,} bytes asked for ({segment_bytes:,} from the driver), {free_bytes:,} free, "
            f"{reserved:,} reserved of which {allocated:,} allocated, largest free block {largest:,}"
        )
