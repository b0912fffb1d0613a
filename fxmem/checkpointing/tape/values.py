"""Values recorded on a tape: what they are computed from, and how to recompute them.

A *value* is what a storage contains between two writes to it. Autograd keeps a `SavedStandIn` for a tensor on it, which
leads to the value, the operator that made it, that one's inputs and so on back to what is kept or was there before.
Nothing else keeps any of these, so they are freed with the last that needs them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem.checkpointing.recompute import Generators
from fxmem.checkpointing.tape.host_copies import HostCopy, StridedLayout, read_layout, whole_storage
from fxmem.planning import OperatorCall, OperatorValue, StretchPath
from fxmem.simulation.kernels import is_under_mode

OpKey = tuple[str, int]
"""An operator's qualified overload (`aten.addmm.default`), and how many of the same ran before in this forward."""
ValueKey = tuple[str, int, int]
"""The operator that made it, and the position among the values it made."""


class Need:
    """Keeps a recomputed value until all that are made from it have been asked for."""

    __slots__ = ("__weakref__", "inputs", "tensor")

    def __init__(self, inputs: tuple[Need, ...]) -> None:
        self.inputs = inputs
        """What has to be made before."""
        self.tensor: torch.Tensor | None = None


class TapedValue:
    """What a storage contains between two writes to it."""

    __slots__ = ("__weakref__", "host", "kept", "key", "need", "op", "stretch", "users", "version")

    def __init__(self, key: ValueKey, op: TapedOp, need: Need, stretch: StretchPath = ()) -> None:
        self.key, self.stretch = key, stretch
        self.op: TapedOp | None = op
        """What makes it; None if it is kept or waits in the host's memory."""
        self.need = weakref.ref(need)
        self.kept: torch.Tensor | None = None
        self.host: HostCopy | None = None
        self.version: int | None = None
        """Writes to it when it was first looked at: autograd counts one in place only when the operator has returned,
        which is later than it is kept."""
        self.users = 0
        """Operators and saved tensors that need it."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Have it at hand from the start."""
        self.kept, self.op = torch_common.detached_sharing_version(tensor), None

    def offload(self, host: HostCopy) -> None:
        """Have it in the host's memory alone."""
        self.host, self.op, self.kept = host, None, None
        if (need := self.need()) is not None:
            need.inputs = ()

    def note_version(self) -> TapedValue:
        """Note the value's version, and return the value: from now on it must not be written to."""
        if self.kept is not None and self.version is None:
            self.version = torch_autograd.version(self.kept)
        return self

    def find_tensor(self, made: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """Return a tensor on the value's storage, if it need not be recomputed. `made`: what has been, by value's
        id."""
        if self.kept is not None:
            if self.version is not None and torch_autograd.version(self.kept) != self.version:
                raise _written_error(f"what {self.key[0]} made, which the plan keeps", self.kept)
            return self.kept
        if self.host is not None:
            return self.host.find_tensor()
        need = self.need()
        return need.tensor if need is not None and need.tensor is not None else made.get(id(self))

    def stays(self, stretch: StretchPath) -> bool:
        """Whether it stays once it has been recomputed for a value of this stretch."""
        return stretch[: len(self.stretch)] == self.stretch

    def recompute(self) -> torch.Tensor:
        """Return a tensor on the value's storage, computed from what is kept.

        Operators run in the order of the forward. What they make stays until the last that needs it has been asked for,
        if this value is in its stretch; else until the last of them that reads it now.
        """
        made: dict[int, torch.Tensor] = {}
        ops = self._find_missing()
        readers = Counter(id(each) for op in ops for each in op.inputs)
        readers[id(self)] += 1
        for op in ops:
            for output, tensor in op.run(made, self.stretch):
                need = output.need()
                if output.stays(self.stretch) and need is not None:
                    if need.tensor is None:
                        need.tensor, need.inputs = tensor, ()
                elif readers[id(output)]:
                    made[id(output)] = tensor
            for each in op.inputs:
                readers[id(each)] -= 1
                if not readers[id(each)]:
                    made.pop(id(each), None)
        found = self.find_tensor(made)
        assert found is not None  # the last operator has made it
        return found

    def _find_missing(self) -> list[TapedOp]:
        """The operators that lead to the value from what is at hand, in their order."""
        found: dict[int, TapedOp] = {}
        pending = [self]
        while pending:
            each = pending.pop()
            if (op := each.op) is not None and op.order not in found and each.find_tensor({}) is None:
                found[op.order] = op
                pending += op.inputs
        return [found[order] for order in sorted(found)]


# --- what an operator was given ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueInput:
    """The value with this number among the inputs."""

    number: int
    geometry: StridedLayout

    def read(self, bases: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that was given, on its value's storage. `bases`: tensors on the storages of the values."""
        return self.geometry.view(bases[self.number])


@dataclass(frozen=True, slots=True)
class OutsideInput:
    """A tensor that was there before, or whose making is not recorded."""

    tensor: torch.Tensor
    version: int

    def read(self, bases: Sequence[torch.Tensor]) -> torch.Tensor:
        """It, as it was."""
        # As a sharded parameter is between the uses of its module.
        freed = self.tensor.numel() and not self.tensor.untyped_storage().nbytes()
        if torch_autograd.version(self.tensor) != self.version or freed:
            raise _written_error("what the model reads", self.tensor)
        return self.tensor


@dataclass(frozen=True, slots=True)
class EmptyTensor:
    """A tensor of which nothing is read, and which only the operator itself writes to."""

    geometry: StridedLayout
    device: torch.device

    def read(self, bases: Sequence[torch.Tensor]) -> torch.Tensor:
        """An empty one."""
        like = self.geometry
        return torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=self.device)


class TapedOp:
    """A call of an operator, such that it can be recomputed.

    Args:
        func: the operator.
        given: arguments and keyword arguments, with marks in place of tensors.
        inputs: the values that `ValueInput` counts.
        written: those of them that it writes to.
        generators: before it, if it draws.
        order: how many were recorded before.
    """

    __slots__ = ("func", "generators", "given", "inputs", "order", "outputs", "written")

    def __init__(
        self,
        func: Any,
        given: tuple[Any, Any],
        inputs: tuple[TapedValue, ...],
        written: frozenset[int],
        generators: Generators | None,
        order: int = 0,
    ) -> None:
        self.func, self.given, self.inputs, self.written, self.generators = func, given, inputs, written, generators
        self.order = order
        self.outputs: list[tuple[int, weakref.ref[TapedValue]]] = []
        """Values that it made, each with the position of a tensor on it in `gather_tensors`."""

    def run(self, made: Mapping[int, torch.Tensor], stretch: StretchPath) -> list[tuple[TapedValue, torch.Tensor]]:
        """Make its values again, from inputs that are at hand.

        Args:
            made: what has been made for this value alone, by value's id.
            stretch: of the value that they are made for. Where one of them does not stay, what it writes to has to be
                left as it is.
        """
        outputs = [(at, output) for at, reference in self.outputs if (output := reference()) is not None]
        stays = all(output.stays(stretch) for _, output in outputs)
        bases: list[torch.Tensor] = []
        for number, value in enumerate(self.inputs):
            base = value.find_tensor(made)
            assert base is not None
            is_copied = number in self.written and (_is_shared(value) or not (stays or id(value) in made))
            bases.append(whole_storage(base).clone() if is_copied else base)

        def real(mark: Any) -> Any:
            return mark.read(bases) if isinstance(mark, (ValueInput, OutsideInput, EmptyTensor)) else mark

        args, kwargs = map_leaves(real, self.given)
        with contextlib.nullcontext() if self.generators is None else self.generators.replay():
            result = self.func(*args, **kwargs)
        tensors = gather_tensors(result, args, kwargs)
        return [(output, tensors[at]) for at, output in outputs]


def _is_shared(value: TapedValue) -> bool:
    """Whether others than the one who writes to it need it."""
    return value.kept is not None or value.users > 1


def gather_tensors(result: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that a call of an ATen operator gave and was given, in order."""
    found: list[torch.Tensor] = []
    for value in (result, args, *kwargs.values()):
        _gather(value, found)
    return found


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in (tuple, list):
        for item in value:
            _gather(item, found)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to each leaf of an ATen operator's arguments: tuples, lists and a dict of keywords.

    `tree_map` takes several times as long.
    """
    if type(value) in (tuple, list):
        return type(value)([map_leaves(function, item) for item in value])
    if type(value) is dict:
        return {name: map_leaves(function, item) for name, item in value.items()}
    return function(value)


# --- what autograd keeps ----------------------------------------------------------------------------------------------


class SavedStandIn:
    """What stands for a tensor that autograd saves.

    Args:
        value: what it lies on.
        need: of that value.
        tensor: the tensor; looked at only.
        checked: whether what is recomputed is compared with its sums.
    """

    __slots__ = ("geometry", "need", "sums", "value")

    def __init__(self, value: TapedValue, need: Need, tensor: torch.Tensor, *, checked: bool) -> None:
        self.value, self.geometry = value, read_layout(tensor)
        self.need: Need | None = need
        self.sums = _sums(tensor) if checked and not _is_unset_seed(value.op, tensor) else None
        value.users += 1

    def find_tensor(self) -> torch.Tensor:
        """The tensor."""
        with torch.no_grad(), _no_autocast():
            found = self.geometry.view(self.value.recompute())
            if self.sums is not None and not _are_alike(self.sums, _sums(found)):
                raise RuntimeError(
                    f"recomputed, what {self.value.key[0]} gave ({tuple(found.shape)} {found.dtype}) is not what it "
                    f"was: something has written to it that "
                    "the dispatcher does not know of, a kernel called through its address for one. "
                    "fxmem.uncheckpoint(model), or plan with another application"
                )
        self.need = self.sums = None
        return found


def _is_unset_seed(op: TapedOp | None, tensor: torch.Tensor) -> bool:
    """Whether it is the random state of an attention without dropout.

    The CUDA kernels allocate seed and offset all the same and write nothing to them
    (`_efficient_attention_forward` in aten/src/ATen/native/transformers/cuda/attention.cu).
    """
    if op is None or tensor.is_floating_point():
        return False
    args, kwargs = op.given
    for at, argument in enumerate(torch_common.op_arguments(op.func)):
        if argument.name == "dropout_p":
            given = args[at] if at < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False


def _sums(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return two numbers that change with the contents; None for FakeTensors and types without sums.

    They need no temporary of the tensor's size.
    """
    if isinstance(tensor, torch_common.FakeTensor) or not tensor.numel():
        return None
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        return None
    with torch_common.no_modes():  # a tape would count these operators as the program's
        if not tensor.is_floating_point():
            return torch.stack([torch.count_nonzero(tensor)]).double()
        kind = torch.float32 if tensor.dtype.itemsize < 4 and tensor.is_cuda else None
        return torch.stack([tensor.sum(dtype=kind), torch.linalg.vector_norm(tensor, 1, dtype=kind)]).double()


def _are_alike(before: torch.Tensor, now: torch.Tensor | None) -> bool:
    """To a thousandth: kernels that add atomically do not give the same bits twice."""
    return now is not None and torch.allclose(
        before, now, rtol=0, atol=1e-3 * max(float(before.nan_to_num().abs().max()), 1e-30), equal_nan=True
    )


# --- small parts ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """What was recorded is what autocast had made of the program."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _written_error(what: str, tensor: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{what} ({tuple(tensor.shape)} {tensor.dtype}) has been written to, or freed, before backward, so what was "
        "made from it cannot be recomputed; fxmem.uncheckpoint(model), or plan with another application"
    )


# --- a survey of a model's forward: its operator calls, their values, and what autograd saves -------------------------


_SUM, _SUM_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


class Survey:
    """What a `Tape` tells of a module's forward; of several, of the last."""

    def __init__(self) -> None:
        self.begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Survey:
        return self  # copies of the module report to the same place

    def begin(self) -> None:
        """Forget what was seen."""
        self._calls: list[tuple[OpKey, list[ValueKey], list[ValueKey]]] = []
        self._storages: dict[ValueKey, ValueKey] = {}
        self._allocated: dict[int, ValueKey] = {}
        self._nbytes: dict[ValueKey, int] = {}
        self._saved: set[ValueKey] = set()
        self._overwritten: set[ValueKey] = set()
        self._hidden: set[ValueKey] = set()
        self._sums: dict[OpKey, OpKey] = {}
        """Of each sum, in place or not, what it is where no tape is: see `is_under_mode`."""
        self._sum_counts = {_SUM: 0, _SUM_IN_PLACE: 0}

    def _note_sum(self, key: OpKey) -> bool:
        """Note a sum; whether it is one that is in place without a tape."""
        if key[0] not in self._sum_counts:
            return False
        is_linear = key[0] == _SUM and is_under_mode()
        name = _SUM_IN_PLACE if is_linear else key[0]
        self._sums[key] = name, self._sum_counts[name]
        self._sum_counts[name] += 1
        return is_linear

    def on_allocation(self, key: OpKey, tensors: Iterable[torch.Tensor]) -> None:
        """An operator that must not run again, or need not, has given these."""
        self._note_sum(key)
        for position, storage in enumerate(dict.fromkeys(map(torch_common.storage_key, tensors))):
            self._allocated[storage] = (*key, position)

    def on_hidden_write(self, key: ValueKey) -> None:
        """A storage no longer contains what its last recorded writer left there.

        What it was cannot be recomputed in its place, so it is left as it is.
        """
        self._hidden.add(key)

    def on_call(
        self, key: OpKey, sources: list[ValueKey], made: list[tuple[torch.Tensor, bool, ValueKey | None]]
    ) -> None:
        """An operator has run.

        Args:
            sources: what it read of what others made that can be recomputed.
            made: a tensor on each storage that now contains something new, whether it has allocated that, and, if it
                has written over something, over what.
        """
        keys: list[ValueKey] = []
        product = sources[0] if self._note_sum(key) and sources else None
        for position, (tensor, new, before) in enumerate(made):
            keys.append((*key, position))
            self._nbytes[keys[-1]] = tensor.untyped_storage().nbytes()
            before = product if before is None else before
            if before is not None:
                self._overwritten.add(before)
                storage = self._storages[before]
            else:
                storage = keys[-1] if new else self._allocated.get(torch_common.storage_key(tensor), keys[-1])
            self._storages[keys[-1]] = storage
        self._calls.append((key, sources, keys))

    def on_save(self, key: ValueKey) -> None:
        """Autograd saves it."""
        self._saved.add(key)

    def finish(self) -> tuple[list[OperatorCall], list[OperatorValue]]:
        """The calls and what they made, in order."""
        calls: list[OperatorCall] = []
        values: list[OperatorValue] = []
        index: dict[ValueKey, int] = {}
        for (name, number), sources, made in self._calls:
            for position, key in enumerate(made):
                index[key] = len(values)
                hidden, made_in = key in self._hidden, self._storages[key]
                storage = (*self._sums.get(made_in[:2], made_in[:2]), made_in[2])
                saved, overwritten = key in self._saved and not hidden, hidden or key in self._overwritten
                values.append(OperatorValue(len(calls), position, storage, saved, overwritten, self._nbytes[key]))
            read, unplanned = dict.fromkeys(index[source] for source in sources), self._sums.get((name, number))
            calls.append(OperatorCall(name, number, tuple(read), tuple(index[key] for key in made), unplanned))
        return calls, values
