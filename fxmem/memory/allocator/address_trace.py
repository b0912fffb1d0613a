"""One steady step of the training loop on the caching allocator, event by event.

The loop is the one `replay` takes the allocated and reserved bytes from; here it also writes down what goes where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.allocator.stats import Segment
from fxmem.memory.allocator.training_loop import TrainingLoop
from fxmem.records.profile import Profile

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
