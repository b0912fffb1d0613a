"""A long run of steps of given lengths on the caching allocator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fxmem.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from fxmem.memory.lengths.forms import Features
from fxmem.memory.lengths.step_forms import HELD, BlockRequest, StepForms

_SLOTS = 1 << 24
"""More than a step allocates."""


class LongRun(NamedTuple):
    """What the allocator makes of a run."""

    steps: int
    """Steps that were replayed to their end, the recorded ones included."""
    requested_bytes: tuple[int, ...]
    """The most at once, of set-up and of each step."""
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    retries: int
    """How often the cache was emptied to find room."""
    is_full: bool
    """Whether the step after the last found no room."""


def replay_lengths(
    forms: StepForms,
    steps: Iterable[Features],
    settings: AllocatorSettings,
    *,
    capacity_bytes: int | None = None,
    device_bytes: int | None = None,
    most_requests: int | None = None,
    recorded: int | None = None,
) -> LongRun:
    """Replay set-up and recorded steps, then steps of these lengths.

    Args:
        forms: of the program.
        steps: the lengths of each further step.
        settings: the allocator's.
        capacity_bytes: what the driver has; None refuses nothing.
        device_bytes: the card's memory.
        most_requests: after so many requests no further step begins; None for all steps.
        recorded: how many recorded steps come first; None for all.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=device_bytes)
    addresses: dict[int, int] = {}
    peaks: list[tuple[int, int, int]] = []
    done = 0

    def run(number: int, requests: list[BlockRequest]) -> None:
        malloc, free, base = allocator.malloc, allocator.free, number * _SLOTS
        for nbytes, age, slot, stream in requests:
            key = slot if slot < 0 else base - age * _SLOTS + slot
            if nbytes >= 0:
                address = malloc(nbytes, stream)
                if slot != HELD:
                    addresses[key] = address
            elif nbytes == -1:
                free(addresses.pop(key, 0))
            else:
                allocator.empty_cache()
        requested, allocated, _, reserved, *_ = allocator.stats()
        peaks.append((requested.peak, allocated.peak, reserved.peak))
        allocator.reset_peak_stats()

    is_full = False
    first = forms.recorded()[: None if recorded is None else recorded + 1]
    try:
        for number, requests in enumerate(first):
            run(number, requests)
            done += len(requests)
        for number, features in enumerate(steps, len(first)):
            if most_requests is not None and done >= most_requests:
                break
            requests = forms.step(features)
            run(number, requests)
            done += len(requests)
    except OutOfMemory:
        is_full = True
    requested, allocated, reserved = (tuple(each[i] for each in peaks) for i in range(3))
    return LongRun(len(peaks) - 1, requested, allocated, reserved, allocator.stats().alloc_retries, is_full)
