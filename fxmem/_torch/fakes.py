"""Describe and make FakeTensors without FakeTensorMode's dispatch. A call of that takes as long as several kernels.

A FakeTensor is a tensor on meta in a Python subclass that knows which device it stands for. Private names used here:
`Tensor._make_subclass` (since 1.7) and `torch._C._set_throw_on_mutable_data_ptr`,
`_set_warn_deprecated_on_mutable_data_ptr` (since 2.4), as `FakeTensor.__new__` uses them;
`torch._C._DisableTorchDispatch` (since 1.12), as FakeTensorMode does around kernels; `torch._C._dispatch_keys` (since
1.13); `FakeTensorMode.fake_tensor_converter` and its `from_real_tensor` (since 1.13), and what it remembers,
`MetaConverter.describer` and `storage_memo` among it (since 2.4), for numbers; `torch._C._swap_tensor_impl` and
`Tensor._use_count` (since 2.2), as `torch.utils.swap_tensors` uses them.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from fxmem._torch.common import FakeTensor, FakeTensorMode, OpOverload, nested, storage_key, wrap

DEVICE_OF: Final[Any] = torch.ops.prim.device.default
"""What C++ calls to ask a FakeTensor for its device."""

NUMBER_OF: Final[Any] = torch.ops.aten._local_scalar_dense.default
"""What `Tensor.item` ends in."""

NEW_NUMBER: Final[Any] = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` ends in."""

_shared_tables: dict[Hashable, dict[Any, Any]] = {}
_CONTEXTS, _CALLS = 4, 50_000

_META, _CPU = torch.device("meta"), torch.device("cpu")
_PLAIN: Final = frozenset(
    {int, float, bool, str, complex, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device}
)
_SINGLE_OR_HALF: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_no_dispatch: Final[Any] = torch._C._DisableTorchDispatch
_keys: Final[Any] = torch._C._dispatch_keys
_subclass: Final[Any] = torch.Tensor._make_subclass
_NOT_OF_METADATA: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})


def is_function_of_metadata(func: Any) -> bool:
    """Whether an operator's result on fake tensors without values follows from metadata and other arguments.

    FakeTensorMode's own rules for what it caches (`_validate_cache_key` in torch/_subclasses/fake_tensor.py); operators
    that write to `out=` arguments, which they may resize, are excluded as well.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten" or not _NOT_OF_METADATA.isdisjoint(func.tags):
        return False
    if torch.Tag.dynamic_output_shape in func.tags and func is not torch.ops.aten.index.Tensor:
        return False
    return not any(argument.is_out for argument in func._schema.arguments)


def sees_no_values(func: Any) -> bool:
    """Whether an operator's result on fake tensors is the same whatever is known of its arguments' values: a view, or
    one number of each number, and it writes to no argument."""
    is_pure = isinstance(func, OpOverload) and not func._schema.is_mutable
    return is_pure and (func.is_view or torch.Tag.pointwise in func.tags)


def describe(
    values: Iterable[Any],
    mode: FakeTensorMode,
    unless: str | None,
    key: list[Any],
    tensors: list[torch.Tensor],
    *,
    of_offset: bool = True,
) -> bool:
    """Append to `key` all that a fake kernel sees of these arguments. Append the tensors among them to `tensors`, in
    order. Where it matters to nothing, the offset of views is left out.

    False if metadata do not determine them: a tensor that is not this mode's, or is sparse, or knows its values
    (FakeTensor's own `constant`, or an attribute named `unless`, where that matters), or an argument of another kind.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            state = value.__dict__
            if state["constant"] is not None or unless in state or state["fake_mode"] is not mode:
                return False
            if value.layout is not torch.strided:
                return False
            tensors.append(value)
            keys = _keys(value).raw_repr()
            key += (value.shape, value.stride(), value.dtype, value.fake_device, keys)
            key += (value.storage_offset(),) * of_offset
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not describe(value, mode, unless, key, tensors, of_offset=of_offset):
                return False
        else:
            return False
    return True


def shared_tables(context: Hashable) -> dict[Any, Any]:
    """By operator, what this process has learnt about its fake kernel under `context`: whatever else its results depend
    on.

    For the caller to fill; forgotten with time (of four contexts, of 50,000 calls) and by `forget`.
    """
    known = _shared_tables.pop(context, None)
    if known is None or sum(len(calls or ()) for calls in known.values()) > _CALLS:
        known = {}
    _shared_tables[context] = known
    for old in list(_shared_tables)[:-_CONTEXTS]:
        del _shared_tables[old]
    return known


def forget(ops: Iterable[Any]) -> None:
    """These operators' fake kernels are others from here on."""
    for op in ops:
        for known in _shared_tables.values():
            known.pop(op, None)


def fakes_have_addresses() -> AbstractContextManager[None]:
    """Let each fake storage have an address of its own. By these libraries find tied weights, and `nn.LSTM` whether it
    may lay its weights into one block.

    It is 0 for all of them, as they are on meta (`UntypedStorage._cdata` tells them apart, since 1.0). Addresses are
    multiples of 512 bytes, as a card's are.
    """

    def storage_pointer(original: Callable[[Any], int], storage: Any) -> int:
        return int(storage._cdata) << 9 if storage.device.type == "meta" else original(storage)

    def pointer(original: Callable[[Any], int], tensor: Any) -> int:
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        return int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size())

    return nested(wrap(torch.UntypedStorage, "data_ptr", storage_pointer), wrap(torch.Tensor, "data_ptr", pointer))


