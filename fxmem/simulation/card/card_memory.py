"""The memory of a program while it runs: of its pretended card, as `torch.cuda.memory_*` answers, and what is alive.

The caching allocator is driven by the program's own requests as they come, so its history is the program's: set-up,
first step, evaluation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from fxmem.hardware.context import room_bytes
from fxmem.hardware.workspaces import HeldBuffer, HiddenMemory, Signature, expand
from fxmem.memory.allocator import CachingAllocator, OutOfMemory, PoolCounts, Segment, Stats, read_settings
from fxmem.memory.generation import EvenSteps
from fxmem.records.profile import Phase, Target
from fxmem.records.units import format_bytes
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.code.source_lines import program_place
from fxmem.simulation.kernels.kernel_settings import ask_smaller, ask_workspaces
from fxmem.simulation.recording.observe.event_log import LoggedOp, StepLog
from fxmem.simulation.recording.observe.observer import Observer

_Request = tuple[int, int, int]
"""A storage, its bytes, its stream."""


class BlockEvent(NamedTuple):
    """What became of a block (`alloc`, `free`) or a segment (`segment_alloc`), and where the program was."""

    action: str
    address: int
    nbytes: int
    stream: int
    place: Any


class BlockHistory:
    """What became of blocks while a program had it recorded.

    Args:
        most: how many events are kept, the latest.
    """

    def __init__(self, most: int) -> None:
        self.events: deque[BlockEvent] = deque(maxlen=most)
        self.places: dict[int, Any] = {}
        """By address of what was allocated meanwhile, where that was."""
        self.is_on = True

    def __deepcopy__(self, memo: object) -> BlockHistory:
        copied = copy.copy(self)
        copied.events, copied.places = self.events.copy(), dict(self.places)
        return copied

    def note(self, event: BlockEvent) -> None:
        """Keep an event."""
        if event.action == "alloc":
            self.places[event.address] = event.place
        self.events.append(event)


class PartPeak(NamedTuple):
    """The most bytes of each count within a part of a round."""

    requested: int
    allocated: int
    reserved: int

    def at_least(self, other: PartPeak) -> PartPeak:
        """The larger of each."""
        return PartPeak(*map(max, self, other))


Part = tuple[Phase, str, bool] | None
"""A phase, the model that it is of, and whether gradients lead to it; None before any."""


@dataclasses.dataclass
class RepeatedSteps:
    """Steps of a loop that are made by arithmetic, and what became of them on the card."""

    even: EvenSteps
    """What they are like, of which nothing stays; its keys are numbers of storages."""
    periods: int
    """How many periods there are to be."""
    done: int = 0
    """How many steps the card had room for."""


@dataclasses.dataclass
class _Blocks:
    """What is on a card, and the most of it: all that is undone where a history is repeated."""

    allocator: CachingAllocator
    counts: PoolCounts = dataclasses.field(default_factory=PoolCounts)
    requested: int = 0
    """The most since `begin_part` or `clear_highest`, as the next two: whatever the program does with its own peak
    statistics."""
    allocated: int = 0
    reserved: int = 0
    part: Part = None
    parts: dict[Part, PartPeak] = dataclasses.field(default_factory=dict)
    address: dict[int, int] = dataclasses.field(default_factory=dict)
    """By storage."""
    plans: dict[Signature, int] = dataclasses.field(default_factory=dict)
    """By convolution, the workspace of the plan that is taken for want of room."""
    held: set[str] = dataclasses.field(default_factory=set)
    of_graphs: dict[str, int] = dataclasses.field(default_factory=dict)
    """By name, where what a CUDA graph holds to its end is."""
    is_shared: bool = False
    most_shared: int = 0
    """The most reserved while a serving engine had its share of the card."""
    history: BlockHistory | None = None
    """What became of blocks since the program asked for it; None before."""

    def __post_init__(self) -> None:
        self.allocator.counts = self.counts

    @property
    def highest(self) -> PartPeak:
        """The most of each count."""
        return PartPeak(self.requested, self.allocated, self.reserved)

    def restart_highest(self) -> None:
        """Let the most begin anew at what is there now."""
        allocator = self.allocator
        if self.is_shared:
            self.most_shared = max(self.most_shared, self.reserved, allocator.reserved_bytes)
        self.requested, self.allocated = allocator.requested_bytes, allocator.allocated_bytes
        self.reserved = allocator.reserved_bytes


class CardMemory(Observer):
    """The blocks of a program on its card.

    Args:
        target: a CUDA target.
        environ: whose allocator settings hold (`PYTORCH_CUDA_ALLOC_CONF`).
        raises: whether what the card does not have is refused, as the card refuses it; else the first request that
            it would refuse is noted, and from there on the card has as much as is asked for.
        trace: told where the program empties the cache.
    """

    def __init__(self, target: Target, environ: Mapping[str, str], *, raises: bool, trace: BlockTrace) -> None:
        self._trace = trace
        self.total_bytes = target.memory_bytes or 0
        self.shortage = ""
        """What the card had no memory for and where, once that was noted; in words."""
        self.wanted: tuple[int, int] | None = None
        """Allocated and reserved bytes with the request that was refused last; None where none was."""
        self.find_bounded: Callable[[], int] = lambda: 0
        """The bytes alive whose size depends on data; asked where a request finds no room."""
        self.refused: tuple[tuple[str, str], ...] = ()
        """The text of each error that a refused request raised, and the line of the program."""
        self._target = target
        self.environ = environ
        """As it was when the program first initialised CUDA: it may set it until then."""
        self._settings = read_settings(environ)
        self.raises = raises
        """Whether what the card does not have is refused."""
        self._is_untouched = True
        self._locate: Callable[[], Any] | None = None
        self._place: Any = None
        self._asked: dict[Signature, int | None] = {}
        self._smaller: dict[Signature, tuple[int, ...]] = {}
        """Of the convolutions whose workspace found no room: those of the plans that follow."""
        self._met: set[Signature] = set()
        self._waiting: list[_Request] = []
        self._history: list[Callable[[], None]] | None = []
        self._origin: _Blocks | None = None
        """What there was when the history began; None for an empty card."""
        self._is_first_round = True
        self.resets = 0
        """How often the program has reset its peak statistics."""
        self._start(room_bytes(target))

    @property
    def usable_bytes(self) -> int:
        """What the allocator can have at most: a context has the rest, where it is known."""
        room = room_bytes(self._target)
        return self.total_bytes if room is None else room

    @property
    def _context_bytes(self) -> int:
        """The least that a context of the target takes; 0 where that is not known."""
        return self.total_bytes - self.usable_bytes

    def _start(self, capacity_bytes: int | None) -> None:
        """Begin with an empty card."""
        device_bytes = self._target.memory_bytes
        self._now = _Blocks(CachingAllocator(self._settings, capacity_bytes=capacity_bytes, device_bytes=device_bytes))

    @property
    def blocks(self) -> BlockHistory | None:
        """What became of blocks since the program asked for it; None before."""
        return self._now.history

    @property
    def most_shared(self) -> int:
        """The most reserved while a serving engine had its share of the card."""
        return self._now.most_shared

    # --- what the program does ----------------------------------------------------------------------------------------

    def on_storage(self, index: int, nbytes: int, stream: int) -> None:
        """Note an allocation of the operator that runs; its kernel's buffers may come first."""
        self._waiting.append((index, nbytes, stream))

    def on_free(self, index: int) -> None:
        """Free the block of a storage."""
        self.run_operator()
        self._do(functools.partial(self._free, index))

    def run_operator(self, hidden: HiddenMemory | None = None, stream: int = 0) -> None:
        """Allocate what an operator has requested, and pass through what its kernel has for itself.

        Raises `torch.cuda.OutOfMemoryError` as the card does.
        """
        requested, self._waiting = self._waiting, []
        if hidden is not None:
            if self._history is None and any(each not in self._asked for each in hidden.signatures):
                self._origin = copy.deepcopy(self._now)
                self._history = []
            self._met.update(hidden.signatures)
        else:
            self._trace.run_operator()
        if requested or hidden is not None:
            self._do(functools.partial(self._run, requested, hidden, stream))

    def hold(self, workspaces: Mapping[str, HeldBuffer]) -> None:
        """Allocate what a library keeps from now on, once by its name; the operator's own output comes first."""
        self.run_operator()
        for name, buffer in workspaces.items():
            if name not in self._now.held:
                self._do(functools.partial(self._hold, name, buffer))

    def release_graphs(self) -> None:
        """Free what a CUDA graph has held, which is over."""
        if self._now.of_graphs:
            self.run_operator()
            self._do(self._release_graphs)

    def set_fraction(self, fraction: float) -> None:
        """Let the program have no more than this share of the card (`setMemoryFraction`, CUDACachingAllocator.cpp)."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._do(functools.partial(self._set_capacity, int(fraction * self.total_bytes)))

    def reset_peak_stats(self) -> None:
        """Let peaks begin anew at what is there now."""
        self.resets += 1
        self._do(lambda: self._now.allocator.reset_peak_stats())

    def empty_cache(self) -> None:
        """Give every segment without a live block back."""
        self._trace.empty_cache()
        self.run_operator()
        self._do(lambda: self._now.allocator.empty_cache())

    def clear_highest(self) -> None:
        """Let the highest levels begin anew at what is there now."""
        self._do(self._clear_highest)

    def record_blocks(self, most: int, locate: Callable[[], Any] | None) -> None:
        """Note what becomes of blocks from now on, with what `locate` says of where the program is; None: no longer."""
        self.run_operator()
        self._locate = locate
        self._do(functools.partial(self._record_blocks, most, is_on=locate is not None))

    def begin_part(self, part: Part) -> None:
        """Let the highest levels from here on be those of this part as well."""
        self.run_operator()
        self._do(functools.partial(self._begin_part, part))

    def share(self, is_shared: bool) -> None:
        """Note that a serving engine has its share of the card from here on, or has it no longer."""
        self.run_operator()
        self._do(functools.partial(self._share, is_shared))

    def refuse(self, nbytes: int) -> None:
        """Refuse so many bytes that a library asks the driver for, as the card refuses what it does not have."""
        allocator = self._now.allocator
        if allocator.capacity_bytes is not None:
            if self.raises:
                self.wanted = allocator.allocated_bytes + nbytes, allocator.reserved_bytes + nbytes
            self._run_out(self._complaint(nbytes), sys._getframe(1), raises=self.raises)

    def part_peaks(self) -> dict[Part, PartPeak]:
        """The highest levels of each part since `clear_highest`."""
        self._begin_part(self._now.part)
        return dict(self._now.parts)

    # --- the workspaces of cuDNN --------------------------------------------------------------------------------------

    def ask_cudnn(self) -> None:
        """Ask how much workspace the convolutions met since the last time take.

        All are asked in one go, and then count from where the first was met: the history since is kept, that of the
        first round from its beginning.
        """
        self.run_operator()
        if missing := [signature for signature in self._met if signature not in self._asked]:
            self._asked.update(ask_workspaces(missing, self._target))
            self._repeat_history()
        if not self._is_first_round:
            self._history = self._origin = None

    @property
    def asked(self) -> Mapping[Signature, int | None]:
        """What cuDNN has answered."""
        return self._asked

    @property
    def smaller_plans(self) -> int:
        """How many kinds of convolution run by plans with a smaller workspace, for want of room."""
        return len(self._now.plans)

    def forget_history(self) -> None:
        """Keep no history of the first round: it is over."""
        self._is_first_round = False
        self._history = None

    def _repeat_history(self) -> None:
        """Do all anew, with the workspaces that are known now.

        Where the card runs out meanwhile, all stays as it was: the next round runs out too, where the program is then.
        """
        if self._history is None:
            return
        before, raises = (self._now, self.wanted, self.refused, self.shortage), self.raises
        if self._origin is None:
            self._start(self._now.allocator.capacity_bytes)
        else:
            self._now = self._origin
        self.raises = True
        try:
            for act in self._history:
                act()
        except torch.cuda.OutOfMemoryError:
            self._now, self.wanted, self.refused, self.shortage = before
        self.raises = raises

    # --- the blocks ---------------------------------------------------------------------------------------------------

    def _do(self, act: Callable[[], None]) -> None:
        if self._locate is not None:  # where the program is now, also when this is done anew
            act = functools.partial(self._do_at, self._locate(), act)
        act()
        if self._history is not None:
            self._history.append(act)

    def _do_at(self, place: Any, act: Callable[[], None]) -> None:
        self._place = place
        act()

    def _record_blocks(self, most: int, *, is_on: bool) -> None:
        if is_on:
            self._now.history = BlockHistory(most)
        elif self._now.history is not None:
            self._now.history.is_on = False

    def _note(self, action: str, address: int, nbytes: int, stream: int) -> None:
        if self._now.history is not None and self._now.history.is_on:
            self._now.history.note(BlockEvent(action, address, nbytes, stream, self._place))

    def _run(self, requested: Sequence[_Request], hidden: HiddenMemory | None, stream: int) -> None:
        own: dict[int, int] = {}
        filled = None if hidden is None else hidden.fill_workspaces(self._asked)
        signatures = [] if filled is None else [each.signature for each in filled.events if each.nbytes]
        try:
            for number, nbytes in expand(len(requested), filled):
                if number >= 0:
                    storage, size, at = requested[number]
                    self._now.address[storage] = self._malloc(size, at)
                elif nbytes is None:
                    self._give_back(own.pop(number))
                else:
                    signature = signatures[-number - 1]
                    taken = nbytes if signature is None else self._now.plans.get(signature, nbytes)
                    own[number] = self._malloc(taken, stream, signature)
        except torch.cuda.OutOfMemoryError:
            for storage in (storage for storage, *_ in requested if storage in self._now.address):
                self._give_back(self._now.address.pop(storage))
            for address in reversed(own.values()):
                self._give_back(address)
            raise

    # --- the steps of a loop ------------------------------------------------------------------------------------------

    def repeat(self, steps: RepeatedSteps) -> None:
        """Do what further steps of a loop do. Raises `torch.cuda.OutOfMemoryError` within the one that the card has no
        room for."""
        self.run_operator()
        self._do(functools.partial(self._repeat, steps))

    def try_steps(self, steps: RepeatedSteps) -> PartPeak:
        """The highest levels of further steps that are not done; where the card has no room, up to there."""
        self.run_operator()
        tried = copy.copy(self)
        tried._now, tried._history, tried.raises = copy.deepcopy(self._now), None, True
        tried._now.history = None
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            tried._repeat(steps)
        return tried._now.highest

    def _repeat(self, steps: RepeatedSteps) -> None:
        even, steps.done = steps.even, 0
        held = {home: self._now.address[key] for key, home in even.homes.items() if key in self._now.address}
        number = even.models[-1].number
        malloc, give_back = self._malloc, self._give_back
        try:
            for sizes in even.sizes(steps.periods):
                for model, nbytes in zip(even.models, sizes, strict=True):
                    number += 1
                    for age, slot, stream in model.acts:
                        if age < 0:
                            held[number, slot] = malloc(nbytes[slot], stream)
                        else:
                            give_back(held.pop((number - age, slot)))
                    steps.done += 1
        finally:
            taken = set()
            for key, (born, slot) in even.homes.items():
                later = [home for more in (1, 0) if (home := (born + steps.done + more, slot)) in held]
                if even.moves((born, slot)) and later and key in self._now.address:
                    # Where the card ran out within a step, some are that step's, others of the one before.
                    self._now.address[key] = held[later[-1]]
                    taken.add(later[-1])
            for home, address in held.items():
                if home[0] > even.models[-1].number and home not in taken:
                    give_back(address)

    def _free(self, storage: int) -> None:
        address = self._now.address.pop(storage, None)
        if address is not None:
            self._give_back(address)

    def _release_graphs(self) -> None:
        for name, address in self._now.of_graphs.items():
            self._now.held.discard(name)
            self._give_back(address)
        self._now.of_graphs = {}

    def _hold(self, name: str, buffer: HeldBuffer) -> None:
        self._now.held.add(name)
        address = self._malloc(buffer.nbytes, buffer.stream)
        if buffer.needed_by:
            self._now.of_graphs = {**self._now.of_graphs, name: address}

    def _set_capacity(self, nbytes: int) -> None:
        if self._now.allocator.capacity_bytes is not None:  # else all is had that is asked for
            self._now.allocator.capacity_bytes = nbytes

    def _clear_highest(self) -> None:
        self._now.parts = {}
        self._now.restart_highest()

    def _begin_part(self, part: Part) -> None:
        now, highest = self._now, self._now.highest
        now.parts[now.part] = highest.at_least(now.parts.get(now.part, highest))
        now.part = part
        now.restart_highest()

    def _share(self, is_shared: bool) -> None:
        self._begin_part(self._now.part)
        self._now.is_shared = is_shared
        self._now.restart_highest()

    def counts(self) -> dict[str, int]:
        """What `torch.cuda.memory_stats` says, by its names."""
        stats, settings = self.stats(), self._settings
        found = self._now.counts.flatten(stats)
        limit = settings.max_split_bytes
        return {
            **found,
            "num_alloc_retries": stats.alloc_retries,
            "num_ooms": stats.ooms,
            "num_device_alloc": found["segment.all.allocated"],
            "num_device_free": found["segment.all.freed"],
            "num_sync_all_streams": self._now.allocator.emptied,
            "max_split_size": -1 if limit is None else limit,
        }

    def stats(self) -> Stats:
        """Bytes and counts now."""
        self.ask_cudnn()
        return self._now.allocator.stats()

    def used_bytes(self) -> int:
        """What the driver counts as in use: segments, and once CUDA is initialised the least that a context takes."""
        reserved = self.stats().reserved_bytes.current
        return reserved if self._is_untouched else min(reserved + self._context_bytes, self.total_bytes)

    def initialize(self) -> None:
        """CUDA is initialised: the allocator's settings are read, and what the program sets later comes too late.

        So it was on an H200.
        """
        if self._is_untouched:
            self._read_settings()

    def _read_settings(self) -> None:
        self._is_untouched, self.environ = False, dict(self.environ)
        settings = read_settings(self.environ)
        if settings != self._settings:
            self._settings, history = settings, self._now.history
            self._start(self._now.allocator.capacity_bytes)
            self._now.history = history

    def _give_back(self, address: int) -> None:
        if self._now.history is not None and address:
            self._note("free", address, *self._now.allocator.find_live(address))
        self._now.allocator.free(address)

    def segments(self) -> tuple[Segment, ...]:
        """What the card's memory looks like now."""
        return self._now.allocator.snapshot()

    def _malloc(self, nbytes: int, stream: int, workspace_of: Signature | None = None) -> int:
        if self._is_untouched:
            self._read_settings()
        now, allocator = self._now, self._now.allocator
        before, complaint, smaller, raises = allocator.reserved_bytes, "", None, False
        try:
            address = allocator.malloc(nbytes, stream)
            if now.history is not None:
                if allocator.reserved_bytes > before:
                    self._note("segment_alloc", address, allocator.reserved_bytes - before, stream)
                self._note("alloc", address, nbytes, stream)
        except OutOfMemory as error:
            smaller = None if workspace_of is None else self._next_plan(workspace_of, nbytes)
            bounded = self.find_bounded()
            least = allocator.requested_bytes + nbytes - bounded
            raises = self.raises and not (bounded and least <= (allocator.capacity_bytes or 0))
            if raises and smaller is None:
                self.wanted = error.allocated_bytes + error.asked_bytes, error.reserved_bytes + error.segment_bytes
                self.wanted = (least, least) if bounded else self.wanted
            complaint = self._complaint(error.segment_bytes)
        if smaller is not None:
            return self._malloc(smaller, stream, workspace_of)
        if complaint:  # what is raised here has no other error behind it, as on the card
            self._run_out(complaint, sys._getframe(1), raises=raises)
            return self._malloc(nbytes, stream)
        # `max` takes three times as long, and a run of a generation comes here a million times.
        if (requested := allocator.requested_bytes) > now.requested:
            now.requested = requested
        if (allocated := allocator.allocated_bytes) > now.allocated:
            now.allocated = allocated
        if (reserved := allocator.reserved_bytes) > now.reserved:
            now.reserved = reserved
        return address

    def _next_plan(self, signature: Signature, nbytes: int) -> int | None:
        """The workspace of the plan that torch goes on to where there is no room for this; None after the last."""
        if signature not in self._smaller:
            self._smaller[signature] = ask_smaller(signature, self._target)
        found = next((each for each in self._smaller[signature] if each < nbytes), None)
        if found is not None:
            self._now.plans[signature] = found
        return found

    def _run_out(self, complaint: str, frame: types.FrameType, *, raises: bool) -> None:
        """Raise what the card raises, or note it and have as much as is asked for from here on: so, too, where there
        may be room, as sizes that depend on data are counted at their largest."""
        if raises:
            self.refused = (*self.refused, (complaint, program_place(frame)))
            raise torch.cuda.OutOfMemoryError(complaint)
        self.shortage = describe_shortage(complaint, program_place(frame))
        self._now.allocator.capacity_bytes = None

    def _complaint(self, segment_bytes: int) -> str:
        """What torch writes where a card has no such segment more (`CUDACachingAllocator.cpp`), and that none was
        there."""
        stats, total, most = self._now.allocator.stats(), self.total_bytes, self._now.allocator.capacity_bytes
        used = stats.reserved_bytes.current + self._context_bytes
        is_limited = most is not None and most < (self.usable_bytes)
        allowed = f"{_size(most)} allowed; " if most is not None and is_limited else ""
        allocated = stats.allocated_bytes.current
        return (
            f"CUDA out of memory. Tried to allocate {_size(segment_bytes)}. GPU 0 has a total capacity of "
            f"{_size(total)} of which {_size(total - used)} is free. Including non-PyTorch memory, this process has "
            f"{_size(used)} memory in use. {allowed}Of the allocated memory {_size(allocated)} is allocated by "
            f"PyTorch, and {_size(stats.reserved_bytes.current - allocated)} is reserved by PyTorch but unallocated. "
            f"Predicted by fxmem for {self._target.name}: no card was used."
        )


