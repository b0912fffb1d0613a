"""The calls of a model that are alike: two run, the others are made of them.

What a call asks of the card's allocator, in order, and what it returns follow from its arguments' layouts for as long
as it leaves nothing but its result, and under autocast the casts of weights that are kept to its end, and as it leaves
the numbers and containers as they were that its modules and the program's own functions have: then a further call is
one operator, which makes tensors like those and passes through the memory that the others took meanwhile. A call of
which anything else stays, is freed or is counted runs each time; so does one of a model with a hook of the user's, and
one before which such a number has changed, or a value of its arguments that was the same so far. The 4th, 8th, 16th
call and so on run, too, and are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import kernels as torch_kernels
from fxmem._torch import modules as torch_modules
from fxmem.hardware.hidden_memory import Events, HiddenEvent, HiddenMemory, alloc, free, output
from fxmem.hardware.workspaces import Seen
from fxmem.memory.generation import LoopEvent, find_events
from fxmem.simulation.asked import known_values
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.code.source_lines import is_own_code
from fxmem.simulation.recording.observe.event_log import LoggedStorage
from fxmem.simulation.recording.observe.observer import PendingCall
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.loop_state import TensorState, list_parts

_CONFIRMED: Final = 2
"""Calls that are alike before others are made of them."""
_TRIED: Final = 4
"""Calls of which none is like the one before it, after which the others run unwatched."""
_MOST_LAYOUTS: Final = 64
"""Of arguments of a module, after which its calls run."""
_DEEPEST: Final = 8
"""From a module to a number that counts its calls: by a registry of hooks, a hook and its state."""
_MOST_VALUES: Final = 200_000
"""Of a module and what it has, that are compared."""


class _Given(NamedTuple):
    """A tensor among the arguments, counted as they come."""

    position: int


class _Call(NamedTuple):
    """A call that ran."""

    leaves: list[Any]
    """Of its result: `TensorState`, `_Given`, or the value itself."""
    structure: Any
    storages: list[LoggedStorage]
    """Of its result and its casts, in the order in which they were allocated."""
    casts: tuple[int, ...]
    """Of these, those that autocast keeps."""
    whole: Seen
    """What it allocates and frees."""
    most: Seen
    """The same, summed up."""
    flops: int | None
    moved_bytes: int
    host_bytes: int
    ops: tuple[int, int]
    """The first of its operators, and one past the last."""

    def is_like(self, other: _Call) -> bool:
        """Whether it asks for the same, and returns the same."""
        sizes = [[(each.nbytes, each.shape, each.dtype) for each in call.storages] for call in (self, other)]
        return sizes[0] == sizes[1] and self._replace(storages=[], ops=other.ops) == other._replace(storages=[])


@dataclasses.dataclass
class _Calls:
    """The calls of a module with arguments of the same layouts."""

    last: _Call | None = None
    """The last one that ran, if others can be made of it."""
    alike: int = 0
    """Calls that ran one after another and were alike."""
    count: int = 0
    state: list[Any] | None = None
    """Of the model before them, as of `_list_state`."""
    values: list[Any] = dataclasses.field(default_factory=list)
    """Of the tensors among the arguments, as of `_read`; `...` where another changed nothing."""


class RepeatedCalls:
    """The calls of models without gradients.

    Args:
        recording: of the program.
        machine: that it runs on; on the CPU each call runs.
        runs_all: whether none is made.
    """

    def __init__(self, recording: Recording, machine: PretendedMachine, *, runs_all: bool) -> None:
        self._runs_all = runs_all or machine.memory is None or recording.collectives.world is not None
        self._recording, self._log = recording, recording.log
        self._memory, self._trace = machine.memory, machine.trace
        self._mode, self._device, self._notes = recording.fakes, recording.device, machine.notes
        self._maker, self._functions = torch_fakes.Maker(self._mode), _OwnFunctions()
        self.is_on = False
        """Whether calls that are alike are made of those that ran."""
        self.made = self.ran = 0
        """Calls that were made, and that ran, where they might be made."""
        self.differs = ""
        """The model of which a later call was not like those of which others were made; empty for none."""
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, _Calls]] = weakref.WeakKeyDictionary()
        self._casts: list[torch.Tensor] = []
        """What autocast would keep of calls that were made."""
        self._has_cast = False
        """Whether a model was called since autocast kept nothing."""

    def clear_casts(self, original: Callable[[], None]) -> None:
        """`torch.clear_autocast_cache`."""
        original()
        self._has_cast = False
        while self._casts:
            del self._casts[0]

    def run(self, call: PendingCall, *, infers: bool) -> Any:
        """What a call of a model returns, which ran or was made, as one node of the graph. Where other ranks wait for
        what it sends, it runs.

        Args:
            call: it.
            infers: whether the program trains nothing.
        """
        if self._runs_all or not (self.is_on or infers):
            return call.run()
        self.ran += 1
        module, (leaves, structure) = call.module, torch_common.tree_flatten((call.args, call.kwargs))
        key: list[Any] = [repr(structure), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]
        key += torch.is_inference_mode_enabled(), torch.get_default_dtype(), module.training, self._has_cast
        key += *torch_kernels.kernel_flags(), *torch_kernels.sdpa_flags()
        self._has_cast = torch.is_autocast_enabled("cuda")
        tensors: list[torch.Tensor] = []
        is_known = torch_fakes.describe(leaves, self._mode, None, key, tensors, of_offset=False)
        calls = self._known.setdefault(module, {})
        if torch.is_grad_enabled() or not is_known or len(calls) > _MOST_LAYOUTS:
            return call.run()
        known = calls.setdefault(tuple(key), _Calls())
        known.count += 1
        if known.last is not None and any(known.last.storages[each].death is None for each in known.last.casts):
            known.last, known.alike, known.count = None, 0, _TRIED  # autocast still has its casts: another makes none
        if known.alike < _CONFIRMED and known.count > _TRIED:
            return call.run()
        like, state, values = known.last, _list_state(module, self._functions), [_read(each) for each in tensors]
        changed = [i for i, (old, new) in enumerate(zip(known.values, values, strict=False)) if old not in (..., new)]
        is_expected = state == known.state and not changed
        if like is not None and known.alike >= _CONFIRMED and is_expected and known.count & (known.count - 1):
            self.ran, self.made = self.ran - 1, self.made + 1
            return call.as_node(lambda: self._make(like, tensors))
        reads = self._notes.reads
        result, known.last = self._watch(module, call.run, tensors, state)
        is_alike = like is not None and known.last is not None and known.last.is_like(like) and state == known.state
        if is_alike and not (self._notes.reads > reads and any(not tensors[i].is_floating_point() for i in changed)):
            known.alike += 1
            known.values = [... if i in changed else old for i, old in enumerate(known.values)]
            return result
        if known.alike >= _CONFIRMED and is_expected:
            self.differs, known.last = type(module).__name__, None
        elif known.alike >= _CONFIRMED:
            known.count = 1
        known.alike, known.state, known.values = int(known.last is not None), state, values
        return result

    def _watch(
        self, module: torch.nn.Module, run: Callable[[], Any], tensors: list[torch.Tensor], state: list[Any] | None
    ) -> tuple[Any, _Call | None]:
        """Run a call; its result, and how to make one like it, None where that cannot be said."""
        hooks = (hook for each in module.modules() for hook in torch_modules.forward_hooks(each))
        if state is None or any(map(is_own_code, hooks)):
            return run(), None
        draws = random.getstate()
        log, ops, memory = self._log, self._log.ops, self._memory
        assert memory is not None
        _, acts = self._trace.since(0)
        first, stream = len(ops), log.streams.current
        result = run()
        memory.ask_cudnn()
        events = find_events(self._trace.since(acts)[0], memory.asked)
        if (
            _list_state(module, self._functions) != state
            or random.getstate() != draws
            or events is None
            or ops is not log.ops
            or any(each.stream != stream for each in events if each.nbytes)
        ):
            return result, None
        leaves, structure = torch_common.tree_flatten(result)
        made = [self._describe(each, tensors) for each in leaves]
        kept = {each.home for each in made if isinstance(each, TensorState)}
        alive = {each.key for each in events if each.nbytes is not None} - {e.key for e in events if e.nbytes is None}
        casts = tuple(each for each in alive - kept if isinstance(each, int)) if self._has_cast else ()
        kept.update(casts)
        hidden = _find_hidden(events, kept)
        if hidden is None or not kept or any(each is NotImplemented for each in made):
            return result, None
        order = [each.key for each in events if each.nbytes is not None and each.key in kept]
        places = {index: place for place, index in enumerate(order)}
        storages = [log.storages[index] for index in order if isinstance(index, int)]
        made = [each._replace(home=places[each.home]) if isinstance(each, TensorState) else each for each in made]
        ran = ops[first:]
        flops = None if any(op.flops is None for op in ran) else sum(op.flops or 0 for op in ran)
        sizes, name = [each.nbytes for each in storages], type(module).__name__
        whole, most = (
            Seen(name, multiplies=False, multiplies_lt=False, memory=HiddenMemory(events=each))
            for each in (hidden, _sum_up(hidden, sizes))
        )
        moved = sum(op.moved_bytes for op in ran), sum(op.host_bytes for op in ran)
        casts, spanned = tuple(sorted(places[each] for each in casts)), (first, first + len(ran))
        return result, _Call(made, structure, storages, casts, whole, most, flops, *moved, spanned)

    def _describe(self, leaf: Any, tensors: list[torch.Tensor]) -> Any:
        """How to make what a call returns; NotImplemented where that cannot be said."""
        if not isinstance(leaf, torch.Tensor):
            return leaf if leaf is None or type(leaf) in (bool, int, float, str) else NotImplemented
        given = next((position for position, each in enumerate(tensors) if each is leaf), None)
        if given is not None:
            return _Given(given)
        index = self._log.find_storage(leaf) if type(leaf) is torch_common.FakeTensor else None
        if index is None or leaf.requires_grad:
            return NotImplemented
        return TensorState.of(leaf, index)

    def _make(self, call: _Call, tensors: list[torch.Tensor]) -> Any:
        """What a call like this one returns, as one operator makes it."""
        log, begin, first = self._log, self._log.tick, len(self._log.storages)
        bases = [self._maker.empty((like.nbytes,), (1,), torch.uint8, self._device) for like in call.storages]
        for base, like in zip(bases, call.storages, strict=True):
            log.enter(base.untyped_storage(), like.nbytes, like.shape, like.dtype)
        op = log.note_op(
            call.whole.name, begin, call.flops, call.moved_bytes, host_bytes=call.host_bytes, repeats=call.ops
        )
        logged = log.ops[op]
        try:  # the profile has the most of its memory, the card all
            self._recording.collector.note_seen(op, call.most, logged.phase, logged.stream)
            self._recording.subject.on_hidden(op, call.whole, logged.phase)
        except torch.cuda.OutOfMemoryError:
            log.discard(first)
            raise
        self._casts += [bases[each] for each in call.casts]
        made: dict[TensorState, torch.Tensor] = {}

        def make(leaf: Any) -> Any:
            if isinstance(leaf, _Given):
                return tensors[leaf.position]
            if isinstance(leaf, TensorState):
                if leaf not in made:
                    made[leaf] = self._maker.view(bases[leaf.home], *leaf[1:], self._device)
                return made[leaf]
            return leaf

        return torch_common.tree_unflatten(map(make, call.leaves), call.structure)


_PLAIN: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_TENSORS: Final = ("_parameters", "_buffers")
"""Attributes of a module whose tensors may be replaced, as by what moves weights to the card for a call."""


def _read(tensor: torch.Tensor) -> Any:
    """The values of a tensor, to be compared; None where they are not known, or too many."""
    known = known_values.find_value(tensor)
    if known is None or known.numel() > known_values.LIMIT:
        return None
    with torch_common.no_modes(), torch_common.pause_observers():
        return known.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class _OwnFunctions(dict[type, list[types.FunctionType]]):
    """The program's own functions, by class; for as long as one program is recorded, which may make its classes."""

    def __missing__(self, kind: type) -> list[types.FunctionType]:
        functions = (each for base in kind.__mro__ for each in vars(base).values())
        self[kind] = [each for each in functions if isinstance(each, types.FunctionType) and is_own_code(each)]
        return self[kind]


