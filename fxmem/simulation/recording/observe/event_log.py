"""The log of one program: every storage's allocation and free, every op, and the node of the graph each is for.

A storage is known by the moment it was first seen, because addresses are reused. It is referenced weakly: its end is
the moment Python and C++ free it, which is when a real one would go back to the allocator. Ticks are those of
`fxmem.records.profile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import Kind, Phase, PhaseSpan
from fxmem.simulation.code.source_lines import called_place
from fxmem.simulation.kernels.streams import Done, Streams
from fxmem.simulation.recording.observe.observer import Observer
from fxmem.simulation.recording.observe.storages import BoundedSizes, RealStorages, StorageReads, StreamWaits

LOSS = -1
"""The node of everything between the model's forward and its backward."""
OPTIMIZER = -2
"""The node of the optimizer's step."""

_OF_MODEL: Final = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.GRADIENT})
_KEPT: Final = _OF_MODEL | {Kind.UNSHARDED, Kind.COMMUNICATION}
"""What stays of its kind when the log begins anew; what all else that is there by then is, its holder says."""


@dataclasses.dataclass(slots=True)
class LoggedStorage:
    """An `fxmem.records.profile.Storage` while the program runs: what it is may still be found out."""

    nbytes: int
    birth: int
    op: int | None
    """Index of the op that runs, maybe one past the last; None before the step."""
    node: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    stream: int
    death: int | None = None
    """None while it is alive."""
    kind: Kind | None = None
    name: str = ""
    holder: str = ""
    """What the program calls it where it outlives a round; empty where it has a name, or nothing was found."""
    held_kind: Kind | None = None
    """Its kind by that holder."""
    held_bytes: int = 0
    """Those of the tensors in it that were found where that holder was."""
    made_at: str = ""
    """The line of the program that made it, where that is known."""
    called_at: str = ""
    """The line of the program that made it in what backward calls, a hook or the backward of a Function."""
    is_frozen: bool = False
    """Whether it is a parameter of which no gradient is wanted."""
    is_derived: bool = False
    """Whether it is a buffer that no checkpoint has."""
    is_bounded: bool = False
    """Whether its size comes of a shape that depends on data and is counted at the largest it can be."""
    is_grown: bool = False
    """Whether it took its memory back in place."""
    is_communicated: bool = False
    """Whether a collective reads or writes it."""

    def forget(self) -> None:
        """Take it out of the step: it was never there."""
        self.birth = self.death = 0


