"""Allocated and reserved bytes: a profile's step in a training loop, on PyTorch's CUDA caching allocator.

The program asks for bytes; the allocator hands out blocks of rounded size, cut from segments that it got from the driver and
keeps. So a card reports larger numbers than the bytes requested, and all follow from the order of requests:

- *requested*: what the program asked for and has not given back;
- *allocated*: the blocks handed out (`torch.cuda.memory_allocated`);
- *reserved*: the segments held (`torch.cuda.memory_reserved`).

`replay` runs the loop, `fits` asks whether it runs at all. `CachingAllocator` is the allocator by itself, and says what is
taken for granted of it; `Settings` is `PYTORCH_CUDA_ALLOC_CONF`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Final

from fxmem import liveness, targets
from fxmem._allocator_settings import DEFAULT_SETTINGS, Settings
from fxmem._caching_allocator import BlockView, CachingAllocator, OutOfMemory, Segment, Stat, Stats
from fxmem.errors import UsageError
from fxmem.records import Bytes, Kind, Phase, PhaseSpan, Profile, Record, Storage, Timeline

__all__ = [
    "DEFAULT_SETTINGS",
    "BlockView",
    "CachingAllocator",
    "Occupancy",
    "OutOfMemory",
    "PhasePeak",
    "Replay",
    "Segment",
    "Settings",
    "Shortage",
    "Stat",
    "Stats",
    "complete_timeline",
    "fits",
    "replay",
    "settings_of",
]


class PhasePeak(Record):
    """The largest values within one phase of the step; each has its own moment."""

    phase: Phase
    requested_bytes: Bytes
    allocated_bytes: Bytes
    active_bytes: Bytes
    reserved_bytes: Bytes


class Occupancy(Record):
    """Where the reserved memory is at the first moment of the step with the most allocated bytes."""

    phase: Phase
    tick: int
    requested_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    largest_free_block_bytes: Bytes
    """Largest piece of `cached_bytes` in one place."""

    @property
    def rounding_bytes(self) -> int:
        """Lost inside blocks: allocated, not requested."""
        return self.allocated_bytes - self.requested_bytes

    @property
    def cached_bytes(self) -> int:
        """Held, and not handed out: what fragmentation can cost at most."""
        return self.reserved_bytes - self.allocated_bytes


class Shortage(Record):
    """The request that did not fit, and the state it met."""

    step: int
    """1-based: the first step of the loop, or a later one."""
    phase: Phase | None
    """None: while parameters, buffers and inputs were placed, before the first step."""
    tick: int | None
    """None as for `phase`."""
    storage: int
    """Index into `Profile.storages`."""
    kind: Kind
    op: str | None
    """Operator that asked; None for what no operator of the step allocates."""
    node: str | None
    """Name of the node that operator runs for, else of the storage's node."""
    asked_bytes: Bytes
    segment_bytes: Bytes
    """What the driver was asked for."""
    free_bytes: Bytes
    """What the driver had left."""
    largest_free_block_bytes: Bytes
    """Largest block cached in the pool of this request."""
    requested_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes


class Replay(Record):
    """A training loop replayed through the allocator: the peaks of a step in its steady state.

    The peaks are what `torch.cuda.max_memory_allocated()`, `max_memory_reserved()` and `memory_stats()` report when
    `reset_peak_memory_stats()` is called after the warm-up steps and one more step runs. None: the step did not fit.
    """

    settings: Settings
    capacity_bytes: Bytes | None
    requested_bytes: Bytes | None
    allocated_bytes: Bytes | None
    active_bytes: Bytes | None
    reserved_bytes: Bytes | None
    phases: tuple[PhasePeak, ...]
    """In the order of `Profile.phases`; empty when the step did not fit."""
    at_peak: Occupancy | None
    steps: int
    """How many steps were replayed, the one that did not fit included."""
    steady: bool
    """Whether a step ended with every block where an earlier step had left it: from there on the loop repeats itself, and
    the peaks are the largest over the steps that repeat. If not, they are the last step's."""
    warmup_steps: int | None
    """Steps before the repetition begins; None when it was not reached."""
    alloc_retries: int
    """How often, in the steps that the peaks are of, cached segments had to go back to the driver for a request to succeed.
    More than 0 is a step that fits, and is slow."""
    shortage: Shortage | None
    """None: it fits."""


