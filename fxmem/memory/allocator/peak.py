"""What the allocator adds to a timeline's peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fxmem.hardware.context import process_range, room_bytes
from fxmem.memory import liveness
from fxmem.memory.allocator.address_trace import Levels, levels
from fxmem.memory.allocator.replay import ReplayedLoop, replay
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import PlansPeak, Profile, Storage, Timeline


def read_settings(environ: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings PyTorch finds in an environment: `PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`."""
    return AllocatorSettings.from_string(
        environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    )


class CardRun(NamedTuple):
    """What a program's own allocator says, which was driven while it ran."""

    allocated_bytes: int
    """The most that was allocated in the profile's round, where that is no loop's; else 0."""
    reserved_bytes: int
    """The most it had reserved: set-up may have left more than the step needs."""
    shortage: str
    """What the card had no memory for, and where; empty where there was enough."""
    is_ended: bool
    """Whether that ended the program; the request counts then, too."""
    smaller_plans: int = 0
    """As `Peak.smaller_plans`."""


@pause_gc()
def complete_timeline(profile: Profile, environ: Mapping[str, str], run: CardRun | None = None) -> Timeline:
    """Return the profile's timeline, its peak completed by the allocator's bytes for a CUDA target. These are the
    allocated and reserved bytes, whether the step fits, and, where it has been measured what a process takes of that
    card beside these (`hardware.context`), the process's bytes.

    The allocator's settings are those of `environ` (`PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`). The loop
    over the step is replayed without a limit, as on a card that is large enough; if that reserves more than a CUDA
    context leaves of the target (`room_bytes`), once more within that room, which counts if it fits there. Whether a
    program (`run`) fits, its own allocator has found.

    Raises: `UsageError` for settings PyTorch would refuse.
    """
    timeline = liveness.timeline(profile)
    if profile.target.device != "cuda":
        return timeline
    settings, room = read_settings(environ), room_bytes(profile.target)
    found, ran_out = _replay_within(profile, settings)
    shortage = ran_out if run is None else run.shortage
    allocated, reserved = found.allocated_bytes, found.reserved_bytes
    waiting = _reserved_if_all_wait(profile, settings)
    if run is not None:
        replayed = 0 if run.allocated_bytes else reserved or 0
        reserved = max(replayed, run.reserved_bytes)
        # Replayed without the limit that the program may have set itself.
        allocated = min(max(allocated or 0, run.allocated_bytes), reserved)
    fits = None if room is None else not shortage
    if fits and room is not None:  # what is cached goes back where it is in the way
        allocated, reserved = min(allocated or 0, room), min(reserved or 0, room)
        waiting = None if waiting is None else min(waiting, room)
    others = _replay_other_plans(profile, settings, found, shortage, (reserved or 0) - (found.reserved_bytes or 0))
    peak = timeline.peak.model_copy(
        update={
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "reserved_high_bytes": None if waiting is None else max(waiting, reserved or 0),
            "process_bytes": None if reserved is None else process_range(profile.target, reserved),
            "room_bytes": room,
            "fits": fits,
            "shortage": shortage,
            "smaller_plans": 0 if shortage else (run or found).smaller_plans,
            "by_cudnn": () if run is not None and run.is_ended else tuple(others),
            "at_least": run is not None and run.is_ended,
        }
    )
    return timeline.model_copy(update={"peak": peak})


def _replay_within(profile: Profile, settings: AllocatorSettings) -> tuple[ReplayedLoop, str]:
    """The loop as on a card that is large enough, or within the target's room, where it fits; and how it runs out."""
    found, room = replay(profile, settings=settings), room_bytes(profile.target)
    if room is None or (found.reserved_bytes or 0) <= room:
        return found, ""
    bounded = replay(profile, settings=settings, capacity_bytes=room)
    return (bounded, "") if bounded.shortage is None else (found, bounded.shortage.sentence)


def _replay_other_plans(
    profile: Profile, settings: AllocatorSettings, found: ReplayedLoop, ran_out: str, beyond: int
) -> Iterator[PlansPeak]:
    """The peaks with the plans of each cuDNN that stands for the target's; of the first they were found already.

    What the rest of a program has reserved beyond this loop, it is taken to reserve `beyond` each.
    """
    for number, version in enumerate(profile.cudnns):
        plans = [(each.nbytes, *each.other_bytes)[number] for each in profile.storages if each.other_bytes]
        if number:
            sizes = iter(plans)
            storages = (_with_plan(each, next(sizes)) if each.other_bytes else each for each in profile.storages)
            found, ran_out = _replay_within(profile.model_copy(update={"storages": tuple(storages)}), settings)
        reserved, room = (found.reserved_bytes or 0) + beyond, room_bytes(profile.target)
        if room is not None and not ran_out:  # what is cached goes back where it is in the way
            reserved = min(reserved, room)
        first = found.first_bytes + beyond if found.first_bytes else reserved
        most = max(reserved, first + max(plans, default=0))
        yield PlansPeak(
            cudnn=version,
            allocated_bytes=found.allocated_bytes or 0,
            reserved_bytes=reserved,
            least_bytes=min(first, reserved),
            most_bytes=most if room is None or ran_out else max(reserved, min(most, room)),
            fits=None if room is None else not ran_out,
        )


def _with_plan(storage: Storage, nbytes: int) -> Storage:
    """The workspace of another plan; those that torch goes on to are smaller."""
    smaller = tuple(each for each in storage.smaller_bytes if each < nbytes)
    return storage.model_copy(update={"nbytes": nbytes, "smaller_bytes": smaller})


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
