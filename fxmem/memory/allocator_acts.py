"""What a program's allocator is asked for in one step, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from fxmem.hardware.hidden_memory import HiddenMemory


class Free(NamedTuple):
    """A storage is freed."""

    storage: int


class Hold(NamedTuple):
    """A library's workspace is allocated, for good."""

    nbytes: int
    stream: int


class Empty(NamedTuple):
    """The program empties the allocator's cache."""


class RunKernel(NamedTuple):
    """An operator allocates its outputs, and what its kernel has for itself."""

    storages: tuple[int, ...]
    """The numbers of its outputs."""
    nbytes: tuple[int, ...]
    stream: int
    hidden: HiddenMemory | None = None
    call: tuple[str, Sequence[Any], Any] | None = None
    """Operator, arguments and result that `hidden` follows from, tensors as layouts; None where it does not."""


Act = Free | Hold | Empty | RunKernel
"""One thing that a step asks of the allocator."""


# --- PyTorch's caching allocator of pinned host memory (aten/src/ATen/core/CachingHostAllocator.h), replayed ----------


class PinnedPool:
    """The blocks of pinned memory: each is a power of two, and is kept for the next request of that size.

    Assumed is that a freed block can be used again at once. Where a copy still reads it, torch takes another one.
    """

    def __init__(self) -> None:
        self._free: Counter[int] = Counter()
        self.allocated_bytes = 0
        """In blocks, used or kept."""
        self.active_bytes = 0
        """In blocks that are used."""
        self.blocks = 0
        self.requests = 0
        self.active_requests = 0
        self.peak_active_bytes = self.peak_active_requests = self.handed_bytes = 0

    def malloc(self, nbytes: int) -> int:
        """Take a block for a request; its bytes."""
        block = 1 << max(nbytes - 1, 0).bit_length()  # c10::llvm::PowerOf2Ceil
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.blocks += 1
            self.allocated_bytes += block
        self.requests += 1
        self.handed_bytes += block
        self.active_requests += 1
        self.active_bytes += block
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        self.peak_active_requests = max(self.peak_active_requests, self.active_requests)
        return block

    def free(self, block: int) -> None:
        """Give a block of so many bytes back, which is kept."""
        self._free[block] += 1
        self.active_requests -= 1
        self.active_bytes -= block

    def counts(self) -> dict[str, int]:
        """What `torch.cuda.host_memory_stats` says, by its names; its times are not known, and 0."""
        used = self.requests - self.active_requests
        rows = {
            "allocations": (self.blocks, self.blocks, self.blocks, 0),
            "allocated_bytes": (self.allocated_bytes, self.allocated_bytes, self.allocated_bytes, 0),
            "active_requests": (self.active_requests, self.peak_active_requests, self.requests, used),
            "active_bytes": (
                *(self.active_bytes, self.peak_active_bytes, self.handed_bytes),
                self.handed_bytes - self.active_bytes,
            ),
        }
        names = ("current", "peak", "allocated", "freed")
        found = {
            f"{row}.{name}": value for row, values in rows.items() for name, value in zip(names, values, strict=True)
        }
        times = ("total", "max", "min", "count", "avg")
        found |= {f"host_{what}_time.{name}": 0 for what in ("alloc", "free") for name in times}
        return found | {"num_host_alloc": self.blocks, "num_host_free": 0}
