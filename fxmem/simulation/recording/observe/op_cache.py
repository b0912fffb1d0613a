"""Repeat the results of operators for calls that look alike, without running FakeTensorMode.

A model repeats itself: of the thousands of operator calls of a step a few hundred are different. Two calls are alike if
the operator, the metadata of its tensors (sizes, strides, offset, dtype, device, dispatch keys), its other arguments
and the default dtype are the same, and no tensor's values are known. What comes out of the second is then what came out
of the first: new tensors of the same metadata, or the very arguments, or views of their storages, or the same numbers.
Of views and pointwise operators values may be known: the caller follows them, to what was made as to what was run.

This is checked. After the first call the result is made a second time from its description and must be
indistinguishable, and the call must have left its arguments' metadata as they were; where either fails, such calls
are never replayed. With `FXMEM_CHECK=1` every call is run both ways, and a difference is an error; with `FXMEM_CHECK=0`
nothing is replayed.

Why calls and not whole modules, of which a deep model has many alike: what a module's Python does beside calling
operators (caches it fills, counters, attributes, hooks, what it decides by them) follows from no key that can be
computed without running it. So it is run, each time. That and autograd's own nodes are about 1.0 s for 80 layers of a
Llama on plain meta tensors, where the whole analysis takes 2.4 s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import kernels as torch_kernels
from fxmem.errors import AnalysisError
from fxmem.records.units import group
from fxmem.simulation.asked.known_values import VALUE

_PLAIN = frozenset({int, float, bool})

CHECK = "FXMEM_CHECK"
"""The environment variable."""


@dataclasses.dataclass(frozen=True, slots=True)
class FreshOutput:
    """An output with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    """Of the storage."""


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """An output in the storage of a tensor argument, counted as they come."""

    argument: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True, slots=True)
class _Same:
    """A tensor argument itself."""

    argument: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """A number among the outputs, such as the lengths of sequences that attention kernels return."""

    value: int | float


_Output = FreshOutput | _View | _Same | _Plain | None


@dataclasses.dataclass(frozen=True, slots=True)
class OpFacts:
    """What is noted of an op beside its results: a function of the op, its arguments' metadata and its other
    arguments."""

    flops: int | None
    """None where it computes and has no formula."""
    moved_bytes: int
    """What its kernel reads and writes."""
    host_bytes: int = 0
    """What of it crosses the link between the card and the host's memory."""
    hidden: Any = None
    """The memory that its kernel allocates without a tensor, as `inspect` describes it; None for none."""


@dataclasses.dataclass(slots=True, eq=False)
class OpReplay:
    """How to make the result of a call: one object for all calls that look alike."""

    outputs: tuple[_Output, ...]
    container: type[list[Any]] | type[tuple[Any, ...]] | None
    """The type of the sequence of outputs; None for a single output."""
    facts: OpFacts | None = None
    """What the recorder keeps with calls of this kind; None before its first."""


@dataclasses.dataclass(slots=True)
class CachedCall:
    """A call that may have been seen before."""

    table: dict[tuple[Any, ...], OpReplay | None]
    key: tuple[Any, ...]
    tensors: list[torch.Tensor]
    replay: OpReplay | None
    """None where this is the first of its kind, or its kind cannot be replayed."""
    unless: str | None
    """The attribute that none of its tensors has; None where they may have any."""

    @property
    def knows(self) -> bool:
        """Whether a value of one of its tensors is known."""
        return any(VALUE in vars(each) for each in self.tensors)


