"""What the allocator adds to a timeline's peak."""

from __future__ import annotations

from collections.abc import Mapping

from fxmem.hardware.context import context_range
from fxmem.memory import liveness
from fxmem.memory.allocator.address_trace import Levels, levels
from fxmem.memory.allocator.replay import replay
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import ProcessBytes, Profile, Timeline


def read_settings(environ: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings PyTorch finds in an environment: `PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`."""
    return AllocatorSettings.from_string(
        environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    )


@pause_gc()
def complete_timeline(profile: Profile, environ: Mapping[str, str], reserved_bytes: int = 0) -> Timeline:
    """Return the profile's timeline, its peak completed by the allocator's bytes for a CUDA target. These are the
    allocated and reserved bytes, whether the step fits, and, where it has been measured what a process takes of that
    card beside these (`hardware.context`), the process's bytes.

    The allocator's settings are those of `environ` (`PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`). Allocated
    and reserved are replayed without a limit, as they are on a card that is large enough; if that is more than the
    target has, the loop is replayed once more within the target's memory. Of a step in a program, `reserved_bytes` is
    what the program's process had reserved before: set-up may have left more than the step needs.

    Raises: `UsageError` for settings PyTorch would refuse.
    """
    timeline = liveness.timeline(profile)
    if profile.target.device != "cuda":
        return timeline
    settings = read_settings(environ)
    free, memory = replay(profile, settings=settings), profile.target.memory_bytes
    bounded = (
        replay(profile, settings=settings, capacity_bytes=memory)
        if memory is not None and (free.reserved_bytes or 0) > memory
        else free
    )
    context = context_range(profile.target)
    reserved = None if free.reserved_bytes is None else max(free.reserved_bytes, reserved_bytes)
    waiting = _reserved_if_all_wait(profile, settings)
    peak = timeline.peak.model_copy(
        update={
            "allocated_bytes": free.allocated_bytes,
            "reserved_bytes": reserved,
            "reserved_high_bytes": None if waiting is None else max(waiting, reserved or 0),
            "process_bytes": None
            if context is None or reserved is None
            else ProcessBytes(low=reserved + context.low, high=reserved + context.high, grounds=context.grounds),
            "fits": None if memory is None else bounded.shortage is None,
            "shortage": "" if bounded.shortage is None else bounded.shortage.sentence,
        }
    )
    return timeline.model_copy(update={"peak": peak})


def _reserved_if_all_wait(profile: Profile, settings: AllocatorSettings) -> int | None:
    """Reserved bytes if each block that `record_stream` has named waits as long as it can; None without any.

    A freed block waits for the streams that used it (`insert_events`, `process_events` in
    c10/cuda/CUDACachingAllocator.cpp): how long hangs on the time their kernels take. It ends when the host has waited
    for these streams, at the latest with the step.
    """
    storages = tuple(
        each.model_copy(update={"death": each.free_by or profile.ticks}) if each.used_on and each.birth else each
        for each in profile.storages
    )
    if storages == profile.storages:
        return None
    return replay(profile.model_copy(update={"storages": storages}), settings=settings).reserved_bytes


@pause_gc()
def known_levels(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> Levels | None:
    """Return the bytes that the allocator reserves, by tick, where they are known. None without allocated bytes in the
    timeline's peak, and where these settings do not lead to them, as for a report that was written under others. What a
    program's set-up has reserved beyond its step stays reserved."""
    allocated, reserved = timeline.peak.allocated_bytes, timeline.peak.reserved_bytes
    if allocated is None or reserved is None:
        return None
    found = levels(profile, settings)
    if max(found.allocated_bytes, default=0) != allocated:
        return None
    if profile.step.program is not None and reserved > max(found.reserved_bytes):
        return Levels(found.allocated_bytes, (reserved,) * len(found.reserved_bytes))
    return found
