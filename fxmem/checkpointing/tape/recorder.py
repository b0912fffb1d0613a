"""Single results of operators, freed in forward and recomputed in backward, operator by operator.

A region of `recompute` runs the program a second time. Here nothing of the program runs twice: while a module runs, a
record is taken of the ATen operators it comes down to, with their numbers and the versions of what they read (`Tape`).
Of a tensor that autograd saves, the record of how it was made may then stand in for the tensor. When backward asks for
it, the operators that lead to it from what is kept run again, each once, and what they give stays until the last that
needs it has been asked for. A plan may name stretches of the forward: what is recomputed in one for something beyond it
is freed at once, and recomputed a second time when backward has come to the stretch, as in regions within regions. It
is what torch.compile's partitioner does with the graphs of AOTAutograd (torch/_functorch/partitioners.py), for programs
that run eagerly. Modules, hooks, Python's side effects and statistics are as in one run: there is just one.

What is recomputed is bit for bit what it was, where the kernels are deterministic:

- an operator that draws random numbers starts again from the generators' states it started from, which then go on as if
  it had not;
- a write in place makes a new value of the storage; recomputed, it writes to a copy, or to a storage that nothing else
  needs;
- batch norm's running statistics are left alone;
- operators outside of ATen, with a generator of the caller's, of tensor subclasses or of conjugated views are never run
  again, nor are storages that were allocated empty and that a kernel unknown to the dispatcher may have filled: what
  they gave is kept by the code that needs it;
- what was read from outside, parameters included, must not have been written to since: RuntimeError, as autograd itself
  raises it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem.checkpointing import subclass
from fxmem.checkpointing.op_signature import OpSignature, find_argument, find_tensors, read_signature
from fxmem.checkpointing.recompute import Generators
from fxmem.checkpointing.tape.host_copies import HostCopies, HostMemory, HostStandIn, read_layout
from fxmem.checkpointing.tape.values import (
    EmptyTensor,
    Need,
    OpKey,
    OutsideInput,
    SavedStandIn,
    Survey,
    TapedOp,
    TapedValue,
    ValueInput,
    ValueKey,
    gather_tensors,
    map_leaves,
)
from fxmem.errors import PlanWarning
from fxmem.planning import StretchPath
from fxmem.records.plan import Region, Result
from fxmem.records.units import format_bytes

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_OVERWRITES = frozenset(
    """
    bernoulli_ uniform_ normal_ random_ exponential_ log_normal_ cauchy_ geometric_ zero_ fill_ copy_
    """.split()
)
"""What they write does not depend on what was there."""
_CHANGES_STORAGE = frozenset({"set_", "resize_", "resize_as_", "swap_"})


@dataclass(frozen=True, slots=True)
class _TapeSignature:
    """What a tape has to know of an operator before it is called."""

    declared: OpSignature
    again: bool
    """Whether it may be recomputed, as far as that does not depend on its arguments."""
    collective: bool
    overwrites: bool

    @property
    def changes(self) -> bool:
        """Whether it may write to what it is given."""
        return bool(self.declared.written or self.declared.statistics or self.collective)


@functools.cache
def _signature(func: Any) -> _TapeSignature | None:
    """None of a view, and of what is no operator."""
    if not isinstance(func, torch_common.OpOverload) or func.is_view:
        return None
    declared = read_signature(func)
    packet = declared.name.split(".")[1]
    return _TapeSignature(
        declared,
        again=declared.name.startswith("aten.") and packet not in _EMPTY and packet not in _CHANGES_STORAGE,
        collective="c10d" in declared.name,
        overwrites=packet in _OVERWRITES,
    )


class Tape(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Around a module's forward, with `saved_tensors_hooks(tape.pack, tape.unpack)`.

    Args:
        kept: values that are kept from the start, for others to be made from.
        dropped: values that autograd saves and that are recomputed instead. What no set names is saved as without a
            tape.
        offloaded: values that autograd saves and that wait in the host's memory instead, each with the number of those
            fetched back before it; kept or not, for others to be made from.
        memory: what is offloaded waits there; None: in memory of this forward alone.
        checked: whether what is recomputed is compared with two sums of what it was.
        survey: is told what runs and what is saved.
        only: the calls to take a record of, as `needed` of an earlier forward has them; None: all. What others give is
            to their readers as what was there before.
        stretches: values that are freed again where they are recomputed for one that lies outside of this stretch of
            the forward, and recomputed once more when backward has come there.
    """

    def __init__(
        self,
        kept: Collection[ValueKey],
        dropped: Collection[ValueKey],
        *,
        offloaded: Mapping[ValueKey, int] | None = None,
        memory: HostMemory | None = None,
        checked: bool = False,
        survey: Survey | None = None,
        only: Collection[OpKey] | None = None,
        stretches: Mapping[ValueKey, StretchPath] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stretches = stretches or {}
        self._order = itertools.count()
        self._kept, self._dropped, self._checked, self._survey = kept, dropped, checked, survey
        self._only, self._offloaded = only, offloaded or {}
        self._copies = HostCopies(memory or HostMemory())
        self._is_copying = False
        """Whether what runs is the tape's own."""
        self._counts: dict[str, int] = {}
        self._saves = 0
        self.needed: set[OpKey] = set()
        """The calls that lead from what is kept to what was dropped, and those that made what was offloaded."""
        self.draws = False
        """Whether a random operator on the CPU has a record, with the state that it starts from."""
        self.recorded: dict[str, int] = {}
        """Up to which call of each operator, from 1, it has noted what was made."""
        self.met: dict[ValueKey, int] = {}
        """Values that were dropped or offloaded, and the bytes of their storages."""
        self._values: dict[int, tuple[TapedValue, Need, weakref.ref[Any]]] = {}
        """By storage that is alive, what it contains now."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._values.clear()
        self._copies.finish()

    @property
    def calls(self) -> frozenset[tuple[str, int]]:
        """How often each operator was called, and autograd saved: two forwards that differ in it are not the same."""
        return frozenset({**self._counts, "save": self._saves}.items())

    # --- what runs ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        if signature is None or self._is_copying:
            return func(*args, **kwargs)
        name = signature.declared.name
        number = self._counts[name] = self._counts.get(name, -1) + 1
        key = name, number
        is_asked = self._only is None or key in self._only
        if not is_asked and not signature.changes:
            return func(*args, **kwargs)
        op = self._record(func, signature, args, kwargs) if is_asked else None
        result = func(*args, **kwargs)
        if op is not None:
            self._enter(key, op, signature, args, kwargs, result)
            return result
        for tensor in (
            torch_common.iterate_tensors((args, kwargs))
            if signature.collective
            else (*find_tensors(signature.declared.written, args, kwargs), *_statistics(signature, args, kwargs))
        ):
            if _is_plain(tensor):
                self._values.pop(torch_common.storage_key(tensor), None)
        if self._survey is not None:
            self._survey.on_allocation(key, filter(_is_plain, torch_common.iterate_tensors(result)))
        return result

    def _record(self, func: Any, signature: _TapeSignature, args: Any, kwargs: Any) -> TapedOp | None:
        """The call as it can be recomputed; None if it must not be."""
        if not signature.again:
            return None
        written = {id(tensor) for tensor in find_tensors(signature.declared.written, args, kwargs)}
        statistics = {id(tensor) for tensor in _statistics(signature, args, kwargs)}
        inputs: dict[int, int] = {}
        values: list[TapedValue] = []
        writes: set[int] = set()

        def mark(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                raise _NotAgainError
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not _is_as_stored(leaf):
                raise _NotAgainError
            if id(leaf) in statistics:
                return EmptyTensor(read_layout(leaf), leaf.device)
            entry = self._values.get(torch_common.storage_key(leaf))
            if entry is not None:
                number = inputs.setdefault(id(entry[0]), len(values))
                if number == len(values):
                    values.append(entry[0].note_version())
                if id(leaf) in written:
                    writes.add(number)
                return ValueInput(number, read_layout(leaf))
            if id(leaf) not in written:
                kept = leaf if isinstance(leaf, torch.nn.Parameter) else torch_common.detached_sharing_version(leaf)
                return OutsideInput(kept, torch_autograd.version(leaf))
            if signature.overwrites and leaf.numel() * leaf.itemsize == leaf.untyped_storage().nbytes():
                return EmptyTensor(read_layout(leaf), leaf.device)
            raise _NotAgainError

        try:
            given = map_leaves(mark, (args, kwargs))
        except _NotAgainError:
            return None
        generators = Generators.now(gather_tensors(None, args, kwargs)) if signature.declared.draws else None
        return TapedOp(func, given, tuple(values), frozenset(writes), generators, next(self._order))

    def _enter(self, key: OpKey, op: TapedOp, signature: _TapeSignature, args: Any, kwargs: Any, result: Any) -> None:
        """Note which storages contain what it made."""
        given = {torch_common.storage_key(tensor) for tensor in gather_tensors(None, args, kwargs) if _is_plain(tensor)}
        written = find_tensors(signature.declared.written, args, kwargs)
        old = given - {torch_common.storage_key(tensor) for tensor in written}
        for storage in {torch_common.storage_key(tensor) for tensor in _statistics(signature, args, kwargs)}:
            old.add(storage)
            if (hidden := self._values.pop(storage, None)) is not None and self._survey is not None:
                self._survey.on_hidden_write(hidden[0].key)
        needs = tuple(need for each in op.inputs if each.kept is None and (need := each.need()) is not None)
        made: list[tuple[torch.Tensor, bool, ValueKey | None]] = []
        for at, tensor in enumerate(gather_tensors(result, args, kwargs)):
            if not _is_plain(tensor) or (storage := torch_common.storage_key(tensor)) in old:
                continue
            old.add(storage)
            need = Need(needs)
            made_key = (*key, len(made))
            value = TapedValue(made_key, op, need, self._stretches.get(made_key, ()))
            op.outputs.append((at, weakref.ref(value)))
            if value.key in self._kept:
                value.keep(tensor)
            self.draws |= op.generators is not None and tensor.device.type == "cpu"
            before = self._values.get(storage)
            made.append((tensor, storage not in given, None if before is None else before[0].key))
            self._values[storage] = value, need, self._watch(tensor, storage)
        for each in op.inputs:
            each.users += 1
        if made:
            self.recorded[key[0]] = key[1] + 1
            if self._survey is not None:
                self._survey.on_call(key, [each.key for each in op.inputs], made)

    def _watch(self, tensor: torch.Tensor, key: int) -> weakref.ref[Any]:
        me = weakref.ref(self)

        def forget(reference: weakref.ref[Any]) -> None:
            tape = me()
            if tape is not None and key in tape._values and tape._values[key][2] is reference:
                del tape._values[key]

        return weakref.ref(tensor.untyped_storage(), forget)

    # --- what is saved ------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """For `torch.autograd.graph.saved_tensors_hooks`."""
        self._saves += 1
        entry = self._values.get(torch_common.storage_key(tensor)) if _is_as_stored(tensor) else None
        if entry is None:
            return _without_graph(tensor)
        value, need, _ = entry
        value.note_version()
        if self._survey is not None:
            self._survey.on_save(value.key)
        if value.key in self._offloaded:
            return self._offload(value, tensor)
        if value.kept is not None or value.key not in self._dropped:
            return _without_graph(tensor)
        self.met[value.key] = tensor.untyped_storage().nbytes()
        self._note_needed(value)
        return SavedStandIn(value, need, tensor, checked=self._checked)

    def _offload(self, value: TapedValue, tensor: torch.Tensor) -> HostStandIn:
        if value.host is None:
            self.met[value.key] = tensor.untyped_storage().nbytes()
            self.needed.add(value.key[:2])
            self._is_copying = True
            try:
                value.offload(self._copies.send(tensor, self._offloaded[value.key]))
            finally:
                self._is_copying = False
        assert value.host is not None  # what `offload` has just given it
        return value.host.represent(tensor)

    def _note_needed(self, value: TapedValue) -> None:
        pending = [value]
        while pending:
            each = pending.pop()
            if each.op is not None and (key := each.key[:2]) not in self.needed:
                self.needed.add(key)
                pending += each.op.inputs

    def unpack(self, packed: Any) -> torch.Tensor:
        """For `torch.autograd.graph.saved_tensors_hooks`."""
        self._copies.begin_backward()
        return packed.find_tensor() if isinstance(packed, (SavedStandIn, HostStandIn)) else packed


@contextlib.contextmanager
def rematerialize(kept: Collection[ValueKey], dropped: Collection[ValueKey], **options: Any) -> Iterator[Tape]:
    """Recompute what autograd saves of `dropped` inside when backward asks for it. Arguments as for `Tape`."""
    tape = Tape(kept, dropped, **options)
    with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack), tape:
        yield tape


class _NotAgainError(Exception):
    """A call that must not be recomputed."""


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch_common.FakeTensor) or isinstance(
        tensor, torch.nn.Buffer
    )


def _is_as_stored(tensor: torch.Tensor) -> bool:
    """Whether it is plain, and its elements are those of its storage."""
    return _is_plain(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without the node that made it.

    A node that saves its own result (ReLU, softmax, attention) would otherwise own a tensor that owns the node.
    Backward breaks that ring; without one, for a step that is skipped, it is never freed: it runs through C++, where
    Python's garbage collector does not look.
    """
    return tensor if tensor.grad_fn is None else torch_common.detached_sharing_version(tensor)


def _statistics(signature: _TapeSignature, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Running statistics that the call writes to."""
    declared = signature.declared
    if not declared.statistics or (declared.switch and not find_argument(declared.switch, args, kwargs)):
        return []
    return find_tensors(declared.statistics, args, kwargs)


# --- applies a plan for single results of operators: the model's own forward, under a tape ----------------------------


_KINDS = 16
"""Forwards that are told apart; of a model with more, every forward is recorded whole."""


@dataclass
class ByOperator:
    """A model of whose operators some results are recomputed or offloaded; see `fxmem.checkpointing.tape`."""

    kept: frozenset[ValueKey]
    dropped: frozenset[ValueKey]
    offloaded: Mapping[ValueKey, int] = field(default_factory=dict)
    """With each how many others are fetched back before it."""
    memory: HostMemory = field(default_factory=HostMemory)
    """Where what is offloaded waits."""
    stretches: Mapping[ValueKey, StretchPath] = field(default_factory=dict)
    """What is freed again where it is recomputed for another stretch of the forward."""
    survey: Survey | None = None
    checked: bool = False
    """Whether a forward has been run whose results, recomputed, were compared with what they were."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """How often the forward that the plan was made for calls each operator; empty where that is not known."""
    needed: frozenset[OpKey] = frozenset()
    """The calls that lead to what is dropped, in all forwards that have been recorded whole: of others no record is
    taken, which is most of what a tape takes."""
    forwards: Mapping[frozenset[tuple[str, int]], int] = field(default_factory=dict)
    """By how often each operator was called, how many results a forward dropped that was recorded whole; -1 for a
    forward that is to be."""

    @staticmethod
    def collect(regions: Iterable[Region], operators: Mapping[str, int]) -> ByOperator:
        """What the regions of a plan say together."""
        found = list(regions)
        return ByOperator(
            _keys(result for region in found for result in region.holds),
            _keys(result for region in found for result in region.remakes),
            _places(result for region in found for result in region.offloads),
            stretches={key: one.stretch for region in found for one in region.frees for key in _keys([one])},
            operators=operators,
        )

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `subclass.Way`."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            _warn_of_compiler()
            return forward(module, *args, **kwargs)
        if self.survey is not None:
            self.survey.begin()
        known = self.forwards.values()
        is_whole = self.survey is not None or not known or -1 in known or len(known) > _KINDS
        with rematerialize(
            self.kept,
            self.dropped,
            offloaded=self.offloaded,
            memory=self.memory,
            checked=not self.checked,
            survey=self.survey,
            only=None if is_whole else self.needed,
            stretches=self.stretches,
        ) as tape:
            result = forward(module, *args, **kwargs)
        self._learn(tape, is_whole=is_whole)
        if self.operators and not self.checked:
            self._compare(tape)
        self.checked = True
        return result

    def _learn(self, tape: Tape, *, is_whole: bool) -> None:
        """Note which calls have to be recorded; of an unknown forward, that the next is recorded whole."""
        found = len(tape.met) if is_whole else -1
        if tape.draws:
            return  # the states in the record take memory where the model does: as much in every step, then
        if len(self.forwards) <= _KINDS and self.forwards.get(tape.calls) != len(tape.met):
            self.needed |= tape.needed
            self.forwards = {**self.forwards, tape.calls: found}

    def _compare(self, tape: Tape) -> None:
        """Warn where a forward is not the one that the plan was made for."""
        met = len(tape.met)
        changed = {
            name: f"{tape.recorded.get(name, 0)} {name} where the plan has {self.operators.get(name, 0)}"
            for name in sorted({*self.operators, *tape.recorded})
            if tape.recorded.get(name) != self.operators.get(name)
        }
        promised = self.dropped | set(self.offloaded)
        named = {name for name, _, _ in self.kept | promised}
        if met == len(promised) and named.isdisjoint(changed):
            return  # what is kept and recomputed is what was planned; another device has other kernels between
        told = [*changed.values()]
        others = f" and {len(told) - 3} operators more" if len(told) > 3 else ""
        warnings.warn(
            f"this step is not the one that the checkpoint plan was made for: {met} of the {len(promised)} results "
            f"that it {'recomputes or offloads' if self.offloaded else 'recomputes'} were met, "
            f"{format_bytes(sum(tape.met.values()))} together"
            + (f"; the forward calls {', '.join(told[:3])}{others}" if told else "")
            + ". Gradients are right, but less memory is freed; plan again for the program as it is now (autocast, "
            "dropout, attention, adapters, the release of torch)",
            PlanWarning,
            stacklevel=2,
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_compiler() -> bool:
    # Run by the compiler while it traces, and taken for a constant, so that its graph does not break here.
    warnings.warn(
        "a checkpoint plan for operators does nothing in a model under torch.compile, which decides by itself what it "
        "keeps; plan with application='modules', or set torch._functorch.config.activation_memory_budget",
        PlanWarning,
        stacklevel=2,
    )
    return True


def record_survey(model: nn.Module) -> Survey:
    """Record each training forward of `model`, until `uncheckpoint`, in the survey that is returned."""
    survey = Survey()
    subclass.become(model, ByOperator(frozenset(), frozenset(), survey=survey))
    return survey


def _keys(results: Iterable[Result]) -> frozenset[ValueKey]:
    return frozenset((result.operator, result.number, output) for result in results for output in result.outputs)


def _places(results: Iterable[Result]) -> dict[ValueKey, int]:
    """Offloaded results by key, with their places in the order of being fetched; of results without, the last saved
    first."""
    found: dict[ValueKey, int] = {}
    for result in results:
        for index, output in enumerate(result.outputs):
            place = result.fetched[index] if index < len(result.fetched) else -len(found) - 1
            found[result.operator, result.number, output] = place
    lowest = min(found.values(), default=0)
    return {key: place - min(lowest, 0) for key, place in found.items()}
