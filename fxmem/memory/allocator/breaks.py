"""What breaks the allocator's cache: a request that goes to the driver although much is cached, in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.settings import SMALL_SIZE, AllocatorSettings
from fxmem.memory.allocator.training_loop import TrainingLoop
from fxmem.records.profile import Profile


@dataclass(frozen=True)
class Break:
    """A request for which the driver was asked, and the segment that it could not use."""

    wanted: int
    """Index of the storage that was asked for."""
    grown_bytes: int
    """What the driver gave for it."""
    segment_bytes: int
    """Of the segment with the most free bytes, which is as large as the request at least."""
    free_bytes: int
    """Free in it."""
    kept: tuple[int, ...]
    """Indices of the storages that were alive in it, the smallest first."""


def find_break(profile: Profile, settings: AllocatorSettings, steps: int) -> Break | None:
    """Find the large request for which the driver gave most, in the first steps of the loop that `replay` runs.

    Args:
        profile: the step.
        settings: of the allocator.
        steps: how many steps are looked at.

    Returns:
        None where the driver is asked for nothing that a whole segment of the cache could have served, of which a
        quarter is free.
    """
    unlimited = settings.model_copy(update={"per_process_memory_fraction": 1.0})
    loop = _BreakFinder(profile, CachingAllocator(unlimited, device_bytes=profile.target.memory_bytes))
    for _ in range(steps):
        loop.run_step()
    return loop.found


class _BreakFinder(TrainingLoop):
    """The loop; notes what it meets while it runs."""

    found: Break | None = None

    def _place(self, storage: int) -> None:
        before = self._allocator.reserved_bytes
        cached = before - self._allocator.allocated_bytes
        super()._place(storage)
        nbytes = self.profile.storages[storage].nbytes
        grown = self._allocator.reserved_bytes - before
        if 2 * cached >= nbytes > SMALL_SIZE and grown > (0 if self.found is None else self.found.grown_bytes):
            self.found = self._look(storage, grown) or self.found

    def _look(self, storage: int, grown: int) -> Break | None:
        """The segment that is lost to this request."""
        asked, address = self.profile.storages[storage], self._address[storage]
        found = None
        for segment in self._allocator.snapshot():
            is_own = segment.address <= address < segment.address + segment.size
            free = sum(block.size for block in segment.blocks if block.requested_bytes is None)
            kept = [self._owner[block.address] for block in segment.blocks if block.requested_bytes is not None]
            is_usable = segment.large and segment.stream == asked.stream and segment.size >= asked.nbytes
            most = segment.size // 4 if found is None else found.free_bytes
            if is_usable and not is_own and kept and free > most:
                kept.sort(key=lambda index: self.profile.storages[index].nbytes)
                found = Break(storage, grown, segment.size, free, tuple(kept))
        return found