def _list_used(function: Any) -> Iterator[Any]:
    """What a function of the program's own is bound to, and what its code names outside of it."""
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    if isinstance(function, types.MethodType):
        yield function.__self__
    function = inspect.unwrap(getattr(function, "__func__", function))
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # which has nothing yet
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:
        codes += (each for each in code.co_consts if isinstance(each, types.CodeType))
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _list_state(module: torch.nn.Module, functions: _OwnFunctions) -> list[Any] | None:
    """The numbers that a module has and what belongs to it, what of the program's functions lead to, and its tensors;
    None where there are too many."""
    found, seen = list[Any](), set[int]()

    def note(value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            found.append(value)
            return
        is_function = isinstance(value, _FUNCTIONS)
        is_opaque = is_function or isinstance(value, (torch.Tensor, torch.nn.Module, type, types.ModuleType))
        found.append(id(value) if is_opaque and kind is not types.MethodType else kind)
        if id(value) in seen or depth > _DEEPEST or len(found) > _MOST_VALUES:
            return
        seen.add(id(value))
        if is_function and is_own_code(value):
            within = [("", each, None) for each in _list_used(value)]
        elif is_opaque:
            return
        elif isinstance(value, (set, frozenset)):
            within = [("", each, None) for each in value]
        else:
            within = [*list_parts(value), *(("", each, None) for each in functions[kind])]
        for name, inner, _ in within:
            found.append(name)
            note(inner, depth + 1)

    for each in module.modules():
        for name, value in vars(each).items():
            if name not in _TENSORS:
                note(value, 0)
            else:
                found.extend((tensor.dtype, tensor.shape) for tensor in value.values() if tensor is not None)
        for function in functions[type(each)]:
            note(function, 0)
    return None if len(found) > _MOST_VALUES else found


def _find_hidden(events: list[LoopEvent], kept: set[int]) -> Events | None:
    """What a call allocates and frees, its result as outputs; None where something else of it stays, or something that
    was there is freed."""
    alive: dict[Any, str] = {}
    found: list[HiddenEvent] = []
    for key, nbytes, _ in events:
        if nbytes is None:
            if key not in alive or key in kept:
                return None
            found += free(alive.pop(key))
        else:
            alive[key] = str(len(found))
            found.append(output("result") if key in kept else alloc(alive[key], nbytes))
    return tuple(found) if alive.keys() == kept else None


def _sum_up(events: Events, results: list[int]) -> Events:
    """The most that a call has for itself at once, as one allocation around its result.

    Args:
        events: of the call.
        results: the bytes of each storage of its result, in order.
    """
    own: dict[str, int] = {}
    made = now = most = 0
    for event in events:
        if event.action == "free":
            now -= own.pop(event.name)
        elif event.action == "alloc":
            own[event.name] = event.nbytes or 0
            now += own[event.name]
        else:
            now += results[made]
            made += 1
        most = max(most, now)
    rest = most - sum(results)
    return (alloc("temporaries", rest), *(output("result") for _ in results)) if rest else ()
