"""The count of one call: torch's formula, ours, nothing, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias

from fxmem._torch.common import OpOverload, OpOverloadPacket, op_arguments
from fxmem.simulation.flops.formulas import count_elements, tensors_among
from fxmem.simulation.flops.tables import COMPLEX, CORRECTED, FORMULAS, NO_ARITHMETIC

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
    name = _base_name(func)
    if name not in CORRECTED and packet in (registered := torch_formulas()):
        # torch's formulas refuse some calls they are registered for: grouped-query heads, `bmm.dtype`.
        with suppress(AssertionError, TypeError):
            return int(registered[packet](*args, **kwargs, out_val=out))
    if name in NO_ARITHMETIC:
        return 0
    formula = FORMULAS.get(name)
    result = out if tensors_among(out) else args[0] if args else None  # in-place foreach and fused ops return nothing
    if formula is None or not tensors_among(result):
        return None
    dtype = tensors_among(result)[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0
    each = COMPLEX.get(name) if dtype.is_complex else 1
    return None if each is None else each * formula(_call(func, args, kwargs, result))


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


def _base_name(func: Any) -> str:
    """`aten::_foreach_add_.Scalar` and `aten::add_.Tensor` are both `add`; a name outside aten keeps its namespace."""
    name: str = func.name().partition(".")[0]
    return (
        name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_") if name.startswith("aten::") else name
    )


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> SimpleNamespace:
    """The arguments by their names in the schema, and the result. `read`: elements of the first argument; `made`: of
    the result."""
    schema = op_arguments(func)
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    return SimpleNamespace(
        **(named | {"read": count_elements(named[schema[0].name]), "made": count_elements(result), "result": result})
    )
