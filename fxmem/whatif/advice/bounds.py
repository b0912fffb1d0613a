"""Upper bounds on what a change frees, by the record of the step as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fxmem.records.profile import Phase
from fxmem.simulation.code.profiled_step import ProfiledStep


class Bound(NamedTuple):
    """The most that a change frees, in bytes."""

    allocated: int
    """Of the peak."""
    reserved: int
    """Of what the allocator reserves, as it is replayed."""


def bound_saving(
    step: ProfiledStep, environ: Mapping[str, str], gone: Collection[int] = (), *, of: Phase | None = None
) -> Bound:
    """The most that a change frees which alters certain storages alone: all that there is without them stays.

    Args:
        step: as it is.
        environ: contains the allocator's settings.
        gone: indices of the storages.
        of: a phase, all storages of which are among them.
    """
    profile, peak = step.profile, step.peak
    spans = [(span.begin, span.end) for span in profile.phases if span.phase is of]
    storages = [
        each.model_copy(update={"nbytes": 0})
        if index in gone or any(begin <= each.birth < end for begin, end in spans)
        else each
        for index, each in enumerate(profile.storages)
    ]
    left = step.replay(environ, profile.model_copy(update={"storages": tuple(storages)})).peak
    allocated = max(peak.counted_bytes - left.counted_bytes, 0)
    return Bound(allocated, max((peak.reserved_bytes or 0) - (left.reserved_bytes or 0), 0))