def _size(nbytes: int) -> str:
    """As torch writes it (`format_size`, CUDACachingAllocator.cpp)."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    exponent = next((each for each in (1, 2) if nbytes <= 1024 ** (each + 1)), 3)
    return f"{nbytes / 1024**exponent:.2f} {('KiB', 'MiB', 'GiB')[exponent - 1]}"


_NOWHERE: Final = -1, "", -1
"""Of a phase in which nothing came."""


class LiveBytes(Observer):
    """The bytes requested and not freed; listens to a log."""

    log: StepLog

    def __init__(self) -> None:
        self.now = 0
        self.made_at: dict[int, str] = {}
        """By storage alive with which all storages were more than ever, the line of the program that made it."""
        self.on_rise: Callable[[int], None] = lambda passing: None
        """Called where more is alive than ever in the round, with bytes that are there for this moment alone."""
        self.clear_highest()

    def clear_highest(self) -> None:
        """Let the most begin anew at what is alive now."""
        self.highest, self.phase, self.tick = self.now, Phase.FORWARD, 0
        """The most, and when it was."""
        self._of_phase: dict[Phase, tuple[int, str, int]] = {self.phase: (self.now, "", -1)}
        """The most in each phase, where the program was then, and the node that ran."""
        self._most_stored = self.now
        """The most without what kernels have for themselves."""

    def on_storage(self, index: int, nbytes: int, stream: int) -> None:
        """A storage is allocated."""
        self.now += nbytes
        is_most = self._watch(self.now, self.log.tick)
        if self.now > self._most_stored:
            self._most_stored = self.now
            self.made_at[index] = self._of_phase[self.phase][1] if is_most else program_place(sys._getframe(1))

    def on_free(self, index: int) -> None:
        """A storage was freed."""
        self.now -= self.log.storages[index].nbytes
        self.made_at.pop(index, None)

    def on_growth(self, nbytes: int) -> None:
        """A storage has so many bytes more."""
        self.now += nbytes
        self._watch(self.now, self.log.tick - 1)

    def pass_through(self, op: LoggedOp, hidden: HiddenMemory) -> None:
        """Note the most that was alive within an operator: its kernel has buffers for itself."""
        storages = self.log.storages
        first = next((i for i in reversed(range(len(storages))) if storages[i].birth < op.begin), -1) + 1
        made = [0 if each.death is not None else each.nbytes for each in storages[first:]]
        live, most, own = self.now - sum(made), self.now, dict[str, int]()
        results = iter(made)
        for event in hidden.events:
            if event.action == "output":
                live += next(results, 0)
            elif event.action == "free":
                live -= own.pop(event.name, 0)
            elif event.nbytes:
                own[event.name] = event.nbytes
                live += event.nbytes
            most = max(most, live)
        self._watch(max(most, live + sum(results)), self.log.tick - 1)

    def _watch(self, live: int, tick: int) -> bool:
        """Note where the program is if that is more than ever; whether it is. `tick` is of the last that happened."""
        phase, is_most = self.log.phase, live > self.highest
        if live > self._of_phase.get(phase, _NOWHERE)[0]:
            called_at = self.log.called_at
            place = called_at or program_place(sys._getframe(2))
            self._of_phase[phase] = live, place, -1 if called_at else self.log.node
        if is_most:
            self.highest, self.phase, self.tick = live, phase, tick
            self.on_rise(live - self.now)
        return is_most

    def find_place(self, phases: Collection[Phase]) -> tuple[Phase, str, int]:
        """Where the program was when most was alive, in one of these phases, and the node that ran."""
        found = {each: self._of_phase.get(each, _NOWHERE) for each in phases}
        phase = self.phase if self.phase in found else max(found, key=lambda each: found[each][0])
        return phase, *found[phase][1:]


def describe_shortage(complaint: str, place: str) -> str:
    """The request that a card refused, of torch's own words, and where it was made."""
    asked, _, rest = complaint.partition(". GPU")
    allowed = re.search(r"in use\. (.+ allowed); ", rest)
    share = f", with {allowed[1]} by set_per_process_memory_fraction" if allowed else ""
    asked = asked.removeprefix("CUDA out of memory. ")
    return f"It runs out{f' at {place}' if place else ''}: {asked}{share}"


