"""Floating-point operations of one ATen call, of forward and backward ops alike.

What is counted, for an op as a dispatch mode below autograd sees it:

* One multiply-add is two operations. Where torch's own registry (`torch.utils.flop_counter`) has a formula it is used
  as it is: matrix products, convolutions and attention agree with `FlopCounterMode` to the last digit. So the bias
  added inside `addmm` or a convolution and the softmax inside fused attention are left out, and products with padding
  or with scores that a mask hides are counted. One formula of torch's is wrong and not used: that of a convolution's
  backward multiplies the weight's gradient by the number of groups (32 channels of their own: 32 times too much). Here
  the gradients of input and weight cost what the forward costs, each.
* Elsewhere, the operations of the op's definition. A scalar factor that is exactly 1 costs nothing. Of the branches of
  a piecewise definition the longest counts. The larger or smaller of two values is one operation, hence `relu` and each
  place of a max pool.
* A function of C's `math.h` (`exp`, `sqrt`, `tanh`, `erf`, `pow`, …) is one operation. How many instructions it takes
  differs between machines and libraries, so a count that means the same everywhere can only count the call.
* The sum of n numbers is n operations, not n - 1, as it is for multiply-adds.
* Zero: moving, viewing, creating, selecting, ordering and converting numbers, drawing random ones, and arithmetic on
  integers and booleans, comparisons included. Complex numbers count what their real and imaginary parts cost.
* None, never 0: an op that computes and has no count in its row (`fxmem.hardware.operators`), where `uncounted` says
  why it was left out on purpose.

Composite ops (`aten.linear`, `aten.matmul`, …) reach a dispatch mode only under `torch.inference_mode`; they are None
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem._torch.common import OpOverload, OpOverloadPacket, op_arguments
from fxmem.hardware.operators import OPERATORS, NamedCall, Operator
from fxmem.hardware.tensor_layouts import TensorLayout

Formula: TypeAlias = Callable[..., int | None]
"""Called with the op's own arguments and its result, `formula(*args, out_val=out, **kwargs)`; returns FLOPs, None for
unknown."""


def op_flops(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    *,
    extra: Mapping[OpOverloadPacket, Formula] | None = None,
) -> int | None:
    """Floating-point operations of the call `out = func(*args, **kwargs)`; None when it computes and has no formula.

    Reads shapes, dtypes and plain numbers only, so tensors may be fake. `extra` maps op packets
    (`torch.ops.mylib.attention`) to formulas and goes before every other rule; formulas given to
    `torch.utils.flop_counter.register_flop_formula` are honoured too. Whatever a formula of `extra` raises is passed
    on.
    """
    packet: Any = getattr(func, "overloadpacket", func)  # a higher-order operator has no overloads
    if extra is not None and packet in extra:
        return extra[packet](*args, **kwargs, out_val=out)
    row = find_row(func)
    if not (row is not None and row.corrects_torch) and packet in (registered := torch_formulas()):
        # torch's formulas refuse some calls they are registered for: grouped-query heads, `bmm.dtype`.
        with suppress(AssertionError, TypeError):
            return int(registered[packet](*args, **kwargs, out_val=out))
    if row is None or row.flops == 0:
        return None if row is None else 0
    result = out if _tensors_among(out) else args[0] if args else None  # in-place foreach and fused ops return nothing
    if not (tensors := _tensors_among(result)):
        return None
    dtype = tensors[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0
    each = row.complex if dtype.is_complex else 1
    return None if each is None else each * row.count(_call(func, args, kwargs, result))


@cache
def torch_formulas() -> Mapping[Any, Callable[..., Any]]:
    """The live table of `register_flop_formula`. Its module imports Triton where that is installed, which takes longer
    than all of fxmem."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


@cache
def find_row(func: Any) -> Operator | None:
    """The row that counts it: its own, or for `aten::_foreach_add_.Scalar` and `aten::add_.Tensor` that of `add`.

    A name outside aten keeps its namespace.
    """
    name: str = func.name().partition(".")[0].removeprefix("aten::")
    rows = (OPERATORS.get(each) for each in (name, name.removeprefix("_foreach_").removesuffix("_")))
    return next((row for row in rows if row is not None and row.flops is not None), None)


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> NamedCall:
    schema = op_arguments(func)
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    counts = {"read": _count_elements(named[schema[0].name]), "made": _count_elements(result)}
    return NamedCall(named | counts | {"result": result}, _layouts)


