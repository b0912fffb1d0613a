"""Far more is reserved than allocated, on a card that has little more: requests do not fit the pieces that are free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.hardware.context import room_bytes
from fxmem.memory import allocator
from fxmem.memory.allocator import DEFAULT_SETTINGS
from fxmem.memory.findings import Finding
from fxmem.records.profile import Profile, Timeline

_SHARE: Final = 10
"""Said where this share of what is reserved is not allocated, one in so many, and the remedy frees as much."""
_LEAST: Final = 256 << 20
"""And so many bytes: segments are of 20 MiB at the least, which is much of a small step."""
_DECIDES: Final = 2
"""And where so many such steps would not fit the card: on a card with more room it decides nothing."""
_CHANGE: Final = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the loop over the step explains it, and the remedy, replayed, reserves less; or where a program's
    steps are of different sizes, and the cache has grown by more than they have.

    The settings are the allocator's own: under others the loop does not lead to the reserved bytes, and nothing is
    said.
    """
    peak, room = timeline.peak, room_bytes(profile.target)
    if not peak.fits or peak.allocated_bytes is None or peak.reserved_bytes is None or peak.at_least or room is None:
        return
    unused, least = peak.reserved_bytes - peak.allocated_bytes, max(peak.reserved_bytes // _SHARE, _LEAST)
    if unused < least or peak.reserved_bytes * _DECIDES <= room:
        return
    reserved = _reserve(profile, expandable=False)
    if abs(reserved - peak.reserved_bytes) > (least if profile.step.program else 0):
        if peak.reserved_bytes - reserved >= least and _grow_cache(profile, least):
            yield Finding(
                cause="fragmentation",
                text="what is reserved is in pieces that steps of other sizes have left",
                nbytes=unused,
                of="reserved",
                change=f"{_CHANGE}, or batches padded to few sizes",
            )
    elif (freed := reserved - _reserve(profile, expandable=True)) >= least:
        yield Finding(
            cause="fragmentation",
            text="what is reserved is in pieces",
            nbytes=unused,
            of="reserved",
            change=_CHANGE,
            saved_bytes=freed,
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


def _reserve(profile: Profile, *, expandable: bool) -> int:
    """What the loop over the step reserves."""
    settings = DEFAULT_SETTINGS.model_copy(update={"expandable_segments": expandable})
    return allocator.replay(profile, settings=settings).reserved_bytes or 0
