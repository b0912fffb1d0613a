"""A generation's requests in a fresh process, replayed by the caching allocator token by token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fxmem.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from fxmem.memory.allocator.training_loop import PLACING_ORDER
from fxmem.memory.generation.decode_steps import Events
from fxmem.records.parts import TokenBytes
from fxmem.records.profile import Profile

_SHIFT = 40


@dataclass(frozen=True)
class TokenReplay:
    """What the allocator makes of a generation, the first of its process."""

    tokens: tuple[TokenBytes, ...]
    """Of each token that was computed to its end."""
    alloc_retries: int
    is_whole: bool
    """Whether no request was refused."""


def requested_by_token(events: Events) -> list[int]:
    """The most bytes requested while each token is computed. What comes before the first forward is the first's."""
    change = array("q", bytes(8 * (events.ticks + 1)))
    for birth, death, nbytes in zip(events.births, events.deaths, events.nbytes, strict=True):
        change[birth] += nbytes
        change[death] -= nbytes
    live = array("q", accumulate(change))
    borders = [0, *events.begins[1:], max(events.ticks, 1)]
    return [max(live[begin:end], default=0) for begin, end in pairwise(borders)]


def replay_tokens(
    profile: Profile, events: Events, settings: AllocatorSettings, capacity_bytes: int | None = None
) -> TokenReplay:
    """Replay a generation, its model having been moved to the card before.

    Args:
        profile: the recorded generation.
        events: its storages, or those of a longer one.
        settings: the allocator's.
        capacity_bytes: what the driver refuses to exceed; None for no limit.
    """
    sizes = [each for each in (profile.target.memory_bytes, capacity_bytes) if each is not None]
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=max(sizes, default=None))
    requested = requested_by_token(events)
    storages, nbytes = profile.storages, events.nbytes
    streams = [each.stream for each in storages]
    addresses = array("q", bytes(8 * len(nbytes)))
    tokens: list[TokenBytes] = []

    def end_token() -> None:
        stats = allocator.stats()
        allocated, reserved = stats.allocated_bytes.peak, stats.reserved_bytes.peak
        number = len(tokens)
        tokens.append(
            TokenBytes(
                token=number + 1,
                requested_bytes=requested[number],
                allocated_bytes=allocated,
                reserved_bytes=reserved,
            )
        )
        allocator.reset_peak_stats()

    mask = (1 << _SHIFT) - 1
    borders = [*events.begins[1:], events.ticks + 1]
    border = 0
    is_whole = True
    try:
        for index in _residents(profile, events):
            addresses[index] = allocator.malloc(nbytes[index], streams[events.sources[index]])
        for key in _order(profile, events):
            moment, index = key >> _SHIFT, key & mask
            while moment >> 1 >= borders[border]:
                end_token()
                border += 1
            if moment & 1:
                allocator.free(addresses[index])
            else:
                addresses[index] = allocator.malloc(nbytes[index], streams[events.sources[index]])
        while len(tokens) < len(events.begins):
            end_token()
    except OutOfMemory:
        is_whole = False
    return TokenReplay(tuple(tokens), allocator.stats().alloc_retries, is_whole)


def _residents(profile: Profile, events: Events) -> list[int]:
    """What is there when the generation begins, in the order of its allocation."""
    storages = profile.storages
    there = [
        i
        for i, (birth, death) in enumerate(zip(events.births, events.deaths, strict=True))
        if birth == 0 and (storages[i].op is None or death < events.ticks)
    ]
    return sorted(there, key=lambda i: (events.deaths[i] < events.ticks, PLACING_ORDER.get(storages[i].kind, 3), i))


def _order(profile: Profile, events: Events) -> list[int]:
    """Births and deaths as numbers that sort by tick, births first: `(2 * tick + is_death) << _SHIFT | storage`.

    A library's workspace takes what is free when its first operator runs.
    """
    keys = []
    for index, (birth, death) in enumerate(zip(events.births, events.deaths, strict=True)):
        if birth:
            keys.append(birth << 1 + _SHIFT | index)
        elif death >= events.ticks and (op := profile.storages[index].op) is not None:
            keys.append(profile.ops[op].end << 1 + _SHIFT | index)
        if death < events.ticks:
            keys.append((death << 1 | 1) << _SHIFT | index)
    keys.sort()
    return keys