def replay(profile: Profile, *, settings: Settings = DEFAULT_SETTINGS, capacity_bytes: int | None = None, max_steps: int = 8) -> Replay:
    """Replay the profile's step as a loop would run it, until the allocator's state repeats or `max_steps` are over.

    What the loop does beyond the log:
    - What outlives every step (parameters, buffers, inputs, persistent workspaces) is placed once, before the first step:
      parameters and buffers by index, inputs, workspaces, the rest.
    - Optimizer state is placed in the first step when its optimizer phase begins, one after another, with the gradients
      alive, as `torch.optim` creates it. So the first step's layout, which later steps inherit, is the real one.
    - What the step leaves behind (born in it, dead at its end) goes when the function returns, in order of birth; unless
      the step also begins with such a storage left over (same kind, name and size): then it stays and becomes that one.
    - What a step finds left over without leaving such a one behind (a new batch each time) is placed when a step begins.

    With `capacity_bytes` the driver refuses more than that. cuDNN's habit of taking a smaller workspace when memory is
    short is not modelled: a shortage on a workspace may not be the end on a real card.

    Raises: `UsageError` when the profile is not for a CUDA device, or `max_steps` is less than 1.
    """
    if profile.target.device != "cuda":
        raise UsageError(f"only CUDA targets have a caching allocator; this profile is for {profile.target.name!r}: analyse for a GPU")
    if max_steps < 1:
        raise UsageError(f"max_steps must be at least 1, got {max_steps}")
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=_device_bytes(profile, capacity_bytes))
    loop = _Loop(profile, allocator)
    runs: list[_Run] = []
    seen: dict[Hashable, int] = {}
    warmup: int | None = None
    shortage: Shortage | None = None
    while warmup is None and len(runs) < max_steps:
        try:
            runs.append(loop.run_step())
        except OutOfMemory as error:
            shortage = loop.shortage(error)
            break
        state = loop.state()
        warmup = seen.get(state)
        seen[state] = len(runs)
    if shortage is not None:
        runs_shown: list[_Run] = []
    else:
        runs_shown = runs[warmup:] if warmup is not None else runs[-1:]
    return _result(settings, capacity_bytes, runs_shown, steps=loop.step, warmup=warmup, shortage=shortage)


def fits(profile: Profile, capacity_bytes: int, *, settings: Settings = DEFAULT_SETTINGS) -> bool:
    """Whether the loop over this step runs when the driver can give `capacity_bytes` to its process.

    That can be less than the reserved peak `replay` reports without a capacity: a short allocator gives its cache back and
    asks again. `replay(profile, capacity_bytes=…)` says what it costs, and what did not fit.
    """
    return replay(profile, settings=settings, capacity_bytes=capacity_bytes).shortage is None


def settings_of(environ: Mapping[str, str]) -> Settings:
    """The settings that PyTorch would find in an environment: `PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`."""
    return Settings.from_string(environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or "")


def complete_timeline(profile: Profile, environ: Mapping[str, str]) -> Timeline:
    """The profile's timeline; for a CUDA target its peak also has the allocated and reserved bytes, whether the step fits, and, where it has
    been measured what a process takes of that card beside these (`targets.context_size`), the process's bytes.

    The allocator's settings are those of `environ` (`PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`). Allocated and
    reserved are replayed without a limit, as they are on a card that is large enough; if that is more than the target has,
    the loop is replayed once more within the target's memory.

    Raises: `UsageError` for settings PyTorch would refuse.
    """
    timeline = liveness.timeline(profile)
    if profile.target.device != "cuda":
        return timeline
    settings = settings_of(environ)
    free, memory = replay(profile, settings=settings), profile.target.memory_bytes
    bounded = replay(profile, settings=settings, capacity_bytes=memory) if memory is not None and (free.reserved_bytes or 0) > memory else free
    context = targets.context_size(profile.target, profile.torch_version)
    peak = timeline.peak.model_copy(
        update={
            "allocated_bytes": free.allocated_bytes,
            "reserved_bytes": free.reserved_bytes,
            "process_bytes": None if context is None or free.reserved_bytes is None else free.reserved_bytes + context[0].nbytes,
            "fits": None if memory is None else bounded.shortage is None,
            "shortage": "" if bounded.shortage is None else _in_words(bounded.shortage),
        }
    )
    return timeline.model_copy(update={"peak": peak})


def _in_words(shortage: Shortage) -> str:
    who = f"{shortage.op or 'the program'}{f' of {shortage.node}' if shortage.node else ''}"
    when = f"in {shortage.phase} of step {shortage.step}" if shortage.phase is not None else "before the first step"
    asked = f"{shortage.asked_bytes:,} bytes, for which a segment of {shortage.segment_bytes:,} is needed"
    return f"It runs out {when}: {who} asks for {asked}, and {shortage.free_bytes:,} are free"