@dataclasses.dataclass(slots=True)
class LoggedOp:
    """An `fxmem.records.profile.Op` whose node may still change: sometimes it is known only afterwards."""

    name: str
    node: int
    phase: Phase
    begin: int
    end: int
    flops: int | None
    moved_bytes: int
    stream: int = 0
    host_bytes: int = 0
    repeats: tuple[int, int] | None = None


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage that remembers which one it was."""

    __slots__ = ("address", "index")
    address: int
    index: int


class StepLog:
    """The log of one program.

    Args:
        device: whose memory is counted; tensors elsewhere are not.
        counts: which tensors there are counted at all; None for every one.
        keeps_outputs: whether an output that outlives a round is still one in the next, and no buffer.
        observers: of allocations and frees.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        counts: Callable[[torch.Tensor], bool] | None = None,
        keeps_outputs: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.device_type = device.type
        self._counts = counts
        self._kept_kinds = _KEPT | {Kind.OUTPUT} if keeps_outputs else _KEPT
        self._observers = observers
        self.streams = Streams(self)
        """Of the card; the current one is what allocations are for."""
        self.setting_up = True
        """Whether what is allocated now counts as there before the step."""
        self.storages: list[LoggedStorage] = []
        self.node = LOSS
        """The node of the graph that ops and storages are for."""
        self.recomputing = 0
        """Whether what had been freed is recomputed, and how deep within."""
        self.first_of_backward_node = 0
        """The first storage that the node whose gradient is computed may have allocated."""
        self._watched: dict[int, _Watch] = {}
        self.real = RealStorages(lambda: self._watched)
        self._open = True
        self._freed: list[int] | None = None
        self.waits = StreamWaits()
        self._shrunk: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By address, the storages without bytes, and what they were."""
        self.bounds = BoundedSizes(self._is_bounded)
        self.reads = StorageReads(self.find_storage)
        self.begin()

    def begin(self, kept: Collection[int] = ()) -> None:
        """Start the log anew: whatever is alive now was there before the step; autograd still has `kept` saved."""
        self.tick = 1
        self._over = False
        self.waits.begin()
        self.ops: list[LoggedOp] = []
        self.recomputed: dict[int, int] = {}
        """By op that recomputed what had been freed, bytes it read that no other such op had made."""
        self.phases: list[PhaseSpan] = []
        self.phase = Phase.FORWARD
        self._phase_begin = 1, 0
        """Its tick and its first op."""
        self.recomputing = 0
        self.reads.read = {each: 0 for each in self.reads.read if self.storages[each].kind is Kind.GRADIENT}
        for index, storage in enumerate(self.storages):
            if storage.death is not None:
                storage.forget()
                continue
            storage.birth, storage.op, storage.node = 0, None, None
            if storage.kind not in self._kept_kinds:
                storage.kind = Kind.SAVED if index in kept else None

    # --- storages -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """What is allocated inside and stays counts as there before the step; what is freed inside is not logged."""
        before, self.setting_up = self.setting_up, True
        try:
            yield
        finally:
            self.setting_up = before

    @contextlib.contextmanager
    def record_step(self) -> Iterator[None]:
        """The step runs inside."""
        self.setting_up = False
        try:
            yield
        finally:
            self.setting_up = self._over = True

    def trace(self) -> contextlib.AbstractContextManager[None]:
        """What is allocated inside is a tracer's, and has no memory for real."""
        return torch_common.replace(self, "_counts", lambda _: False)

    def close(self) -> None:
        """No further event is noted."""
        self._open = False

    def note_storage(self, tensor: torch.Tensor) -> int | None:
        """The storage of a tensor, noted now if it is new; None for other devices and for no bytes. Of a wrapper, the
        first of those inside it."""
        if type(tensor) is not torch_common.FakeTensor or tensor.layout is not torch.strided:
            return next(iter([self.note_part(part) for part in torch_wrappers.parts(tensor)]), None)
        return self.note_part(tensor)

    def note_part(self, tensor: torch.Tensor) -> int | None:
        """As `note_storage`, of a tensor that is no wrapper."""
        if torch_common.device_type(tensor) != self.device_type or tensor.layout is not torch.strided:
            return None
        watch, is_twin = self._find_watch(tensor)
        if watch is not None:
            return watch.index
        if is_twin or (self._counts is not None and not self._counts(tensor)):
            return None
        storage = tensor.untyped_storage()
        nbytes = 0 if torch_autograd.is_zero(tensor) else storage.nbytes()
        return self.enter(storage, nbytes, tuple(tensor.shape), tensor.dtype) if nbytes else None

    def enter(self, storage: Any, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Log the allocation of a storage; its index."""
        index, stream = len(self.storages), self.streams.current
        for observer in self._observers:
            observer.on_storage(index, nbytes, stream)
        watch = _Watch(storage, self._on_death)
        watch.address, watch.index = torch_common.storage_address(storage), index
        self._watched[watch.address] = watch
        if self.setting_up:
            self.storages.append(LoggedStorage(nbytes, 0, None, None, shape, dtype, stream))
        else:
            self.storages.append(LoggedStorage(nbytes, self.tick, len(self.ops), self.node, shape, dtype, stream))
            self.tick += 1
        self.storages[index].is_bounded = self.bounds.is_making
        self.storages[index].called_at = self.called_at
        return index

    @property
    def called_at(self) -> str:
        """The line of the program in what backward calls; empty elsewhere, and for what is recomputed there."""
        is_called = self.reads.in_function and self.phase is Phase.BACKWARD and not self.recomputing
        return called_place(sys._getframe(1)) if is_called else ""

    def _is_bounded(self, tensor: torch.Tensor) -> bool:
        index = self.find_storage(tensor)
        return index is not None and self.storages[index].is_bounded

    def sum_bounded(self) -> int:
        """The bytes alive whose size comes of a shape that depends on data."""
        return sum(each.nbytes for each in map(self.storages.__getitem__, self.alive()) if each.is_bounded)

    def discard(self, first: int) -> None:
        """Forget the storages from this one on: the card had no memory for them."""
        for index in range(first, len(self.storages)):
            if self.storages[index].death is None:
                self.storages[index].forget()
                for observer in self._observers:
                    observer.on_free(index)
        self._watched = {address: watch for address, watch in self._watched.items() if watch.index < first}

    def find_storage(self, tensor: torch.Tensor) -> int | None:
        """The storage of a tensor that is no wrapper, where it was noted; None for others."""
        if torch_common.device_type(tensor) != self.device_type or tensor.layout is not torch.strided:
            return None
        watch, _ = self._find_watch(tensor)
        return None if watch is None else watch.index

    def _find_watch(self, tensor: torch.Tensor) -> tuple[_Watch | None, bool]:
        """The watch of a tensor's storage where it was noted, and whether that stands for another one."""
        storage = tensor.untyped_storage()
        address = torch_common.storage_address(storage)
        watch = self._watched.get(address)
        return (watch, False) if watch is not None else self.real.find(tensor, storage, address)

    def note_loaded(self, value: Any) -> None:
        """Log the storages of real tensors that have been read from a file, but for parts of one that is mapped."""
        for tensor in torch_common.iterate_tensors(value):
            on_device = tensor.layout is torch.strided and torch_common.device_type(tensor) == self.device_type
            if on_device and self._find_watch(tensor)[0] is None and (nbytes := tensor.untyped_storage().nbytes()):
                self.enter(tensor.untyped_storage(), nbytes, tuple(tensor.shape), tensor.dtype)

    def note_mapping(self, name: str, storage: Any) -> None:
        """Log a file that is mapped into memory: torch reports it to the profiler in one piece (`MapAllocator`)."""
        index = self.enter(storage, storage.nbytes(), (storage.nbytes(),), torch.uint8)
        self.storages[index].holder = name
        self.real.note_mapping(index, name, storage)

    def note_use(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that another stream uses a tensor (`Tensor.record_stream`)."""
        for part in torch_wrappers.parts(tensor):
            index = self.note_part(part)
            if index is not None and self.storages[index].stream != stream:
                self.waits.note_use(index, stream)

    def note_wait(self, done: Done | None) -> None:
        """Note that the host has waited for streams: blocks that waited for the same are free."""
        if self.waits.note_wait(done, self.tick):
            self.tick += 1  # what is allocated next comes after

    def _on_death(self, watch: weakref.ref[Any]) -> None:
        assert isinstance(watch, _Watch)
        index = watch.index
        if self._watched.get(watch.address) is watch:
            del self._watched[watch.address]
        storage = self.storages[index]
        if not self._open or storage.death is not None:
            return
        if self.setting_up:
            storage.death = 0 if storage.birth == 0 and not self._over else self.tick
        else:
            storage.death = self.tick
            self.tick += 1
            if index in self.waits.used_on:
                self.waits.note_freed(index, self.streams.next_moment())
            if self._freed is not None:
                self._freed.append(index)
        for observer in self._observers:
            observer.on_free(index)

    def note_growth(self, tensor: torch.Tensor) -> None:
        """A tensor may have been given a larger storage: torch allocates that, copies, and frees what there was
        (`maybe_resize_storage_cpu`, Resize.h; `resize_bytes_cuda`, cuda/Resize.cpp)."""
        storage = tensor.untyped_storage()
        watch = self._watched.get(torch_common.storage_address(storage))
        if watch is None or storage.nbytes() <= self.storages[watch.index].nbytes:
            return
        old = self.storages[watch.index]
        new = self.storages[self.enter(storage, storage.nbytes(), tuple(tensor.shape), tensor.dtype)]
        new.kind, new.name = old.kind, old.name
        self._on_death(watch)

    def resize(self, storage: Any, before: int, after: int) -> None:
        """A storage changes its size in place: what it held is freed, and what it holds from here on is allocated."""
        if self.setting_up or not self._open:
            return
        address = torch_common.storage_address(storage)
        watch, begin = self._watched.get(address), self.tick
        if watch is not None:
            old = watch.index
            self._on_death(watch)
            del watch  # the storage itself lives on
            self._shrunk[address] = weakref.ref(storage), old
        if not after or address not in self._shrunk or self._shrunk[address][0]() is not storage:
            return
        shrunk = self.storages[self._shrunk.pop(address)[1]]
        new = self.enter(storage, after, shrunk.shape, shrunk.dtype)
        grown = self.storages[new]
        grown.kind, grown.name, grown.is_grown = shrunk.kind, shrunk.name, True
        self.note_op("torch.UntypedStorage.resize_", begin, 0)

    def grow(self, index: int, nbytes: int, shape: tuple[int, ...]) -> None:
        """Let a storage be as large as later ones of its kind: steps in which they took its place are left out."""
        storage = self.storages[index]
        more, storage.nbytes = nbytes - storage.nbytes, nbytes
        if more:
            storage.shape = shape
            for observer in self._observers:
                observer.on_growth(more)

    def pass_tick(self) -> int:
        """A moment at which what was there before the step may end."""
        self.tick += 1
        return self.tick - 1

    def note_of_before(self, index: int, name: str, death: int) -> None:
        """Log a storage like this one that was there before the step, until this tick."""
        like = self.storages[index]
        found = LoggedStorage(like.nbytes, 0, None, None, like.shape, like.dtype, like.stream)
        found.kind, found.name, found.death = Kind.OUTPUT, name, death
        self.storages.append(found)

    def mark(self, value: Any, kind: Kind, over: tuple[Kind | None, ...] | None = None) -> None:
        """Set the kind of tensors that the step made, and that have a kind of `over`; None for any."""
        for tensor in torch_common.iterate_tensors(value):
            index = self.note_storage(tensor)
            storage = None if index is None else self.storages[index]
            if storage is not None and storage.birth > 0 and (over is None or storage.kind in over):
                storage.kind = kind

    def are_of_kind(self, value: Any, kind: Kind) -> bool:
        """Whether all these tensors are of a kind, as far as it is known by now; of none it is False."""
        found = [self.note_storage(tensor) for tensor in torch_common.iterate_tensors(value)]
        return bool(found) and all(index is not None and self.storages[index].kind is kind for index in found)

    def mark_grown(self, value: Any, kind: Kind) -> None:
        """Set the kind of tensors that took their memory back in place."""
        found = [(each, self.note_part(each)) for each in torch_common.iterate_tensors(value)]
        self.mark([each for each, index in found if index is not None and self.storages[index].is_grown], kind)

    def note_communication(self, value: Any) -> None:
        """Note that a collective reads or writes these tensors."""
        for tensor in torch_common.iterate_tensors(value):
            if (index := self.note_storage(tensor)) is not None:
                self.storages[index].is_communicated = True

    def free_in_order(self, free: Callable[[], None]) -> Callable[[], None]:
        """`free`, except that what it frees at once is freed in the order of birth: its own order is that of addresses,
        another on each run."""

        def free_sorted() -> None:
            self._freed, first = [], self.tick
            free()
            for position, index in enumerate(sorted(self._freed)):
                self.storages[index].death = first + position
            self._freed = None

        return free_sorted

    def resident(
        self, tensor: torch.Tensor, kind: Kind, name: str, over: tuple[Kind | None, ...] | None = (None,)
    ) -> None:
        """Set kind and name of a storage that has one of the kinds `over`, by default none yet; None for any."""
        for path, part in torch_wrappers.named_parts(tensor):
            index = self.note_part(part)
            storage = None if index is None else self.storages[index]
            if storage is not None and (over is None or storage.kind in over):
                if index in self.real.mapped:
                    storage.kind, storage.name = kind, self.real.mapped[index]
                    continue
                if storage.kind is None and not storage.birth:  # no operator has shown what it looks like
                    is_whole = part.nbytes == storage.nbytes
                    storage.shape = tuple(part.shape) if is_whole else (storage.nbytes // part.element_size(),)
                    storage.dtype = part.dtype
                storage.kind, storage.name = kind, f"{name}.{path}".rstrip(".")
            if storage is not None and storage.kind is Kind.PARAMETER:
                storage.is_frozen = not tensor.requires_grad and part.nbytes == storage.nbytes

    def rename(self, tensor: torch.Tensor, name: str, kind: Kind) -> None:
        """Set a storage's name and kind, unless it was there before the step."""
        for path, part in torch_wrappers.named_parts(tensor):
            index = self.note_part(part)
            if index is not None and ((storage := self.storages[index]).birth > 0 or storage.kind is None):
                storage.kind, storage.name = kind, f"{name}.{path}".rstrip(".") if name else ""

    def forget(self, tensor: torch.Tensor) -> None:
        """Take a storage that was there before the step out of the log: a real run has none."""
        index = self.note_storage(tensor)
        if index is not None:
            self.storages[index].forget()
            self._watched = {address: watch for address, watch in self._watched.items() if watch.index != index}

    def alive(self) -> list[int]:
        """Storages alive now."""
        return sorted(watch.index for watch in self._watched.values())

    def note_tensors(self, result: Any) -> None:
        """Log the storages of tensors that have just been returned."""
        if isinstance(result, torch.Tensor):
            self.note_storage(result)
        elif isinstance(result, (tuple, list)):
            for value in result:
                self.note_tensors(value)

    def sum_bytes(self, indices: Iterable[int]) -> int:
        """The bytes of these storages."""
        return sum(self.storages[index].nbytes for index in indices)

    def is_of_backward_node(self, tensor: torch.Tensor) -> bool:
        """Whether the node whose gradient is being computed has allocated this tensor."""
        index = self.note_storage(tensor)
        return index is not None and index >= self.first_of_backward_node

    def find_maker(self, tensor: torch.Tensor) -> str:
        """The name of the op that allocated this tensor; empty for none."""
        index = self.note_storage(tensor)
        op = None if index is None else self.storages[index].op
        return "" if op is None or op >= len(self.ops) else self.ops[op].name

    # --- ops and phases -----------------------------------------------------------------------------------------------

    def note_op(
        self,
        name: str,
        begin: int,
        flops: int | None,
        moved_bytes: int = 0,
        given: Any = (),
        *,
        host_bytes: int = 0,
        repeats: tuple[int, int] | None = None,
    ) -> int:
        """Log an op that ran on the tensors of `given` and began at this tick; its index."""
        at = self.node, self.phase, begin, self.tick
        self.ops.append(LoggedOp(name, *at, flops, moved_bytes, self.streams.current, host_bytes, repeats))
        index, made = len(self.ops) - 1, len(self.storages) - 1 if self.tick > begin else None
        self.reads.note(name, given, made, self.tick, outside=self.phase is Phase.OPTIMIZER)
        if self.recomputing and self.phase is Phase.BACKWARD:
            read = {self.note_storage(tensor) for tensor in torch_common.iterate_tensors(given)} - {None}
            self.recomputed[index] = self.sum_bytes(
                each for each in read if each is not None and self.storages[each].op not in self.recomputed
            )
        return index

    def note_call(self, name: str, moved_bytes: int, flops: int | None = None) -> None:
        """Log what is no operator and allocates nothing."""
        if not self.setting_up:
            self.note_op(name, self.tick, flops, moved_bytes)

    def set_phase(self, phase: Phase) -> None:
        """End the phase and begin another."""
        self.end_phase()
        self.phase = phase

    def end_phase(self) -> None:
        """End the phase at this tick."""
        (begin, first), last = self._phase_begin, len(self.ops)
        self.phases.append(PhaseSpan(phase=self.phase, begin=begin, end=self.tick, first_op=first, last_op=last))
        self._phase_begin = self.tick, last
