"""What the allocator adds to a timeline's peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fxmem.errors import UsageError
from fxmem.hardware.catalogue import has_known_placing
from fxmem.hardware.context import process_range, room_bytes
from fxmem.memory import liveness
from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fxmem.memory.allocator.stats import OutOfMemory, Segment
from fxmem.memory.allocator.training_loop import PEAKS, Shortage, TrainingLoop
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import MeasuredPhase, PlacedPeak, PlansPeak, Profile, Storage, Timeline

# --- one steady step of the training loop on the caching allocator, event by event ------------------------------------
# The loop is the one `replay` takes the allocated and reserved bytes from; here it also writes down what goes where.


_MAX_STEPS = 8
"""After so many steps `replay` stops waiting for a repetition."""

Action = Literal["alloc", "free", "segment_alloc", "segment_map"]


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """Something the allocator did."""

    action: Action
    address: int
    size: int
    """Bytes requested; of a segment, its bytes."""
    storage: int | None = None
    """Index into `Profile.storages`; None for a segment."""
    stream: int = 0


@dataclass(frozen=True)
class Levels:
    """Allocated and reserved bytes by tick, each after what happens at it; see `Timeline.live_bytes`."""

    allocated_bytes: tuple[int, ...]
    """The blocks handed out, `torch.cuda.memory_allocated`."""
    reserved_bytes: tuple[int, ...]
    """The segments reserved, `torch.cuda.memory_reserved`."""


@dataclass(frozen=True)
class RecordedStep:
    """A step with what was there before it and what is there after it."""

    segments_before: tuple[Segment, ...]
    owners_before: Mapping[int, int]
    """Address of a block handed out → index of the storage in it."""
    events: tuple[AllocatorEvent, ...]
    segments_after: tuple[Segment, ...]
    owners_after: Mapping[int, int]
    steady: bool
    """Whether the loop repeats itself from here on."""
    levels: Levels


def levels(profile: Profile, settings: AllocatorSettings) -> Levels:
    """Allocated and reserved bytes by tick, of the step that `trace_step` records.

    The largest of the allocated ones is the `allocated_bytes` of a `replay` without a limit. In a loop whose steps take
    turns, another of them may have more reserved bytes.
    """
    return trace_step(profile, settings).levels


def trace_step(profile: Profile, settings: AllocatorSettings) -> RecordedStep:
    """Record the step that gives `replay` its peaks. Of the steps that repeat themselves it is the one with the most
    allocated bytes.

    The device is as large as it needs to be: neither its memory nor `per_process_memory_fraction` limits it, so every
    step runs through. A storage of no bytes has no block and appears nowhere. Where no step repeats itself, the last of
    `_MAX_STEPS` is recorded.
    """
    unlimited = settings.model_copy(update={"per_process_memory_fraction": 1.0})

    def new_loop() -> LoopRecorder:
        return LoopRecorder(profile, CachingAllocator(unlimited, device_bytes=profile.target.memory_bytes))

    runs, warmup = new_loop().run_steps(_MAX_STEPS)
    allocated = [max(peak.allocated_bytes for peak in phases) for phases in runs]
    most = max(allocated[warmup:], default=0)
    before = _MAX_STEPS - 1 if warmup is None else allocated.index(most, warmup)
    loop = new_loop()
    for _ in range(before):
        loop.run_step()
    return loop.record_step(steady=warmup is not None)


class LoopRecorder(TrainingLoop):
    """The loop, with what it does to the allocator written down while `record_step` runs."""

    def __init__(self, profile: Profile, allocator: CachingAllocator) -> None:
        super().__init__(profile, allocator)
        self._record: list[AllocatorEvent] | None = None
        self._runs: dict[int, int] = {}
        self._changes: dict[int, tuple[int, int]] = {}

    def record_step(self, *, steady: bool) -> RecordedStep:
        """Run one step; return what the allocator did, and the state before and after."""
        before, owners = self._allocator.snapshot(), self._blocks()
        self._runs = {segment.address: segment.size for segment in before if segment.expandable}
        record: list[AllocatorEvent] = []
        self._record = record
        self._changes = {0: self._current_bytes()}
        self.run_step()
        self._record = None
        held = self._changes[0]
        series = [held := self._changes.get(tick, held) for tick in range(self.profile.ticks)]
        found = Levels(tuple(allocated for allocated, _ in series), tuple(reserved for _, reserved in series))
        return RecordedStep(before, owners, tuple(record), self._allocator.snapshot(), self._blocks(), steady, found)

    def _current_bytes(self) -> tuple[int, int]:
        return self._allocator.allocated_bytes, self._allocator.reserved_bytes

    def _blocks(self) -> dict[int, int]:
        return {address: storage for address, storage in self._owner.items() if address}

    def _place(self, storage: int) -> None:
        reserved = self._allocator.reserved_bytes
        super()._place(storage)
        self._changes[self._tick] = self._current_bytes()
        if self._record is not None and (address := self._address[storage]):
            if grown := self._allocator.reserved_bytes - reserved:
                self._record.append(self._growth(address, grown, self.profile.storages[storage].stream))
            self._note("alloc", address, storage)

    def _free(self, storage: int) -> None:
        if self._record is not None and (address := self._address[storage]):
            self._note("free", address, storage)
        super()._free(storage)
        self._changes[self._tick] = self._current_bytes()

    def _return_from_function(self) -> None:
        kept = self._changes.copy()  # what the function's return frees is gone when its last tick is over
        super()._return_from_function()
        self._changes = kept

    def _note(self, action: Action, address: int, storage: int) -> None:
        assert self._record is not None, "asked while the step is recorded"
        one = self.profile.storages[storage]
        self._record.append(AllocatorEvent(action, address, one.nbytes, storage, one.stream))

    def _growth(self, address: int, grown: int, stream: int) -> AllocatorEvent:
        """The memory that the driver gave for the block at `address`. It never takes any back: nothing limits it.

        A new segment begins with the block it was asked for; a mapped run grows at its end, which the block begins at
        or lies before.
        """
        if not self._allocator.settings.expandable_segments:
            return AllocatorEvent("segment_alloc", address, grown, None, stream)
        run = next((begin for begin, size in self._runs.items() if begin <= address <= begin + size), address)
        end = run + self._runs.get(run, 0)
        self._runs[run] = end + grown - run
        return AllocatorEvent("segment_map", end, grown, None, stream)


# --- the steady peaks of a step, allocated and reserved, and whether the loop runs ------------------------------------


@dataclass(frozen=True)
class ReplayedLoop:
    """A training loop replayed through the allocator: the peaks of a step in its steady state.

    The peaks are what `torch.cuda.max_memory_allocated()`, `max_memory_reserved()` and `memory_stats()` report when
    `reset_peak_memory_stats()` is called after the warm-up steps and one more step runs. None: the step did not fit.
    """

    phases: tuple[MeasuredPhase, ...]
    """In the order of `Profile.phases`; empty when the step did not fit. Where the loop repeats itself, the largest
    over the steps that repeat, else those of the last step."""
    steps: int
    """How many steps were replayed, the one that did not fit included."""
    warmup_steps: int | None
    """Steps before one that ends with every block where an earlier step had left it: from there on the loop repeats
    itself. None when that was not reached."""
    shortage: Shortage | None = None
    """None: it fits."""
    smaller_plans: int = 0
    """How many convolutions, alike ones counted once, run by plans with a smaller workspace, for want of room."""
    first_bytes: int | None = None
    """Reserved by the first step. Later ones add what finds no free block that is large enough; which those are depends
    on every size before. None when the step did not fit."""

    @property
    def requested_bytes(self) -> int | None:
        """Of the phase that has most."""
        return max((peak.requested_bytes for peak in self.phases), default=None)

    @property
    def allocated_bytes(self) -> int | None:
        """Of the phase that has most."""
        return max((peak.allocated_bytes for peak in self.phases), default=None)

    @property
    def reserved_bytes(self) -> int | None:
        """Of the phase that has most."""
        return max((peak.reserved_bytes for peak in self.phases), default=None)


_known: dict[tuple[int, AllocatorSettings, int | None, int], ReplayedLoop] = {}
"""By profile and what is asked of it: its peak and what is found in it ask for the same."""


def replay(
    profile: Profile,
    *,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    capacity_bytes: int | None = None,
    max_steps: int = 8,
) -> ReplayedLoop:
    """Replay the step as a loop until the allocator's state repeats or `max_steps` are over.

    What the loop does beyond the log:
    - What outlives every step (parameters, buffers, inputs, persistent workspaces) is placed once, before the first
      step: parameters and buffers by index, inputs, workspaces, the rest.
    - Optimizer state is placed in the first step when its optimizer phase begins, one after another, with the gradients
      alive, as `torch.optim` creates it. So the first step's layout, which later steps inherit, is the real one.
    - What the step leaves behind (born in it, dead at its end) goes when the function returns, in order of birth;
      unless the step also begins with such a storage left over (same kind, name and size, else the same size): then it
      stays and becomes that one. The first step finds none: nothing ran before it.
    - What a step finds left over without leaving such a one behind (a new batch each time) is placed when a step
      begins.

    With `capacity_bytes` the driver refuses more than that. A convolution whose workspace finds no room takes the next
    plan that does, where these are known (`Storage.smaller_bytes`).

    Raises: `UsageError` when the profile is not for a CUDA device, or `max_steps` is less than 1.
    """
    if profile.target.device != "cuda":
        raise UsageError(
            f"only CUDA targets have a caching allocator; this profile is for {profile.target.name!r}: analyse "
            "for a GPU"
        )
    if max_steps < 1:
        raise UsageError(f"max_steps must be at least 1, got {max_steps}")
    key = id(profile), settings, capacity_bytes, max_steps
    if key not in _known:
        _known[key] = _replay(profile, settings, capacity_bytes, max_steps)
        weakref.finalize(profile, _known.pop, key)
    return _known[key]


def _replay(profile: Profile, settings: AllocatorSettings, capacity_bytes: int | None, max_steps: int) -> ReplayedLoop:
    memory = profile.target.memory_bytes
    loop = TrainingLoop(profile, CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=memory))
    try:
        runs, warmup = loop.run_steps(max_steps)
    except OutOfMemory as error:
        return ReplayedLoop((), loop.step, None, loop.shortage(error))
    phases = (
        MeasuredPhase(phase=same[0].phase, **{name: max(getattr(peak, name) for peak in same) for name in PEAKS})
        for same in zip(*runs[-1 if warmup is None else warmup :], strict=True)
    )
    first = max(peak.reserved_bytes for peak in runs[0])
    return ReplayedLoop(tuple(phases), loop.step, warmup, smaller_plans=len(loop.plans), first_bytes=first)


# --- what the allocator adds to a timeline's peak ---------------------------------------------------------------------


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
        is_counted = run.allocated_bytes and not run.is_ended
        allocated = min(run.allocated_bytes if is_counted else max(allocated or 0, run.allocated_bytes), reserved)
    fits = None if room is None else not shortage
    if fits and room is not None:  # what is cached goes back where it is in the way
        allocated, reserved = min(allocated or 0, room), min(reserved or 0, room)
        waiting = None if waiting is None else min(waiting, room)
    beyond, is_ended = (reserved or 0) - (found.reserved_bytes or 0), run is not None and run.is_ended
    others = _replay_other_plans(profile, settings, found, shortage, beyond)
    groups = len(profile.step.ranks.groups) if profile.step.ranks else 0
    peak = timeline.peak.model_copy(
        update={
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "reserved_high_bytes": None if waiting is None else max(waiting, reserved or 0),
            "process_bytes": None if reserved is None else process_range(profile.target, reserved, groups),
            "room_bytes": room,
            "fits": fits,
            "shortage": shortage,
            "smaller_plans": 0 if shortage else (run or found).smaller_plans,
            "by_cudnn": () if is_ended else tuple(others),
            "upward": None if run and shortage else _replay_upward(profile, settings, found, beyond),
            "at_least": is_ended,
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
        peak, room = _make_peak(profile, found, ran_out, beyond), room_bytes(profile.target)
        reserved = peak.reserved_bytes
        first = found.first_bytes + beyond if found.first_bytes else reserved
        most = max(reserved, first + max(plans, default=0))
        most = most if room is None or ran_out else max(reserved, min(most, room))
        yield PlansPeak(**dict(peak), cudnn=version, least_bytes=min(first, reserved), most_bytes=most)


def _make_peak(profile: Profile, found: ReplayedLoop, ran_out: str, beyond: int) -> PlacedPeak:
    reserved, room = (found.reserved_bytes or 0) + beyond, room_bytes(profile.target)
    if room is not None and not ran_out:  # what is cached goes back where it is in the way
        reserved = min(reserved, room)
    fits = None if room is None else not ran_out
    return PlacedPeak(allocated_bytes=found.allocated_bytes or 0, reserved_bytes=reserved, fits=fits)


def _replay_upward(
    profile: Profile, settings: AllocatorSettings, found: ReplayedLoop, beyond: int
) -> PlacedPeak | None:
    """The peak if the driver places each segment above the one before; None where it is known not to, or where that
    moves nothing. What else a program has reserved is as of `_replay_other_plans`."""
    if settings.expandable_segments or has_known_placing(profile.target):
        return None
    upward, ran_out = _replay_within(profile, settings.model_copy(update={"segments_upward": True}))
    is_same = (upward.allocated_bytes, upward.reserved_bytes) == (found.allocated_bytes, found.reserved_bytes)
    return None if is_same else _make_peak(profile, upward, ran_out, beyond)


def _with_plan(storage: Storage, nbytes: int) -> Storage:
    """The workspace of another plan; those that torch goes on to are smaller."""
    smaller = tuple(each for each in storage.smaller_bytes if each < nbytes)
    return storage.model_copy(update={"nbytes": nbytes, "smaller_bytes": smaller})


def _reserved_if_all_wait(profile: Profile, settings: AllocatorSettings) -> int | None:
    """Reserved bytes if each block that `record_stream` has named waits as long as it can; None without any.

    A freed block waits for the streams that used it (`insert_events`, `process_events` in
    c10/cuda/CUDACachingAllocator.cpp): how long depends on the time their kernels take. It ends when the host has
    waited for these streams, at the latest with the step.
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