def _device_bytes(profile: Profile, capacity_bytes: int | None) -> int | None:
    sizes = [size for size in (profile.target.memory_bytes, capacity_bytes) if size is not None]
    return max(sizes) if sizes else None


class _Run(Record):
    """One step that ran through."""

    phases: tuple[PhasePeak, ...]
    at_peak: Occupancy
    alloc_retries: int


def _result(settings: Settings, capacity_bytes: int | None, runs: list[_Run], *, steps: int, warmup: int | None, shortage: Shortage | None) -> Replay:
    top = max(runs, key=lambda run: run.at_peak.allocated_bytes, default=None)
    phases = tuple(
        PhasePeak(
            phase=same[0].phase,
            requested_bytes=max(peak.requested_bytes for peak in same),
            allocated_bytes=max(peak.allocated_bytes for peak in same),
            active_bytes=max(peak.active_bytes for peak in same),
            reserved_bytes=max(peak.reserved_bytes for peak in same),
        )
        for same in zip(*(run.phases for run in runs), strict=True)
    )
    return Replay(
        settings=settings,
        capacity_bytes=capacity_bytes,
        requested_bytes=max((peak.requested_bytes for peak in phases), default=None),
        allocated_bytes=max((peak.allocated_bytes for peak in phases), default=None),
        active_bytes=max((peak.active_bytes for peak in phases), default=None),
        reserved_bytes=max((peak.reserved_bytes for peak in phases), default=None),
        phases=phases,
        at_peak=top.at_peak if top is not None else None,
        steps=steps,
        steady=warmup is not None,
        warmup_steps=warmup,
        alloc_retries=sum(run.alloc_retries for run in runs),
        shortage=shortage,
    )


_NO_PEAK: Final = (-1, 0, 0, 0, Phase.FORWARD, 0)

_PLACING_ORDER: Final = {Kind.PARAMETER: 0, Kind.BUFFER: 0, Kind.INPUT: 1, Kind.WORKSPACE: 2}


