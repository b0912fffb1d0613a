"""What a kernel that calls other operators allocates inside one call.

Many operators of torch have one kernel for all devices, written in terms of other operators
(CompositeExplicitAutograd): `logsumexp`, `linalg_pinv`, `mul.Scalar`. FakeTensorMode runs them as one, and so their
temporaries are not seen. Here such a kernel runs once more on FakeTensors, and every inner operator's results and
hidden memory become the op's hidden memory, in order.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem.errors import forget_frames
from fxmem.hardware.hidden_memory import HiddenEvent, HiddenMemory, alloc, free, output
from fxmem.hardware.operators import find_operator
from fxmem.simulation.kernels.fake_kernels import run_kernel

Look = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], HiddenMemory | None]
"""`(op, args, kwargs, result)` -> what a call hides."""


def inner_memory(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: torch_common.FakeTensorMode,
    device_type: str,
    look: Look,
) -> HiddenMemory | None:
    """What a kernel that calls other operators allocates beside its results; None for nothing, or for another kernel.

    Args:
        func: the operator, called with these arguments.
        fakes: the mode of the tensors among them.
        device_type: where allocations count.
        look: what an inner call hides.
    """
    row = find_operator(str(func))
    is_opaque = row is not None and row.is_opaque
    kernel = None if is_opaque else torch_common.explicit_kernel(func, device_type)
    if kernel is None:
        return None
    inside = _InnerOps(fakes, device_type, look, (args, kwargs))
    try:
        with inside:
            result = kernel(*args, **kwargs)
    except (RuntimeError, *torch_common.DATA_DEPENDENT) as error:
        # The op itself has run on fakes; what its kernel asks besides is an unknown and no error of the program's.
        forget_frames(error)
        return HiddenMemory(events=(output("result"), alloc("temporaries that depend on the data", None)))
    events = inside.finish(result)
    return None if all(event.action == "output" for event in events) else HiddenMemory(events=events)


class _InnerOps(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on FakeTensors and lists what is allocated and freed meanwhile."""

    is_of_program = False

    def __init__(self, fakes: torch_common.FakeTensorMode, device_type: str, look: Look, given: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self._device_type = device_type
        self._look = look
        self._watched: dict[int, weakref.ref[Any] | None] = dict.fromkeys(
            map(torch_common.storage_address, self._storages(given))
        )
        self._events: list[HiddenEvent] = []
        self._names: dict[int, str] = {}
        """By address, of storages allocated here that are alive."""
        self._given_names: Counter[str] = Counter()
        self._open = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_fakes.DEVICE_OF:
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch_common.is_composite(func):
            with self:
                return torch_common.decompose(func, *args, **kwargs)
        kernel = torch_common.explicit_kernel(func, self._device_type) if torch_common.is_mutable(func) else None
        if kernel is not None:
            with self:
                return kernel(*args, **kwargs)  # it resizes its `out=` argument, somewhere in its midst
        result = run_kernel(self._fakes, func, args, kwargs)
        hidden = self._look(func, args, kwargs, result)
        inside = () if hidden is None else hidden.events
        fresh = iter(list(self._note(func, result)))
        alive: dict[str, str] = {}
        for event in inside:
            if event.action == "output":
                self._events += [made] if (made := next(fresh, None)) else []
            elif event.action == "alloc":
                alive[event.name] = self._unique(event.name)
                self._events.append(event.model_copy(update={"name": alive[event.name]}))
            else:
                self._events += free(alive.pop(event.name))
        self._events += [*fresh, *free(*alive.values())]
        return result

    def finish(self, result: Any) -> tuple[HiddenEvent, ...]:
        """The events, the results' allocations as outputs; nothing is noted any more."""
        self._open = False
        outputs = {self._names.get(torch_common.storage_address(each)) for each in self._storages(result)}
        return tuple(
            output(event.name) if event.action == "alloc" and event.name in outputs else event
            for event in self._events
            if not (event.action == "free" and event.name in outputs)
        )

    def _unique(self, name: str) -> str:
        self._given_names[name] += 1
        return name if self._given_names[name] == 1 else f"{name} ({self._given_names[name]})"

    def _storages(self, values: Any) -> Iterable[Any]:
        for tensor in torch_common.iterate_tensors(values):
            if tensor.layout is torch.strided and torch_common.device_type(tensor) == self._device_type:
                yield tensor.untyped_storage()

    def _note(self, func: Any, result: Any) -> Iterable[HiddenEvent]:
        """The allocations of a call's fresh results, which are watched from now on."""
        for storage in self._storages(result):
            address = torch_common.storage_address(storage)
            if address in self._watched or not storage.nbytes():
                continue
            self._names[address] = name = self._unique(f"result of {torch_common.op_name(func)}")

            def gone(_: Any, address: int = address, name: str = name) -> None:
                self._watched.pop(address, None)
                if self._open:
                    del self._names[address]
                    self._events += free(name)

            self._watched[address] = weakref.ref(storage, gone)
            yield alloc(name, storage.nbytes())


# --- operators that run as others: their kernels call these, and allocate nothing else --------------------------------
# The recorder sees the inner operators one by one, as those of what the dispatcher itself takes apart. Where a kernel
# depends on values, these have to be known.


aten = torch.ops.aten
Kernel = Callable[..., Any]
Answer = Callable[[Any, tuple[Any, ...]], Any]
"""What an operator that depends on values is answered, with these arguments."""

COMPOSITES: Final[dict[Any, Kernel]] = {}
"""By operator: `kernel(answer, operator, *args, **kwargs)`, which leaves a call to others by NotImplemented."""
IN_PYTHON: Final[set[str]] = {"xformers_flash"}
"""Namespaces of operators whose kernels on a card are in Python: a package defines them so, and calls others."""


def find_kernel(func: Any) -> Kernel | None:
    """The kernel of an operator that runs as others."""
    if (kernel := COMPOSITES.get(func)) is not None or getattr(func, "namespace", "") not in IN_PYTHON:
        return kernel
    run = torch_common.python_kernel(func)
    return None if run is None else functools.partial(_run_on_card, run)


def _run_on_card(run: Kernel, _: Answer, __: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = torch_common.iterate_tensors((args, kwargs))
    return run(*args, **kwargs) if any(each.is_cuda for each in tensors) else NotImplemented


def composes(names: str) -> Callable[[Kernel], Kernel]:
    """Register a kernel for these operators of ATen, each with its overload, where that is not the default one."""

    def register(kernel: Kernel) -> Kernel:
        for name in names.split():
            packet, _, overload = name.partition(".")
            COMPOSITES[getattr(getattr(aten, packet), overload or "default")] = kernel
        return kernel

    return register


@composes("_pack_padded_sequence")
def _pack(_: Answer, func: Any, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """`_pack_padded_sequence` (PackedSequence.cpp) reads the lengths, and copies what is there of each step."""
    kernel = torch_common.explicit_kernel(func, "cpu")
    if kernel is None or isinstance(lengths, torch_common.FakeTensor):
        return NotImplemented
    return kernel(padded, lengths, batch_first)


@composes("_new_zeros_with_same_feature_meta")
def _zeros_like_tangent(
    _: Answer, func: Any, tangent: torch.Tensor, primal: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """`_new_zeros_with_same_feature_meta` (AutogradComposite.cpp): a storage like that of what it is the tangent of,
    for each of the batch. FakeTensorMode's cache forgets where in it the tensor begins (as of 2.11)."""
    batch, each = tangent.shape[:self_num_batch_dims], primal.untyped_storage().nbytes() // primal.element_size()
    strides = [each * math.prod(batch[place + 1 :]) for place in range(len(batch))]
    made = tangent.new_zeros(math.prod(batch) * each)
    return made.as_strided((*batch, *primal.shape), (*strides, *primal.stride()), primal.storage_offset())


@composes("_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine")
def _quantize_learnable(
    _: Answer, func: Any, source: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """`_fake_quantize_learnable_per_tensor_affine` (quantized/FakeQuantPerTensorAffine.cpp): the values, and a mask
    that is dropped; of channels, their zero points as whole numbers."""
    rounded = _round_zeros(func, zero)
    made, mask = torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)
    del mask, rounded
    return made


@composes("_fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_learnable_per_channel_affine_backward")
def _quantize_learnable_backward(
    _: Answer,
    func: Any,
    gradient: torch.Tensor,
    source: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of scale and zero point are computed for each value, then summed, along a channel where there are
    several (in the same files, and FakeQuantPerChannelAffine.cpp)."""
    rounded = _round_zeros(func, zero)
    made, of_scale, of_zero = (torch.empty_like(source) for _ in range(3))
    if rounded is None:
        return made, of_scale.sum().unsqueeze(0), of_zero.sum().unsqueeze(0)
    others = [each for each in range(source.dim()) if each != rest[0]]
    return made, of_scale.sum(others), of_zero.sum(others)


def _round_zeros(func: Any, zero: torch.Tensor) -> torch.Tensor | None:
    return torch.empty_like(zero, dtype=torch.int32) if "channel" in func.name() else None
