"""Whether a step fits a memory, and whether it keeps a budget: the one place that says what these mean."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fxmem.memory import allocator, budgets
from fxmem.records.profile import Peak, Profile
from fxmem.records.units import format_bytes

__all__ = ["keeps", "within"]


def within(profile: Profile, peak: Peak, memory_bytes: int, environ: Mapping[str, str] | None = None) -> Peak:
    """The profile's peak with `fits` and `shortage` for that much memory instead of the target's.

    For a card: whether a loop over the step runs when the driver gives the allocator no more than that
    (`allocator.fits`), its settings being those of `environ` (None: this process's). Without an allocator: whether the
    requested bytes are no more.
    """
    used = peak.requested_bytes if peak.reserved_bytes is None else peak.reserved_bytes
    if used <= memory_bytes:
        return peak.model_copy(update={"fits": True, "shortage": ""})
    if peak.reserved_bytes is None:
        return peak.model_copy(
            update={
                "fits": False,
                "shortage": f"Its peak, in {peak.phase}, is {format_bytes(used - memory_bytes)} more",
            }
        )
    settings = allocator.settings_of(os.environ if environ is None else environ)
    shortage = allocator.replay(profile, settings=settings, capacity_bytes=memory_bytes).shortage
    return peak.model_copy(update={"fits": shortage is None, "shortage": "" if shortage is None else shortage.in_words})


def keeps(profile: Profile, peak: Peak, budget_bytes: int, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a step keeps a budget in bytes: its counted peak (`budgets.counted_bytes`) is no more, and it fits that
    much memory."""
    return budgets.counted_bytes(peak) <= budget_bytes and bool(within(profile, peak, budget_bytes, environ).fits)
