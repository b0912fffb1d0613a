"""Private names of torch's CUDA allocator, each with why and since when. Nothing here is called without a card.

The public interface gives peaks and current values but neither the log of allocations nor a way to free what
cuBLAS holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.cuda.memory

_MAX_ENTRIES = 1_000_000
"""Events kept: more than any step here has, at some 100 bytes of host memory each."""


class AllocatorLog:
    """The requests to one card's caching allocator while `record` is open: signed requested bytes, in order.

    `_record_memory_history` with `context=None` keeps no stack (since 2.1; its default `stacks="all"` would warm up the
    C++ unwinder all the same), `_snapshot` gives the entries (since 1.13). In an entry `alloc` and `free_requested`
    carry the requested bytes, not the block's (`c10/cuda/CUDACachingAllocator.cpp`, `alloc_found_block` and
    `free`); `free_completed` repeats the free, `segment_*` are the driver's business.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._read = 0

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Keep the log meanwhile."""
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=_MAX_ENTRIES)
        try:
            self._read = len(self._entries())
            yield
        finally:
            torch.cuda.memory._record_memory_history(None)

    def take(self) -> list[int]:
        """The events since the last call, or since recording began."""
        entries = self._entries()
        new, self._read = entries[self._read :], len(entries)
        sign = {"alloc": 1, "free_requested": -1}
        return [sign[entry["action"]] * entry["size"] for entry in new if entry["action"] in sign and entry["size"]]

    def _entries(self) -> list[Any]:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        return list(traces[self._device]) if self._device < len(traces) else []


def drop_cublas_workspaces() -> None:
    """Free the cuBLAS workspaces of this process; its next matrix product allocates them anew
    (`_cuda_clearCublasWorkspaces`, since 1.13)."""
    torch._C._cuda_clearCublasWorkspaces()