Answers = dict[str, Callable[..., Any]]


def memory_answers(memory: CardMemory) -> Answers:
    """What `torch.cuda` and `torch.accelerator` say of memory, by the names of their functions."""

    def gauge(name: str, which: str) -> Callable[..., int]:
        return lambda *_, **__: int(getattr(getattr(memory.stats(), name), which))

    def mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
        memory.initialize()
        return memory.total_bytes - memory.used_bytes(), memory.total_bytes

    def memory_summary(*_: Any, **__: Any) -> str:
        stats = memory.stats()
        rows = (("Allocated memory", stats.allocated_bytes), ("Reserved memory", stats.reserved_bytes))
        lines = (f"{name:<18} now {format_bytes(stat.current)}, peak {format_bytes(stat.peak)}" for name, stat in rows)
        return "\n".join(["predicted by fxmem: no card was used", *lines])

    resets = [f"reset_{name}" for name in ("peak_memory_stats", "max_memory_allocated", "max_memory_cached")]
    return {
        "memory_allocated": gauge("allocated_bytes", "current"),
        "max_memory_allocated": gauge("allocated_bytes", "peak"),
        "memory_reserved": gauge("reserved_bytes", "current"),
        "max_memory_reserved": gauge("reserved_bytes", "peak"),
        "memory_stats": lambda *_, **__: memory.counts(),
        "memory_summary": memory_summary,
        "mem_get_info": mem_get_info,
        "set_per_process_memory_fraction": lambda fraction, device=None: memory.set_fraction(fraction),
        **dict.fromkeys((*resets, "reset_accumulated_memory_stats"), lambda *_, **__: memory.reset_peak_stats()),
        "empty_cache": lambda *_, **__: memory.empty_cache(),
    }
