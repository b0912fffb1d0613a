"""Far more is reserved than allocated: what is alive in a segment breaks it for larger requests, or steps were smaller
before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fxmem.memory import allocator
from fxmem.memory.allocator import DEFAULT_SETTINGS, Break
from fxmem.memory.findings import Finding, register
from fxmem.memory.last_use import find_idle, free_after_last_use
from fxmem.memory.user_code import find_place
from fxmem.records.profile import Kind, Profile, Timeline
from fxmem.records.units import format_bytes, to_words

_SHARE: Final = 10
"""Said where this share of what is reserved is not allocated, one in so many, and a remedy frees as much."""
_LEAST: Final = 256 << 20
"""And so many bytes: segments are of 20 MiB at the least, which is much of a small step."""
_MAX_SPLIT_MIB: Final = (64, 256)


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the loop over the step explains it, and a remedy, replayed, reserves less; or where a program's
    steps are of different sizes, and the cache has grown by more than they have.

    The settings are the allocator's own: under others the loop does not lead to the reserved bytes, and nothing is
    said.
    """
    peak = timeline.peak
    if not peak.fits or peak.allocated_bytes is None or peak.reserved_bytes is None or peak.at_least:
        return
    unused, least = peak.reserved_bytes - peak.allocated_bytes, max(peak.reserved_bytes // _SHARE, _LEAST)
    if unused < least:
        return
    replayed = allocator.replay(profile)
    reserved = replayed.reserved_bytes or 0
    if abs(reserved - peak.reserved_bytes) > (least if profile.step.program else 0):
        if peak.reserved_bytes - reserved >= least and _grow_cache(profile, least):
            yield Finding(
                cause="fragmentation",
                text="steps of other sizes have left blocks in the cache that this one's requests do not fit",
                nbytes=unused,
                of="reserved",
                change="PYTORCH_ALLOC_CONF=expandable_segments:True, or batches padded to few sizes",
            )
        return
    worth = {name: reserved - nbytes for name, nbytes in _try_remedies(profile, timeline) if reserved - nbytes >= least}
    if worth:
        broken = allocator.find_break(profile, DEFAULT_SETTINGS, replayed.steps)
        broken = broken if broken is not None and broken.grown_bytes * _SHARE >= unused else None
        best, *others = sorted(worth, key=lambda name: -worth[name])
        also = "".join(f"; {name}, {format_bytes(worth[name])} less" for name in others)
        yield Finding(
            cause="fragmentation",
            text="what is cached is in pieces that no request fits" if broken is None else _describe(profile, broken),
            place="" if broken is None else find_place(profile, profile.storages[broken.kept[0]].node),
            nbytes=unused,
            of="reserved",
            change=f"{best}{also}",
            saved_bytes=worth[best],
        )


def _grow_cache(profile: Profile, least: int) -> bool:
    """Whether a program's steps differ in size, and more was reserved from the first on than their peaks have grown.

    The second step may be larger than the first by the optimizer's state alone, so the later ones have to differ.
    """
    program = profile.step.program
    steps = [each for each in program.rounds[: program.shown] if each.is_whole] if program else []
    if len({each.requested_bytes for each in steps[1:]}) < 2:
        return False
    first, last = steps[0], steps[-1]
    grown = (last.reserved_bytes or 0) - (first.reserved_bytes or 0)
    return grown - ((last.allocated_bytes or 0) - (first.allocated_bytes or 0)) >= least


def _try_remedies(profile: Profile, timeline: Timeline) -> Iterator[tuple[str, int]]:
    """What the loop reserves with each."""
    yield "PYTORCH_ALLOC_CONF=expandable_segments:True", _reserve(profile, expandable_segments=True)
    split = {mib: _reserve(profile, max_split_bytes=mib << 20) for mib in _MAX_SPLIT_MIB}
    best = min(split, key=lambda mib: split[mib])
    yield f"PYTORCH_ALLOC_CONF=max_split_size_mb:{best}", split[best]
    idle = [*find_idle(profile, timeline.peak.tick)]
    if idle:
        nodes = (profile.storages[index].node for index in idle)
        names = frozenset(profile.nodes[node].name for node in nodes if node is not None)
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        freed = f"{_name(profile, idle[0])}{more} freed after the last use"
        yield freed, _reserve(free_after_last_use(profile, names))
    state = [each for each in profile.storages if each.kind is Kind.OPTIMIZER_STATE]
    if state:
        first = (
            each.model_copy(update={"kind": Kind.BUFFER}) if each.kind is Kind.OPTIMIZER_STATE else each
            for each in profile.storages
        )
        changed = profile.model_copy(update={"storages": tuple(first)})
        yield "the optimizer's state made before the first step", _reserve(changed)


def _reserve(profile: Profile, **settings: Any) -> int:
    replayed = allocator.replay(profile, settings=DEFAULT_SETTINGS.model_copy(update=settings))
    return replayed.reserved_bytes or 0


def _describe(profile: Profile, broken: Break) -> str:
    kept, wanted = profile.storages[broken.kept[0]], profile.storages[broken.wanted]
    place = find_place(profile, wanted.node)
    return (
        f"{_name(profile, broken.kept[0])} of {format_bytes(kept.nbytes)} is alive in a segment of "
        f"{format_bytes(broken.segment_bytes)}, so that {_name(profile, broken.wanted)} of "
        f"{format_bytes(wanted.nbytes)}{f' ({place})' if place else ''} needs a new one"
    )


def _name(profile: Profile, index: int) -> str:
    of = profile.storages[index]
    return of.title or (to_words(of.kind) if of.node is None else f"a result of {profile.nodes[of.node].name}")


register("fragmentation", find)
