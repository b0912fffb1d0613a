"""The count of one call: torch's formula, that of the operator's row, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

from torch import Tensor

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
    packet = _packet(func)
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


def is_counted_by_torch(func: OpOverload) -> bool:
    """Whether `FlopCounterMode` counts this op; the sum over such ops is the figure it reports."""
    return _packet(func) in torch_formulas()


@cache
def torch_formulas() -> Mapping[Any, Callable[..., Any]]:
    """The live table of `register_flop_formula`. Its module imports Triton where that is installed, which takes longer
    than all of fxmem."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)  # a higher-order operator has no overloads


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