class OpCache:
    """The calls seen so far in this process.

    Args:
        mode: whose tensors these are.
        check: the value of `FXMEM_CHECK`.
        context: says what else results and facts depend on: the target, torch's flags. Calls of another context are
            kept apart.
    """

    def __init__(
        self, mode: torch_common.FakeTensorMode, check: str = "", context: Callable[[], Hashable] | None = None
    ) -> None:
        self._mode = mode
        self._maker = torch_fakes.Maker(mode)
        self._context = context
        self._flags = torch_kernels.kernel_flags()
        self._tables: dict[Any, dict[tuple[Any, ...], OpReplay | None] | None] = (
            {} if context is None else torch_fakes.shared_tables(context())
        )
        self._on = check != "0"
        self.compares = check == "1"
        """Whether calls are to be run as well as replayed."""

    def follow_flags(self) -> None:
        """Take the calls of another context where the program has set a flag of torch since the last time."""
        if (flags := torch_kernels.kernel_flags()) != self._flags and self._context is not None:
            self._flags, self._tables = flags, torch_fakes.shared_tables(self._context())

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unless: str | None = VALUE
    ) -> CachedCall | None:
        """The call with its key and what is known of it; None if metadata do not determine its result, or if a tensor
        has an attribute with this name."""
        try:
            table = self._tables[func]
        except KeyError:
            table = self._tables[func] = {} if self._on and torch_fakes.is_function_of_metadata(func) else None
        if table is None:
            return None
        key: list[Any] = [torch.get_default_dtype()]
        tensors: list[torch.Tensor] = []
        if not torch_fakes.describe(args, self._mode, unless, key, tensors):
            return None
        if kwargs:
            key += kwargs
            if not torch_fakes.describe(kwargs.values(), self._mode, unless, key, tensors):
                return None
        key.append(torch.is_inference_mode_enabled())
        looks = tuple(key)
        return CachedCall(table, looks, tensors, table.get(looks), unless)

    def number(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The result of a call that makes a tensor of one floating-point number or none; None of any other.

        Raises AnalysisError if both ways are run and differ.
        """
        made = self._maker.number(args[0]) if func is torch_fakes.NEW_NUMBER and self._on else None
        if made is not None and self.compares and not torch_fakes.is_same(func(args[0]), made):
            raise AnalysisError(describe_mismatch(func))
        return made

    def make(self, replay: OpReplay, tensors: list[torch.Tensor]) -> Any:
        """The result of a call on these tensors."""
        made = [self._output(output, tensors) for output in replay.outputs]
        return made[0] if replay.container is None else replay.container(made)

    def _output(self, output: _Output, tensors: list[torch.Tensor]) -> torch.Tensor | int | float | None:
        if isinstance(output, FreshOutput):
            return self._maker.empty(output.shape, output.stride, output.dtype, output.device)
        if isinstance(output, _Same):
            return tensors[output.argument]
        if isinstance(output, _View):
            return self._maker.view(
                tensors[output.argument], output.shape, output.stride, output.offset, output.dtype, output.device
            )
        return None if output is None else output.value

    def learn(
        self, call: CachedCall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> OpReplay | None:
        """Remember a call that was run; None if its kind cannot be replayed, or if this one does not show how.

        Raises AnalysisError if the call was known and came out differently.
        """
        if call.key in call.table:
            if call.replay is not None and not _is_alike(result, self.make(call.replay, call.tensors)):
                raise AnalysisError(describe_mismatch(func))
            return call.replay
        outputs, container = (list(result), type(result)) if type(result) in (list, tuple) else ([result], None)
        described = _describe_outputs(outputs, call.tensors)
        if described is None:
            return None
        replay, again = OpReplay(tuple(described), container), self.call(func, args, kwargs, call.unless)
        is_same_call = len(described) == len(outputs) and again is not None and again.key == call.key
        is_replayed = is_same_call and _is_alike(result, self.make(replay, call.tensors))
        found = call.table[call.key] = replay if is_replayed else None
        return found


def describe_mismatch(func: Any) -> str:
    """The error text for two calls that looked the same and had different results."""
    what = f"{func} gave another result than a call before it that looked the same"
    return f"{what}; this is a bug of fxmem, which {CHECK}=0 avoids"


def _describe_outputs(outputs: list[Any], tensors: list[torch.Tensor]) -> list[_Output] | None:
    """How to make each output, up to the first that cannot be made; None if two arguments are or share what an output
    is, so that it might be either's."""
    arguments = group((id(each), position) for position, each in enumerate(tensors))
    storages = group((torch_common.storage_key(each), position) for position, each in enumerate(tensors))
    described: list[_Output] = []
    taken: set[int] = set()
    for output in outputs:
        if output is None or type(output) in _PLAIN:
            described.append(None if output is None else _Plain(output))
            continue
        if not isinstance(output, torch_common.FakeTensor) or output.layout is not torch.strided:
            break
        if output.constant is not None or hasattr(output, VALUE):
            break
        storage = torch_common.storage_key(output)
        among = arguments.get(id(output)) or storages.get(storage) or []
        if len(among) > 1:
            return None
        shape, stride, kind = tuple(output.shape), tuple(output.stride()), (output.dtype, output.fake_device)
        if id(output) in arguments:
            described.append(_Same(among[0]))
        elif among:
            described.append(_View(among[0], shape, stride, int(output.storage_offset()), *kind))
        elif storage in taken:
            break
        else:
            taken.add(storage)
            described.append(FreshOutput(shape, stride, *kind, output.untyped_storage().nbytes()))
    return described


def _is_alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch_fakes.is_same(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_is_alike, a, b))
    return type(a) is type(b) and (a is None or (type(a) in _PLAIN and a == b))