def _layouts(value: Any) -> Any:
    """The same with layouts for tensors, of which strides are left out: sparse tensors have none."""
    if isinstance(value, Tensor):
        return TensorLayout(shape=tuple(value.shape), stride=(), dtype=str(value.dtype)[6:])
    if isinstance(value, list | tuple):
        return type(value)(map(_layouts, value)) if type(value) in (list, tuple) else value
    return value


def _tensors_among(value: Any) -> list[Tensor]:
    """The tensors of a call's argument or result: itself, or those in its tuple or list."""
    return [t for t in (value if isinstance(value, list | tuple) else (value,)) if isinstance(t, Tensor)]


def _count_elements(value: Any) -> int:
    """Elements of a tensor, of a tuple's first tensor, or of a list's floating-point tensors. A tuple's first is the
    main result; a list comes from a foreach operator."""
    tensors = _tensors_among(value)
    if isinstance(value, list):
        return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    return tensors[0].numel() if tensors else 0


# --- bytes that an op reads and writes --------------------------------------------------------------------------------
# What its kernel moves between the card's memory and its multiprocessors.


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes that the call `out = func(*args, **kwargs)` reads and writes: each argument once, a repeated element once.

    Args:
        func: the operator. Views, and what only allocates, move nothing.
        args: its arguments; their shapes and strides are looked at, so tensors may be fake.
        kwargs: the same, by keyword.
        out: its result.
    """
    name = torch_common.op_name(func)
    row = find_row(func)
    traffic = None if row is None else row.traffic
    # A tensor that is given twice counts twice: a call that looks the same may be given two.
    given = list(torch_common.iterate_tensors((args, kwargs)))
    writes = torch_common.is_mutable(func)
    storages = {_storage(tensor) for tensor in given}
    made = [tensor for tensor in _tensors(out) if writes or _storage(tensor) not in storages]
    if (not made and not writes) or "empty" in name:
        return 0
    if traffic == "picks":
        return 2 * _size(made) + _size(given[1:])
    if traffic == "puts" and name.endswith("_"):
        return _size(given[1:]) + 2 * _size(given[-1:])
    read = given
    if writes:
        changed = torch_common.list_written(func, args, kwargs)
        made = _tensors([changed, made])
        read = given[len(changed) :] if traffic == "overwrites" and name.endswith("_") else given
    return _size(read) + _size(made) + _reread(func, name, args, given, made)


def host_bytes(name: str, args: Sequence[Any], out: Any) -> int:
    """Bytes that the call copies between the card and the host's memory.

    Args:
        name: the operator's qualified overload.
        args: its arguments.
        out: its result.
    """
    if not name.startswith(("aten.copy_.", "aten._to_copy.")):
        return 0
    given = args[name.startswith("aten.copy_.")]
    if not (isinstance(given, torch.Tensor) and isinstance(out, torch.Tensor)) or given.device.type == out.device.type:
        return 0
    return _nbytes(out) if "cpu" in (given.device.type, out.device.type) else 0


def _reread(
    func: Any, name: str, args: Sequence[Any], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> int:
    """What a batch norm reads twice: statistics of the batch need its whole input before the first result. One that is
    taken to parts (`SyncBatchNorm`) makes either statistics or the result."""
    if "batch_norm" not in name or len(made) == 1 or all(tensor.shape != given[0].shape for tensor in made):
        return 0
    flags = [i for i, argument in enumerate(torch_common.op_arguments(func)) if argument.name in ("training", "train")]
    if not all(args[i] for i in flags if i < len(args)):
        return 0
    return _size([tensor for tensor in given if tensor.shape == given[0].shape])


def size_of_tensors(value: Any) -> int:
    """Bytes of the tensors in a value, each once."""
    return _size(_tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, each once."""
    return list({id(tensor): tensor for tensor in torch_common.iterate_tensors(value)}.values())


def _storage(tensor: torch.Tensor) -> int:
    return torch_common.storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements; those that a stride of 0 repeats count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