def observe_twins(mode: FakeTensorMode, see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Call `see` with each real tensor that the mode turns into a fake, and with that fake."""

    def convert(
        original: Callable[..., Any], fakes: FakeTensorMode, real: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        fake = original(fakes, real, *args, **kwargs)
        see(real, fake)
        return fake

    converter: Any = mode.fake_tensor_converter
    converter.from_real_tensor = functools.partial(convert, converter.from_real_tensor)


class Maker:
    """Makes FakeTensors of one mode, equal to those that the mode itself makes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._protect = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if mode._allow_unsafe_data_ptr_access
            else torch._C._set_throw_on_mutable_data_ptr
        )
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        """`torch.empty_strided`."""
        with _no_dispatch():
            return self._wrap(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)

    def view(
        self,
        base: torch.Tensor,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        """A tensor in the storage of `base`, as an operator below autograd returns it."""
        storage = base.untyped_storage()
        with _no_dispatch():
            inside = torch.empty(0, dtype=dtype, device=_META)
            inside.set_(storage, offset, shape, stride)
            return self._wrap(inside, device)

    def grow(
        self, tensor: torch.Tensor, nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        """Let a fake tensor have another shape, in its own storage, which has so many bytes from here on.

        Whoever has the tensor has the larger one (`torch._C._swap_tensor_impl`, since 2.3).
        """
        storage, device = tensor.untyped_storage(), tensor.device
        with _no_dispatch():
            if storage.nbytes() != nbytes:
                torch._C.StorageBase.resize_(storage, nbytes)  # type: ignore[attr-defined]
        torch._C._swap_tensor_impl(tensor, self.view(tensor, shape, stride, offset, tensor.dtype, device))

    def number(self, real: torch.Tensor) -> FakeTensor | None:
        """What FakeTensorMode makes of `torch.tensor(0.5)`: a fake that knows its value and is known by it to whatever
        FakeTensorMode computes from it (`lift_fns` in `_dispatch_impl`, torch/_subclasses/fake_tensor.py). None of what
        is not one number in single or half precision on the CPU, or an empty list of them.

        torch.optim makes one for each parameter: 0.2 of the 3.1 s of an 80-layer Llama went there. Caches of keys and
        values begin with empty lists.
        """
        converter = self._mode.fake_tensor_converter
        memo = converter.meta_converter
        if (
            type(real) is not torch.Tensor
            or (real.dim() and real.shape != (0,))
            or real.device != _CPU
            or real.dtype not in _SINGLE_OR_HALF
            or real.requires_grad
            or real.is_neg()
            or not real.untyped_storage().resizable()
        ):
            return None  # of the last kind is a number in memory that torch did not allocate
        if memo.copy_data or not hasattr(memo, "storage_memo"):
            return None
        with _no_dispatch():
            clone = real.clone()
            fake = self._wrap(torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META), _CPU)
            memo.storage_memo[memo.describer.get_storage_id(clone.untyped_storage())] = fake.untyped_storage()
            fake.constant = clone
            converter.set_tensor_memo(clone, fake)
            converter.add_constant_storage_mapping(fake)
        return fake

    def _wrap(self, inside: torch.Tensor, device: torch.device) -> FakeTensor:
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = dict(vars(FakeTensor(self._mode, inside, device)))
        fake: FakeTensor = _subclass(FakeTensor, inside, False, dispatch_device=True, device_for_backend_keys=device)
        self._protect(fake)
        fake.__dict__.update(attributes)
        return fake


def as_parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """`nn.Parameter(tensor)` for a new tensor; of a subclass of Tensor, it is that tensor with a mark
    (`Parameter.__new__`, since 1.13)."""
    if type(tensor) is not FakeTensor:
        return torch.nn.Parameter(tensor, requires_grad)
    tensor._is_param = True
    return tensor.requires_grad_(requires_grad)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether nothing but their identity tells two FakeTensors apart."""

    def describe_all(tensor: torch.Tensor) -> tuple[Any, ...]:
        sizes = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
        return *sizes, type(tensor), tensor.dtype, tensor.layout, tensor.requires_grad, _keys(tensor).raw_repr()

    def describe_state(tensor: torch.Tensor) -> dict[str, Any]:
        constant = repr(constant_number(tensor) if tensor.numel() else None)  # two NaNs are the same here
        return {**vars(tensor), "constant": constant}

    return describe_all(a) == describe_all(b) and describe_state(a) == describe_state(b)


def constant_number(tensor: Any) -> Any:
    """The number a FakeTensor that stands for a constant holds; None for any other tensor (`FakeTensor.constant`, since
    1.13)."""
    constant = tensor.constant if isinstance(tensor, FakeTensor) else None
    if constant is None:
        return None
    with _no_dispatch():
        return constant.item()


def group_tensors(
    original: Callable[..., Any], lists: list[list[torch.Tensor | None]], with_indices: bool = False
) -> Any:
    """A `torch._C._group_tensors_by_device_and_dtype` that asks FakeTensors in Python for their devices.

    C++, which `original` is, asks by an operator each time, twelve times a parameter for Adam.

    Only where there is one group, numbers on the CPU among it; of several, C++ knows the order.
    """
    first = lists[0][0] if lists and lists[0] else None
    if type(first) is not FakeTensor:
        return original(lists, with_indices)
    device, dtype, count = first.fake_device, first.dtype, len(lists[0])

    def is_like(tensor: torch.Tensor | None, device: torch.device, dtype: torch.dtype) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_device == device and tensor.dtype is dtype

    for tensors in lists:
        others = [each for each in tensors if not is_like(each, device, dtype)]
        are_numbers = tensors is not lists[0] and all(is_like(each, _CPU, torch.float32) for each in others)
        if len(tensors) not in (0, count) or (others and not are_numbers):
            return original(lists, with_indices)
    return {(device, dtype): ([list(tensors) for tensors in lists], list(range(count)) if with_indices else [])}


def group_in_python() -> AbstractContextManager[None]:
    """Inside, optimizers group FakeTensors without operators (`torch._C._group_tensors_by_device_and_dtype`, since
    2.1)."""
    return wrap(torch._C, "_group_tensors_by_device_and_dtype", group_tensors)


def make_swap(original: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Make a `torch.utils.swap_tensors` that accepts fakes to which their mode alone refers weakly. `Module.to` moves
    fake parameters with it.

    A module that a program moves to where it is stays untouched, as real parameters do.
    """

    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        fakes = type(t1) is FakeTensor and type(t2) is FakeTensor
        if fakes and storage_key(t1) == storage_key(t2):
            return
        # The graph holds it as well: its gradient would go to the other.
        if not fakes or t1._use_count() > 1:  # type: ignore[attr-defined]
            original(t1, t2)
            return
        t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
        torch._C._swap_tensor_impl(t1, t2)

    return swap
