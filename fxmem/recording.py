"""Notes every allocation and free of a program run on FakeTensors, op by op.

`Recorder` is a `TorchDispatchMode` above the fake one: each ATen call returns fake tensors, whose storages stand for the
memory a real run would take. A storage is known by the moment it was first seen (addresses are reused, and fake
storages have none), held weakly, and its end is the moment Python and C++ let go of it, which is when a real one
would go back to the allocator.

What is not seen: storage that changes its size in place (`resize_`), and what a kernel takes and gives back inside one
call.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fxmem import _torch, _torch_autograd, _torch_fakes, _torch_wrappers, values
from fxmem.backward import NODE_CALL
from fxmem.checks import passing
from fxmem.errors import AnalysisError
from fxmem.fake_kernels import ONE_DTYPE, check_one_dtype
from fxmem.records import Kind, Phase, PhaseSpan
from fxmem.replaying import Fresh, Replay, Replayer, different
from fxmem.source_lines import user_frame

__all__ = ["LOSS", "OPTIMIZER", "LoggedOp", "Looked", "Recorder"]

LOSS = -1
"""Stands for the node of what runs between the model's forward and its backward."""
OPTIMIZER = -2
"""Stands for the node of the optimizer's step."""

_SILENT_NAMES = frozenset({"aten.detach.default", "aten.is_same_size.default", "aten._local_scalar_dense.default"})
_SILENT_NAMESPACES = frozenset({"prim", "profiler"})


def _is_silent(func: Any, name: str) -> bool:
    """Whether an op that allocates nothing need not be noted: it computes nothing either."""
    return name in _SILENT_NAMES or name.startswith("aten.sym_") or name.partition(".")[0] in _SILENT_NAMESPACES or bool(getattr(func, "is_view", False))


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """What an op is, beside what it allocates for all to see: a function of the op, its arguments' metadata and its other arguments."""

    flops: int | None
    """None where it computes and has no formula."""
    hidden: Any = None
    """What it allocates unseen, in the words of whoever asked."""


@dataclasses.dataclass(slots=True)
class LoggedOp:
    """An `fxmem.records.Op` in the making: which node it ran for is sometimes known only afterwards."""

    name: str
    node: int
    phase: Phase
    begin: int
    end: int
    flops: int | None


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage that remembers which one it was."""

    __slots__ = ("address", "index")
    address: int
    index: int


_IN_PLACE_IN_NODES: Final[dict[Any, Any]] = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
"""What an autograd node in C++ does out of place only because it sees tensor subclasses, to zeros of its own: `index_backward`,
`index_select_backward_symint`, `value_selecting_reduction_backward`, `gather_backward` (torch/csrc/autograd/FunctionsManual.cpp,
aten/src/ATen/native/TensorAdvancedIndexing.cpp). A real run has one tensor of the input's size where a fake one would have two."""


