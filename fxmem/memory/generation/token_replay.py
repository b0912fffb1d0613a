"""A generation's requests in a fresh process, replayed by the caching allocator token by token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fxmem.memory import liveness
from fxmem.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from fxmem.memory.allocator.training_loop import PLACING_ORDER
from fxmem.memory.generation.decode_steps import Events
from fxmem.records.parts import TokenBytes
from fxmem.records.profile import Phase, PhaseSpan, Profile


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
    births, deaths, nbytes = _columns(events)
    live = np.zeros(events.ticks + 1, np.int64)
    np.add.at(live, births, nbytes)
    np.subtract.at(live, deaths, nbytes)
    np.cumsum(live, out=live)
    borders = [0, *events.begins[1:], max(events.ticks, 1)]
    return [int(live[begin:end].max(initial=0)) for begin, end in pairwise(borders)]


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
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=profile.target.memory_bytes)
    most = requested_by_token(events)
    storages, nbytes, sources = profile.storages, events.nbytes, events.sources
    streams = [each.stream for each in storages]
    addresses = array("q", bytes(8 * len(nbytes)))
    tokens: list[TokenBytes] = []
    malloc, free = allocator.malloc, allocator.free
    is_whole = True
    try:
        for index in _residents(profile, events):
            addresses[index] = malloc(nbytes[index], streams[sources[index]])
        for number, (requested, moments) in enumerate(zip(most, _order(profile, events), strict=True), 1):
            for index in moments:
                if index < 0:
                    free(addresses[~index])
                else:
                    addresses[index] = malloc(nbytes[index], streams[sources[index]])
            _, held, _, got, *_ = allocator.stats()
            peaks = {"requested_bytes": requested, "allocated_bytes": held.peak, "reserved_bytes": got.peak}
            tokens.append(TokenBytes(token=number, **peaks))
            allocator.reset_peak_stats()
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


def _order(profile: Profile, events: Events) -> Iterator[list[int]]:
    """The births and deaths of each token by tick, births first. A storage that dies is `~index`.

    A library's workspace takes what is free when its first operator runs.
    """
    births, deaths, _ = _columns(events)
    first_uses = births.copy()
    for index in np.flatnonzero((births == 0) & (deaths >= events.ticks)).tolist():
        if (op := profile.storages[index].op) is not None:
            first_uses[index] = profile.ops[op].end
    born, dying = np.flatnonzero(first_uses), np.flatnonzero(deaths < events.ticks)
    width = max(len(births), 1).bit_length()
    keys = np.empty(len(born) + len(dying), np.int64)
    early, late = keys[: len(born)], keys[len(born) :]
    np.left_shift(first_uses[born], 1 + width, out=early)
    np.left_shift(deaths[dying], 1 + width, out=late)
    early |= born
    late |= dying
    late |= 1 << width
    del first_uses, born, dying  # megabytes each
    keys.sort()
    cuts = np.searchsorted(keys, np.array([*events.begins[1:], events.ticks + 1], np.int64) << 1 + width).tolist()
    for begin, end in pairwise([0, *cuts]):
        part = keys[begin:end]
        indices = part & (1 << width) - 1
        yield np.where(part >> width & 1, ~indices, indices).tolist()


def _columns(events: Events) -> tuple[np.ndarray[Any, Any], ...]:
    """Births, deaths and bytes, not copied."""
    return tuple(np.frombuffer(each, np.int64) for each in (events.births, events.deaths, events.nbytes))


# --- prefill and decode, the phases of a generation -------------------------------------------------------------------


def name_phases(profile: Profile, begins: Sequence[int]) -> Profile:
    """The profile of a generation in two phases, prefill and decode; its nodes have their bytes.

    Args:
        profile: a generation.
        begins: the tick at which each token's forward begins.
    """
    border = begins[1] if len(begins) > 1 else profile.ticks
    op = next((i for i, each in enumerate(profile.ops) if each.begin >= border), len(profile.ops))
    first = profile.phases[0].begin if profile.phases else 0
    spans = [PhaseSpan(phase=Phase.PREFILL, begin=first, end=border, first_op=0, last_op=op)]
    if len(begins) > 1:
        last = {"end": profile.ticks, "last_op": len(profile.ops)}
        spans.append(PhaseSpan(phase=Phase.DECODE, begin=border, first_op=op, **last))
    ops = tuple(
        each.model_copy(update={"phase": Phase.PREFILL if index < op else Phase.DECODE})
        for index, each in enumerate(profile.ops)
    )
    named = profile.model_copy(update={"phases": tuple(spans), "ops": ops})
    live, scratch = liveness.node_live_bytes(named), liveness.node_scratch_bytes(named)
    nodes = tuple(
        node.model_copy(update={"live_bytes": live[i], "scratch_bytes": scratch[i]})
        for i, node in enumerate(named.nodes)
    )
    return named.model_copy(update={"nodes": nodes})
