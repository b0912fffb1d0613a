"""The log of one step: every storage's allocation and free, every op, and the node of the graph each is for.

A storage is known by the moment it was first seen, because addresses are reused. It is referenced weakly: its end is
the moment Python and C++ free it, which is when a real one would go back to the allocator. Ticks are those of
`fxmem.records.profile`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import Kind, Phase, PhaseSpan
from fxmem.simulation.kernels.streams import Done, Streams

LOSS = -1
"""The node of everything between the model's forward and its backward."""
OPTIMIZER = -2
"""The node of the optimizer's step."""


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


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage that remembers which one it was."""

    __slots__ = ("address", "index")
    address: int
    index: int


class StepLog:
    """The log of one program.

    Args:
        device: whose memory is counted; tensors elsewhere are not.
    """

    kept_kinds: tuple[Kind, ...] = (
        Kind.PARAMETER,
        Kind.BUFFER,
        Kind.INPUT,
        Kind.OPTIMIZER_STATE,
        Kind.GRADIENT,
        Kind.UNSHARDED,
        Kind.COMMUNICATION,
    )
    """What stays of its kind when the log begins anew; all else that is there by then is a buffer."""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self.streams = Streams(self)
        """Of the card; the current one is what allocations are for."""
        self.setting_up = True
        """Whether what is allocated now counts as there before the step."""
        self._watched: dict[int, _Watch] = {}
        self._newest_before_node = 0
        self.backward_node = -1
        """Number of the node of autograd whose gradient was computed last."""
        self._open = True
        self._freed: list[int] | None = None
        self.nbytes: list[int] = []
        self.birth: list[int] = []
        self.death: list[int | None] = []
        self.op_of: list[int | None] = []
        self.node_of: list[int | None] = []
        self.shape: list[tuple[int, ...]] = []
        self.dtype: list[torch.dtype] = []
        self.kind: list[Kind | None] = []
        self.name: list[str] = []
        self.stream: list[int] = []
        self.used_on: dict[int, dict[int, None]] = {}
        """By storage, the further streams that the program said use it."""
        self._waiting: dict[int, tuple[frozenset[int], int]] = {}
        """By freed storage, the streams that its block waits for, and since which moment of theirs."""
        self.free_by: dict[int, int] = {}
        """By freed storage whose block waited, the tick by which it was free."""
        self.grown: set[int] = set()
        """Storages that took their memory back in place."""
        self.communication: set[int] = set()
        """Storages that a collective reads or writes."""
        self.results: dict[int, list[tuple[tuple[int, ...], str, int | None]]] = {}
        """By node, shape, dtype and storage of the tensors it returned."""
        self.begin()

    def begin(self) -> None:
        """Start the log anew: whatever is alive now was there before the step."""
        self.tick = 1
        self._over = False
        self._waiting.clear()
        self.free_by.clear()
        self.ops: list[LoggedOp] = []
        self.recomputed: dict[int, int] = {}
        """By op that recomputed what had been freed, bytes it read that no other such op had made."""
        self.restored: dict[tuple[int, int], None] = {}
        """Node and storage, where its backward read what had not been saved."""
        self._recomputing = 0
        self._shrunk: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By address, the storages without bytes, and what they were."""
        self.phases: list[PhaseSpan] = []
        self.phase = Phase.FORWARD
        self._phase_tick, self._phase_op = 1, 0
        self._node = LOSS
        self._sequence: list[int] = [0]
        self._sequence_node: list[int] = [LOSS]
        self.saved_by_node: dict[int, dict[int, None]] = {}
        self.saved_at_end: dict[int, int] = {}
        self._live_saved: list[tuple[weakref.ref[Any], int, int]] = []
        self._announced, self._announced_at = LOSS, 0
        """The node announced last, and how many of these there were then."""
        # What the program read before it began again, its inputs for one, is not read anew.
        self.results = {
            node: results
            for node, results in self.results.items()
            if all(index is None or self.death[index] is None for _, _, index in results)
        }
        for index, death in enumerate(self.death):
            if death is None and self.kind[index] is None and index in self.communication:
                self.kind[index] = Kind.COMMUNICATION
            if death is None:
                self.birth[index], self.op_of[index], self.node_of[index] = 0, None, None
                if self.kind[index] not in self.kept_kinds:
                    self.kind[index] = Kind.BUFFER
            else:
                self.birth[index] = self.death[index] = 0

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

    def close(self) -> None:
        """No further event is noted."""
        self._open = False

    def note_storage(self, tensor: torch.Tensor) -> int | None:
        """The storage of a tensor, noted now if it is new; None for other devices and for no bytes. Of a wrapper, the
        first of those inside it."""
        if type(tensor) is not torch_common.FakeTensor:
            return next(iter([self._note_storage(part) for part in torch_wrappers.parts(tensor)]), None)
        return self._note_storage(tensor)

    def _note_storage(self, tensor: torch.Tensor) -> int | None:
        if torch_common.device_type(tensor) != self.device_type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        watch = self._watched.get(torch_common.storage_address(storage))
        if watch is not None:
            return watch.index
        nbytes = 0 if torch_autograd.is_zero(tensor) else storage.nbytes()
        return self.enter(storage, nbytes, tuple(tensor.shape), tensor.dtype) if nbytes else None

    def enter(self, storage: Any, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Log the allocation of a storage; its index."""
        index = len(self.nbytes)
        watch = _Watch(storage, self._on_death)
        watch.address, watch.index = torch_common.storage_address(storage), index
        self._watched[watch.address] = watch
        self.nbytes.append(nbytes)
        if self.setting_up:
            self.birth.append(0)
            self.op_of.append(None)
            self.node_of.append(None)
        else:
            self.birth.append(self.tick)
            self.tick += 1
            self.op_of.append(len(self.ops))
            self.node_of.append(self._node)
        self.death.append(None)
        self.shape.append(shape)
        self.dtype.append(dtype)
        self.kind.append(None)
        self.name.append("")
        self.stream.append(self.streams.current)
        return index

    def note_use(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that another stream uses a tensor (`Tensor.record_stream`)."""
        for part in torch_wrappers.parts(tensor):
            index = self._note_storage(part)
            if index is not None and self.stream[index] != stream:
                self.used_on.setdefault(index, {})[stream] = None

    def note_wait(self, done: Done | None) -> None:
        """Note that the host has waited for streams: blocks that waited for the same are free."""
        tick, before = self.tick, len(self._waiting)
        for index, (streams, moment) in list(self._waiting.items()):
            left = frozenset(each for each in streams if done is not None and done.get(each, 0) < moment)
            if left:
                self._waiting[index] = left, moment
            else:
                del self._waiting[index]
                self.free_by[index] = tick
        if len(self._waiting) < before:
            self.tick += 1  # what is allocated next comes after

    def _on_death(self, watch: weakref.ref[Any]) -> None:
        assert isinstance(watch, _Watch)
        if self._watched.get(watch.address) is watch:
            del self._watched[watch.address]
        if not self._open:
            return
        if self.setting_up:
            self.death[watch.index] = 0 if self.birth[watch.index] == 0 and not self._over else self.tick
        else:
            self.death[watch.index] = self.tick
            self.tick += 1
            if watch.index in self.used_on:
                self._waiting[watch.index] = frozenset(self.used_on[watch.index]), self.streams.next_moment()
            if self._freed is not None:
                self._freed.append(watch.index)

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
        old = self._shrunk.pop(address)[1]
        new = self.enter(storage, after, self.shape[old], self.dtype[old])
        self.grown.add(new)
        self.kind[new], self.name[new] = self.kind[old], self.name[old]
        self.note_op("torch.UntypedStorage.resize_", begin, 0)

    def mark(self, value: Any, kind: Kind) -> None:
        """Set the kind of tensors that were not there before the step."""
        for tensor in torch_common.iterate_tensors(value):
            index = self.note_storage(tensor)
            if index is not None and self.birth[index] > 0:
                self.kind[index] = kind

    def mark_grown(self, value: Any, kind: Kind) -> None:
        """Set the kind of tensors that took their memory back in place."""
        self.mark(
            [each for each in torch_common.iterate_tensors(value) if self._note_storage(each) in self.grown], kind
        )

    def note_communication(self, value: Any) -> None:
        """Note that a collective reads or writes these tensors."""
        found = (self.note_storage(tensor) for tensor in torch_common.iterate_tensors(value))
        self.communication.update(index for index in found if index is not None and self.birth[index] > 0)

    def free_in_order(self, free: Callable[[], None]) -> Callable[[], None]:
        """`free`, except that what it frees at once is freed in the order of birth: its own order is that of addresses,
        another on each run."""

        def free_sorted() -> None:
            self._freed, first = [], self.tick
            free()
            for position, index in enumerate(sorted(self._freed)):
                self.death[index] = first + position
            self._freed = None

        return free_sorted

    def resident(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """Set the kind and the name of a storage that has none yet."""
        for path, part in torch_wrappers.named_parts(tensor):
            index = self._note_storage(part)
            if index is not None and self.kind[index] is None:
                self.kind[index], self.name[index] = kind, f"{name}.{path}".rstrip(".")
                self.shape[index], self.dtype[index] = tuple(part.shape), part.dtype

    def forget(self, tensor: torch.Tensor) -> None:
        """Take a storage that was there before the step out of the log: a real run has none."""
        index = self.note_storage(tensor)
        if index is not None:
            self.birth[index] = self.death[index] = 0
            self._watched = {address: watch for address, watch in self._watched.items() if watch.index != index}

    def rename(self, tensor: torch.Tensor, name: str, kind: Kind) -> None:
        """Set a storage's name and kind, unless it was there before the step."""
        for path, part in torch_wrappers.named_parts(tensor):
            index = self._note_storage(part)
            if index is not None and (self.birth[index] > 0 or self.kind[index] is None):
                self.kind[index], self.name[index] = kind, f"{name}.{path}".rstrip(".")

    def mark_outputs(self, node: int) -> None:
        """Mark what this node returned as the model's output."""
        for _, _, index in self.results.get(node, ()):
            if index is not None and self.birth[index] > 0:
                self.kind[index] = Kind.OUTPUT

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

    # --- ops and phases -----------------------------------------------------------------------------------------------

    def note_op(
        self, name: str, begin: int, flops: int | None, moved_bytes: int = 0, given: Any = (), *, host_bytes: int = 0
    ) -> int:
        """Log an op that ran on the tensors of `given` and began at this tick; its index."""
        stream = self.streams.current
        self.ops.append(
            LoggedOp(name, self._node, self.phase, begin, self.tick, flops, moved_bytes, stream, host_bytes)
        )
        index = len(self.ops) - 1
        if self._recomputing and self.phase is Phase.BACKWARD:
            read = {self.note_storage(tensor) for tensor in torch_common.iterate_tensors(given)}
            self.recomputed[index] = sum(
                self.nbytes[storage]
                for storage in read
                if storage is not None and self.op_of[storage] not in self.recomputed
            )
        return index

    @contextlib.contextmanager
    def observe_recomputation(self) -> Iterator[None]:
        """What runs inside recomputes what had been freed."""
        self._recomputing += 1
        try:
            yield
        finally:
            self._recomputing -= 1

    def note_call(self, name: str, moved_bytes: int) -> None:
        """Log what is no operator, allocates nothing and has unknown FLOPs."""
        if not self.setting_up:
            self.note_op(name, self.tick, None, moved_bytes)

    def set_phase(self, phase: Phase) -> None:
        """End the phase and begin another."""
        self.end_phase()
        self.phase = phase

    def end_phase(self) -> None:
        """End the phase at this tick."""
        self.phases.append(
            PhaseSpan(
                phase=self.phase, begin=self._phase_tick, end=self.tick, first_op=self._phase_op, last_op=len(self.ops)
            )
        )
        self._phase_tick, self._phase_op = self.tick, len(self.ops)

    # --- which node it is for (the tracer's CallObserver, the engine's AutogradObserver) ------------------------------

    def op_count(self) -> int:
        """How many ops have run."""
        return len(self.ops)

    def current_call(self) -> int:
        """The node that ops and storages are logged for."""
        return self._node

    def resume_call(self, node: int) -> None:
        """Log for this node again."""
        self._node = node

    def on_call(self, node: int) -> None:
        """Log for this node from here on."""
        self._node = node
        if node != self._announced:
            self._announced, self._announced_at = node, len(self._live_saved)
        number = torch_autograd.next_sequence_number()
        if self._sequence[-1] == number:
            self._sequence_node[-1] = node
        else:
            self._sequence.append(number)
            self._sequence_node.append(node)

    def on_result(self, node: int, first_op: int, result: Any) -> None:
        """The node returned; correct what was logged under the number announced for it."""
        announced = self._node
        if announced != node and first_op < len(self.ops):
            for index in range(first_op, len(self.ops)):
                self.ops[index].node = node
            for storage in range(len(self.birth) - 1, -1, -1):
                if self.birth[storage] < self.ops[first_op].begin:
                    break
                self.node_of[storage] = node
            moved = self.saved_by_node.pop(announced, None)
            if moved is not None:
                self.saved_by_node[node] = moved
                since = self._announced_at
                self._live_saved[since:] = [
                    (r, node if n == announced else n, s) for r, n, s in self._live_saved[since:]
                ]
            self._sequence_node[-1] = node
            self._node = node
        self.results.setdefault(
            node,
            [(tuple(t.shape), str(t.dtype)[6:], self.note_storage(t)) for t in torch_common.iterate_tensors(result)],
        )

    def on_backward_node(self, sequence_number: int) -> None:
        """Log for the node whose gradient is computed next. In forward, as in a loss of gradients, the node stays."""
        self._newest_before_node, self.backward_node = len(self.nbytes), sequence_number
        if self.phase is Phase.FORWARD:
            return
        self._node = self._sequence_node[bisect.bisect_right(self._sequence, sequence_number) - 1]

    def is_of_backward_node(self, tensor: torch.Tensor) -> bool:
        """Whether the node whose gradient is being computed has allocated this tensor."""
        index = self.note_storage(tensor)
        return index is not None and index >= self._newest_before_node

    def find_maker(self, tensor: torch.Tensor) -> str:
        """The name of the op that allocated this tensor; empty for none."""
        index = self.note_storage(tensor)
        op = None if index is None else self.op_of[index]
        return "" if op is None or op >= len(self.ops) else self.ops[op].name

    def on_save(self, value: Any, handle: weakref.ref[Any]) -> None:
        """A node saves these tensors for backward."""
        for tensor in (part for found in torch_common.iterate_tensors(value) for part in torch_wrappers.parts(found)):
            index = self._note_storage(tensor)
            if index is None or self.birth[index] == 0:
                continue
            self.saved_by_node.setdefault(self._node, {})[index] = None
            if self._recomputing and self.phase is Phase.BACKWARD:
                self.restored[self._node, index] = None
            if self.kind[index] is None:
                self.kind[index] = Kind.SAVED
            if self.phase is Phase.FORWARD:
                self._live_saved.append((handle, self._node, index))

    def on_unpack(self, tensor: torch.Tensor) -> None:
        """The program's own unpack hook returned this tensor to the node that runs."""
        index = self.note_storage(tensor)
        if index is not None:
            self.restored[self._node, index] = None

    def end_of_forward(self) -> None:
        """Settle which node owns each saved storage: the first to save it that still keeps it."""
        for reference, node, index in self._live_saved:
            handle = reference()
            if handle is not None and handle.value is not None:
                self.saved_at_end.setdefault(index, node)
        self._live_saved = []