class Recorder(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One program's log.

    Args:
        device: whose memory is counted; tensors elsewhere are not.
        fakes: the mode the program runs in.
        look: `(op, name, args, kwargs, result) -> Looked`; not asked again for a call that looks the same.
        saw: told index, `Looked.hidden` and phase of each op that hides something.
        replayer: of calls in this mode.
    """

    def __init__(
        self,
        device: torch.device,
        fakes: _torch.FakeTensorMode,
        look: Callable[[Any, str, tuple[Any, ...], dict[str, Any], Any], Looked],
        saw: Callable[[int, Any, Phase], None],
        replayer: Replayer,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device.type
        self._fakes = fakes
        self._look = look
        self._saw = saw
        self._looked: dict[Replay, Looked] = {}
        self._replayer = replayer
        self._watched: dict[int, _Watch] = {}
        self._keys: dict[Any, tuple[str, bool]] = {}
        self._in_place_foreach: dict[Any, bool] = {}
        self._setup = True
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
        self.results: dict[int, list[tuple[tuple[int, ...], str, int | None]]] = {}
        """By node, shape, dtype and storage of the tensors it returned."""
        self.made_up_scalars = 0
        """Numbers the optimizer read from tensors without values, each answered with 1."""
        self.passed_checks = 0
        """Conditions without values that the program asked for only to raise an error."""
        self.begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this each call would go through, and import, torch._dynamo; FakeTensorMode says the same of itself."""
        return False

    def begin(self) -> None:
        """Start the log anew: whatever is alive now was there before the step."""
        self.tick = 1
        self._over = False
        self.ops: list[LoggedOp] = []
        self.phases: list[PhaseSpan] = []
        self._phase = Phase.FORWARD
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
        self.results = {node: results for node, results in self.results.items() if all(index is None or self.death[index] is None for _, _, index in results)}
        self.first_read: dict[int, int] = {}
        for index, death in enumerate(self.death):
            if death is None:
                self.birth[index], self.op_of[index], self.node_of[index] = 0, None, None
                if self.kind[index] not in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.GRADIENT):
                    self.kind[index] = Kind.BUFFER
            else:
                self.birth[index] = self.death[index] = 0

    # --- storages ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """What is allocated inside and stays was there before the step; what goes again never happened."""
        before, self._setup = self._setup, True
        try:
            yield
        finally:
            self._setup = before

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The step itself."""
        self._setup = False
        try:
            yield
        finally:
            self._setup = self._over = True

    def close(self) -> None:
        """No further event is noted."""
        self._open = False

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The storage of a tensor, noted now if it is new; None for other devices and for no bytes. Of a wrapper, the first of those inside it."""
        if type(tensor) is not _torch.FakeTensor:
            return next(iter([self._index_of(part) for part in _torch_wrappers.parts(tensor)]), None)
        return self._index_of(tensor)

    def _index_of(self, tensor: torch.Tensor) -> int | None:
        if _torch.device_type(tensor) != self._device_type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        watch = self._watched.get(storage._cdata)
        if watch is not None:
            return watch.index
        nbytes = storage.nbytes()
        return self._enter(storage, nbytes, tuple(tensor.shape), tensor.dtype) if nbytes else None

    def _enter(self, storage: Any, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Note a storage that has just come."""
        index = len(self.nbytes)
        watch = _Watch(storage, self._gone)
        watch.address, watch.index = storage._cdata, index
        self._watched[watch.address] = watch
        self.nbytes.append(nbytes)
        if self._setup:
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
        return index

    def _gone(self, watch: weakref.ref[Any]) -> None:
        assert isinstance(watch, _Watch)
        if self._watched.get(watch.address) is watch:
            del self._watched[watch.address]
        if not self._open:
            return
        if self._setup:
            self.death[watch.index] = 0 if self.birth[watch.index] == 0 and not self._over else self.tick
        else:
            self.death[watch.index] = self.tick
            self.tick += 1
            if self._freed is not None:
                self._freed.append(watch.index)

    def freeing_in_order(self, free: Callable[[], None]) -> Callable[[], None]:
        """`free`, except that what it lets go at once goes in the order of birth: its own order is that of addresses, another on each run."""

        def freeing() -> None:
            self._freed, first = [], self.tick
            free()
            for position, index in enumerate(sorted(self._freed)):
                self.death[index] = first + position
            self._freed = None

        return freeing

    def resident(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """Say what a storage is for; the first to say so names it."""
        for path, part in _torch_wrappers.named_parts(tensor):
            index = self._index_of(part)
            if index is not None and self.kind[index] is None:
                self.kind[index], self.name[index] = kind, f"{name}.{path}".rstrip(".")
                self.shape[index], self.dtype[index] = tuple(part.shape), part.dtype

    def forget(self, tensor: torch.Tensor) -> None:
        """This storage, there before the step, would not be on a real run."""
        index = self.index_of(tensor)
        if index is not None:
            self.birth[index] = self.death[index] = 0
            self._watched = {address: watch for address, watch in self._watched.items() if watch.index != index}

    def rename(self, tensor: torch.Tensor, name: str, kind: Kind) -> None:
        """Give the storage a name and a kind unless it was there before the step."""
        for path, part in _torch_wrappers.named_parts(tensor):
            index = self._index_of(part)
            if index is not None and (self.birth[index] > 0 or self.kind[index] is None):
                self.kind[index], self.name[index] = kind, f"{name}.{path}".rstrip(".")

    def outputs_are(self, node: int) -> None:
        """What this node returned is the model's output."""
        for _, _, index in self.results.get(node, ()):
            if index is not None and self.birth[index] > 0:
                self.kind[index] = Kind.OUTPUT

    def alive(self) -> list[int]:
        """Storages alive now."""
        return sorted(watch.index for watch in self._watched.values())

    # --- ops -----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _torch_fakes.DEVICE_OF:
            return args[0].fake_device
        for kind in types:
            if kind is not _torch.FakeTensor and not issubclass(kind, _torch.FakeTensor):
                return NotImplemented  # a wrapper takes itself apart; what it then calls comes here
        if func is _torch_fakes.NUMBER_OF and (number := _torch_fakes.constant_number(args[0])) is not None:
            return number
        kwargs = kwargs or {}
        if _torch.is_composite(func):  # under inference_mode, and from within wrappers, the dispatcher does not take it apart
            with self:
                return func.decompose(*args, **kwargs)
        begin = self.tick
        if func in _IN_PLACE_IN_NODES and sys._getframe(1).f_code is NODE_CALL:
            func = _IN_PLACE_IN_NODES[func]
        call = None if self._is_in_place_foreach(func) else self._replayer.call(func, args, kwargs)
        replay = None if call is None else call.replay
        if call is None or replay is None or self._replayer.compares:
            result = self._run(func, args, kwargs)
            self._note_tensors(result)
            if call is not None:
                replay = self._replayer.learned(call, func, args, kwargs, result)
        else:
            result = self._replayer.make(replay, call.tensors)
            self._note_outputs(result, replay)
        if self._setup:
            return result
        key = self._keys.get(func)
        if key is None:
            name = str(func)
            key = self._keys[func] = name, _is_silent(func, name)
        name, silent = key
        if silent and self.tick == begin:
            return result
        index = len(self.ops)
        looked = None if replay is None else self._looked.get(replay)
        if looked is None:
            looked = self._look(func, name, args, kwargs, result)
            if replay is not None:
                self._looked[replay] = looked
        elif self._replayer.compares and looked != self._look(func, name, args, kwargs, result):
            raise AnalysisError(different(func))
        self.ops.append(LoggedOp(name, self._node, self._phase, begin, self.tick, looked.flops))
        if looked.hidden is not None:
            self._saw(index, looked.hidden, self._phase)
        return result

    def note_call(self, name: str) -> None:
        """Something that is no operator ran, allocated nothing and computed nobody knows how much."""
        if not self._setup:
            self.ops.append(LoggedOp(name, self._node, self._phase, self.tick, self.tick, None))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call itself, on fakes."""
        number = self._replayer.number(func, args)
        if number is not None:
            return number
        if func in ONE_DTYPE:
            check_one_dtype(func, args)
        try:
            needs_no_run = self._is_in_place_foreach(func) and all(tensor.dim() for tensor in args[0])
            result = None if needs_no_run else func(*args, **kwargs)
            values.follow(func, args, kwargs, result)
        except _torch.DATA_DEPENDENT:
            known, result = values.recover(func, args, kwargs, self._fakes, self._note_tensors)
            if not known and func is _torch_fakes.NUMBER_OF and args[0].dtype is torch.bool:
                result = self._passing()
                known = result is not None
            if not known:
                if not self._is_scalar_of_optimizer(func):
                    raise
                # Adafactor scales its step by a norm it reads; no allocation hangs on the number.
                self.made_up_scalars += 1
                result = 1.0 if args[0].dtype.is_floating_point else 1
        return result

    def _passing(self) -> bool | None:
        """What the program expects of a condition that it checks, or raises; None where it does something else with it."""
        frame = user_frame(sys._getframe(1))
        passed = None if frame is None else passing(frame)
        self.passed_checks += passed is not None
        return passed

    def _is_in_place_foreach(self, func: Any) -> bool:
        """Whether the op writes to lists of tensors, returns nothing and allocates nothing: then fake tensors need not run it.

        FakeTensorMode hashes every tensor of every list first, which took a seventh of a ResNet-50 step. Scalars are left to it: step
        counters have values.
        """
        known = self._in_place_foreach.get(func)
        if known is None:
            name = str(func)
            known = self._in_place_foreach[func] = name.startswith("aten._foreach_") and name.split(".")[1].endswith("_")
        return known

    def _is_scalar_of_optimizer(self, func: Any) -> bool:
        return self._phase is Phase.OPTIMIZER and func is torch.ops.aten._local_scalar_dense.default

    def _note_tensors(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.index_of(result)
        elif isinstance(result, (tuple, list)):
            for value in result:
                self._note_tensors(value)

    def _note_outputs(self, result: Any, replay: Replay) -> None:
        """As `_note_tensors`, for tensors whose looks are known."""
        for tensor, output in zip((result,) if replay.container is None else result, replay.outputs, strict=True):
            if type(output) is Fresh:
                if output.nbytes and output.device.type == self._device_type:
                    self._enter(tensor.untyped_storage(), output.nbytes, output.shape, output.dtype)
            elif isinstance(tensor, torch.Tensor):
                self.index_of(tensor)

    def set_phase(self, phase: Phase) -> None:
        """The phase in force ends, another begins."""
        self.end_phase()
        self._phase = phase

    def end_phase(self) -> None:
        """Close the phase in force at this tick."""
        self.phases.append(PhaseSpan(phase=self._phase, begin=self._phase_tick, end=self.tick, first_op=self._phase_op, last_op=len(self.ops)))
        self._phase_tick, self._phase_op = self.tick, len(self.ops)

    # --- who it is for (tracing's CallObserver, backward's Observer) -----------------------------------------------------

    def op_count(self) -> int:
        """How many ops have run."""
        return len(self.ops)

    def current_call(self) -> int:
        """The node things are noted for."""
        return self._node

    def resume_call(self, node: int) -> None:
        """Note things for this node again."""
        self._node = node

    def on_call(self, node: int) -> None:
        """Everything from here on is for this node."""
        self._node = node
        if node != self._announced:
            self._announced, self._announced_at = node, len(self._live_saved)
        number = _torch_autograd.next_sequence_number()
        if self._sequence[-1] == number:
            self._sequence_node[-1] = node
        else:
            self._sequence.append(number)
            self._sequence_node.append(node)

    def on_result(self, node: int, first_op: int, result: Any) -> None:
        """The node returned; put right what ran under the number announced for it."""
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
                self._live_saved[since:] = [(r, node if n == announced else n, s) for r, n, s in self._live_saved[since:]]
            self._sequence_node[-1] = node
            self._node = node
        self.results.setdefault(node, [(tuple(t.shape), str(t.dtype)[6:], self.index_of(t)) for t in _torch.tensors_in(result)])

    def on_backward_node(self, sequence_number: int) -> None:
        """The gradient of what was made under this number is computed next."""
        self._node = self._sequence_node[bisect.bisect_right(self._sequence, sequence_number) - 1]

    def on_save(self, value: Any, handle: weakref.ref[Any]) -> None:
        """A node keeps these tensors for backward."""
        for tensor in (part for found in _torch.tensors_in(value) for part in _torch_wrappers.parts(found)):
            index = self._index_of(tensor)
            if index is None or self.birth[index] == 0:
                continue
            self.saved_by_node.setdefault(self._node, {})[index] = None
            if self.kind[index] is None:
                self.kind[index] = Kind.SAVED
            if self._phase is Phase.FORWARD:
                self._live_saved.append((handle, self._node, index))

    def end_of_forward(self) -> None:
        """Settle which node owns each saved storage: the first to save it whose hold is still there."""
        for reference, node, index in self._live_saved:
            handle = reference()
            if handle is not None and handle.value is not None:
                self.saved_at_end.setdefault(index, node)
        self._live_saved = []