class _Loop:
    """The loop's state between steps: which storage is where."""

    def __init__(self, profile: Profile, allocator: CachingAllocator) -> None:
        self.profile = profile
        self.step = 0
        self._allocator = allocator
        self._address = [0] * len(profile.storages)
        self._owner: dict[int, int] = {}
        self._spans = profile.phases or (PhaseSpan(phase=Phase.FORWARD, begin=0, end=profile.ticks, first_op=0, last_op=len(profile.ops)),)
        self._placing = 0
        self._phase: Phase | None = None
        self._tick = 0
        self._peak = _NO_PEAK
        self._sort_storages()

    def _sort_storages(self) -> None:
        storages, end = self.profile.storages, self.profile.ticks
        residents = [i for i, s in enumerate(storages) if s.birth == 0 and s.death >= end]
        residents.sort(key=lambda i: (_PLACING_ORDER.get(storages[i].kind, 3), i))
        optimizes = any(span.phase is Phase.OPTIMIZER for span in self._spans)
        late = {i for i in residents if optimizes and storages[i].kind is Kind.OPTIMIZER_STATE}
        self._late = [i for i in residents if i in late]
        self._residents = [i for i in residents if i not in late]
        self._leftovers = [i for i, s in enumerate(storages) if s.birth == 0 and s.death < end]
        left_behind = sorted((i for i, s in enumerate(storages) if s.birth > 0 and s.death >= end), key=lambda i: storages[i].birth)
        self._becomes = _pairs(storages, left_behind, self._leftovers)
        self._dropped = [i for i in left_behind if i not in self._becomes]
        carried = set(self._becomes.values())
        self._renewed = [i for i in self._leftovers if i not in carried]
        # At one tick comes before goes, should a log ever hold both: an op allocates before its inputs are freed.
        births = ((s.birth, False, i) for i, s in enumerate(storages) if s.birth > 0)
        deaths = ((s.death, True, i) for i, s in enumerate(storages) if s.death < end)
        self._events = sorted([*births, *deaths])

    def run_step(self) -> _Run:
        """One step of the loop. Raises `OutOfMemory`; `shortage` then says where."""
        self.step += 1
        retries = self._allocator.stats().alloc_retries
        if self.step == 1:
            for storage in self._residents:
                self._place(storage)
        self._phase, self._tick, self._peak = self._spans[0].phase, 0, _NO_PEAK
        for storage in self._leftovers if self.step == 1 else self._renewed:
            self._place(storage)
        peaks = []
        position = 0
        for span, following in zip(self._spans, [*self._spans[1:], None], strict=True):
            self._allocator.reset_peak_stats()
            self._phase, self._tick = span.phase, span.begin
            self._watch_peak()
            if self.step == 1 and span.phase is Phase.OPTIMIZER:
                for storage in self._late:
                    self._place(storage)
                self._late = []
            until = following.begin if following is not None else self.profile.ticks + 1
            while position < len(self._events) and (event := self._events[position])[0] < until:
                self._tick, gone, storage = event
                if gone:
                    self._drop(storage)
                else:
                    self._place(storage)
                position += 1
            peaks.append(self._phase_peak(span.phase))
        self._return_from_function()
        return _Run(phases=tuple(peaks), at_peak=self._at_peak(), alloc_retries=self._allocator.stats().alloc_retries - retries)

    def _return_from_function(self) -> None:
        for storage in self._dropped:
            self._drop(storage)
        for storage, successor in self._becomes.items():
            address, self._address[storage] = self._address[storage], 0
            self._address[successor] = address
            self._owner[address] = successor

    def _place(self, storage: int) -> None:
        self._placing = storage
        address = self._allocator.malloc(self.profile.storages[storage].nbytes)
        self._address[storage] = address
        self._owner[address] = storage
        self._watch_peak()

    def _drop(self, storage: int) -> None:
        self._allocator.free(self._address[storage])
        self._owner.pop(self._address[storage], None)
        self._address[storage] = 0

    def _watch_peak(self) -> None:
        allocator = self._allocator
        if self._phase is not None and allocator.allocated_bytes > self._peak[0]:
            self._peak = (
                allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes,
                allocator.largest_free_block_bytes, self._phase, self._tick,
            )  # fmt: skip

    def _at_peak(self) -> Occupancy:
        allocated, requested, reserved, largest, phase, tick = self._peak
        return Occupancy(
            phase=phase,
            tick=tick,
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            largest_free_block_bytes=largest,
        )

    def _phase_peak(self, phase: Phase) -> PhasePeak:
        stats = self._allocator.stats()
        return PhasePeak(
            phase=phase,
            requested_bytes=stats.requested_bytes.peak,
            allocated_bytes=stats.allocated_bytes.peak,
            active_bytes=stats.active_bytes.peak,
            reserved_bytes=stats.reserved_bytes.peak,
        )

    def state(self) -> Hashable:
        """Everything the next step depends on: which storage is where, and which blocks are free.

        Of a cudaMalloc'd segment only its place among the others counts, so its address is left out; an expandable one
        never moves. The age of free blocks is left out too: it moves nothing but garbage collection, and with that on, a
        repetition is likely rather than certain.
        """
        return tuple(
            (segment.large, segment.address if segment.expandable else None, *((block.size, self._owner.get(block.address)) for block in segment.blocks))
            for segment in self._allocator.snapshot()
        )

    def shortage(self, error: OutOfMemory) -> Shortage:
        """The request that `error` refused."""
        storage = self.profile.storages[self._placing]
        op = self.profile.ops[storage.op] if storage.op is not None else None
        node = op.node if op is not None else storage.node
        return Shortage(
            step=self.step,
            phase=self._phase,
            tick=self._tick if self._phase is not None else None,
            storage=self._placing,
            kind=storage.kind,
            op=op.name if op is not None else None,
            node=self.profile.nodes[node].name if node is not None else None,
            asked_bytes=error.asked_bytes,
            segment_bytes=error.segment_bytes,
            free_bytes=error.free_bytes,
            largest_free_block_bytes=error.largest_free_block_bytes,
            requested_bytes=error.requested_bytes,
            allocated_bytes=error.allocated_bytes,
            reserved_bytes=error.reserved_bytes,
        )


def _pairs(storages: tuple[Storage, ...], left_behind: list[int], leftovers: list[int]) -> dict[int, int]:
    """What a step leaves behind → the storage the next step finds left over: same kind, name and size, in order."""
    waiting: defaultdict[tuple[Kind, str, int], list[int]] = defaultdict(list)
    for i in reversed(leftovers):
        waiting[storages[i].kind, storages[i].name, storages[i].nbytes].append(i)
    found = {}
    for i in left_behind:
        if same := waiting[storages[i].kind, storages[i].name, storages[i].nbytes]:
            found[i] = same.pop()
    return found
