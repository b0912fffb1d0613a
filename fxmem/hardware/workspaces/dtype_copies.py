"""Copies of operands in another dtype: kernels compute in one dtype only.

A card's elementwise kernels convert number by number; the CPU's copy an operand first. Sums are taken over a copy in
the result's dtype on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxmem.hardware.workspaces.hidden_memory import HiddenMemory, alloc, output
from fxmem.hardware.workspaces.other_kernels import is_tensor
from fxmem.hardware.workspaces.tensor_layouts import ITEM_BYTES, TensorLayout, read_layout

PROMOTING = frozenset({
    "add", "sub", "rsub", "mul", "div", "pow", "atan2", "maximum", "minimum", "fmax", "fmin", "fmod", "remainder",
    "hypot", "eq", "ne", "lt", "le", "gt", "ge", "logaddexp", "logaddexp2", "xlogy", "nextafter", "copysign",
    "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "lerp", "addcmul", "addcdiv",
})  # fmt: skip
"""Elementwise operators of several tensors, without `aten.` and overload, that compute in a common dtype."""

SUMMING = frozenset({"sum", "nansum", "prod", "mean", "cumsum", "cumprod"})
"""Operators that read their input in the dtype of the result (`make_reduction`, ReduceOpsUtils.h; `cumsum`,
ReduceOps.cpp)."""

_HALF = ("float16", "bfloat16")


def operand_copies(args: Sequence[Any]) -> HiddenMemory | None:
    """What an operator of `PROMOTING` copies on the CPU: operands of another dtype than the common one.

    `TensorIteratorBase::compute_types` (aten/src/ATen/TensorIterator.cpp): before the result is allocated, and until
    the call returns. Single numbers are left out.
    """
    operands = [layout for layout in map(read_layout, filter(is_tensor, args)) if layout.rank]
    if len({layout.dtype for layout in operands}) < 2:
        return None
    common = _common_dtype([layout.dtype for layout in operands])
    copies = (layout.numel * ITEM_BYTES[common] for layout in operands if layout.dtype != common)
    events = (alloc(f"operand in {common} ({number})", nbytes) for number, nbytes in enumerate(copies, 1))
    return HiddenMemory(events=(*events, output("result")), source="aten/src/ATen/TensorIterator.cpp")


def add_input_copy(
    args: Sequence[Any], result: Any, memory: HiddenMemory | None, *, on_card: bool = False
) -> HiddenMemory | None:
    """What an operator of `SUMMING` hides, the copy of its input included.

    Args:
        result: what the call returned.
        memory: what else it hides; None for nothing.
        on_card: whether a card computes it, whose kernels sum half precision in float32 without a copy.
    """
    source = converted_input(args, result, on_card=on_card)
    if source == (given := read_layout(args[0])) or given.rank == 0:
        return memory
    rest = [event for event in memory.events if event.action != "output"] if memory is not None else []
    events = (output("result"), alloc(f"input in {source.dtype}", source.nbytes), *rest)
    return HiddenMemory(events=events, source="aten/src/ATen/native/ReduceOpsUtils.h")


def converted_input(args: Sequence[Any], result: Any, *, on_card: bool) -> TensorLayout:
    """The tensor that an operator of `SUMMING` sums: its input, or a copy of it."""
    source, made = read_layout(args[0]), read_layout(result)
    if source.dtype == made.dtype or (on_card and source.dtype in _HALF and made.dtype == "float32"):
        return source
    return source.model_copy(update={"dtype": made.dtype})


def _common_dtype(dtypes: Sequence[str]) -> str:
    """`torch.promote_types` of them all."""

    def rank(dtype: str) -> tuple[int, int]:
        kind = 3 if "complex" in dtype else 2 if "float" in dtype else 0 if dtype == "bool" else 1
        return kind, ITEM_BYTES[dtype]

    highest = max(dtypes, key=rank)
    return "float32" if set(_HALF) <= set(dtypes) and ITEM_BYTES[highest] == 2 else highest
