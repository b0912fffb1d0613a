"""Backward formulas as torch computes them for plain tensors.

torch/csrc/autograd/FunctionsManual.cpp asks whether tensors are of a subclass (`areAnyTensorSubclassLike`), as
FakeTensors are, and then writes to no tensor in place and reads no value: another formula, with more memory. Here are
the formulas of plain tensors, for values that no real batch is known to lack: a product has no factor of zero, an
extreme value is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch.autograd import saved_value
from fxmem._torch.common import TORCH_VERSION

_aten = torch.ops.aten

_BCE = frozenset({"BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"})
_COUNTING = frozenset({"ScatterReduceBackward0", "IndexReduceBackward0"})
_PUTTING = frozenset({"IndexPutBackward0", "IndexPutImplBackward0", "UnsafeIndexPutBackward0", "CopySlices"})
"""The gradient of what is written over, with zeros put where it was: a clone (`index_put_`). In a view `CopySlices`
runs it."""
_CLAMP = frozenset({"ClampBackward0"})
_SHARES_TIES = TORCH_VERSION >= (2, 15)
"""Whether `clamp_backward_min_max` halves the gradient where a value equals a bound, as a run of torch 2.15 shows: its
masks are then made out of place for plain tensors, too, and the halves are filled in place. 2.11 does neither; of those
between, none was run."""
IN_PLACE: Final[dict[Any, tuple[Any, frozenset[str], frozenset[str]]]] = {
    _aten.index_put.default: (_aten.index_put_.default, frozenset(), _PUTTING),
    _aten.index_add.default: (_aten.index_add_.default, frozenset(), _COUNTING),
    _aten.scatter.src: (_aten.scatter_.src, frozenset(), frozenset()),
    _aten.scatter_add.default: (_aten.scatter_add_.default, frozenset(), _COUNTING),
    _aten.masked_scatter.default: (_aten.masked_scatter_.default, frozenset({"MaskedSelectBackward0"}), frozenset()),
    _aten.put.default: (_aten.put_.default, frozenset({"TakeBackward0"}), frozenset()),
    _aten.index_fill.int_Tensor: (_aten.index_fill_.int_Tensor, frozenset({"TraceBackward0"}), frozenset()),
    _aten.sub.Tensor: (_aten.sub_.Tensor, _BCE, frozenset()),
    _aten.mul.Tensor: (_aten.mul_.Tensor, _BCE, frozenset()),
}
"""Ops that a node in C++ runs out of place for subclasses only, on a tensor of its own: in place, in which nodes, and
in which never.

No nodes: in all others, on zeros. `index_backward`, `index_select_backward_symint`, `gather_backward`,
`value_selecting_reduction_backward`, `masked_select_backward`, `take_backward`, `trace_backward`,
`binary_cross_entropy_target_backward`, `binary_cross_entropy_with_logits_backward`, `clamp_backward_min_max`
(FunctionsManual.cpp, aten/src/ATen/native/TensorAdvancedIndexing.cpp, TriangularOps.cpp). A real run has one tensor
where a fake one would have two.
"""
if _SHARES_TIES:
    IN_PLACE[_aten.masked_fill.Scalar] = (_aten.masked_fill_.Scalar, _CLAMP, frozenset())
else:
    IN_PLACE[_aten.logical_and.default] = (_aten.logical_and_.default, _CLAMP, frozenset())
    IN_PLACE[_aten.logical_or.default] = (_aten.logical_or_.default, _CLAMP, frozenset())


def _differentiate_product(node: Any, gradient: torch.Tensor) -> torch.Tensor:
    """`prod_backward` of all elements."""
    values, result = saved_value(node, "self"), saved_value(node, "result")
    if values.dim() == 0:
        return gradient
    values.eq(0)  # torch allocates this to look for zeros
    return torch.mul(gradient, (result / values).conj())


def _differentiate_product_of_rows(node: Any, gradient: torch.Tensor) -> torch.Tensor:
    """`prod_backward` along a dimension."""
    values, result = saved_value(node, "self"), saved_value(node, "result")
    if values.dim() == 0:
        return gradient
    dim = _read_dim(node)
    if not saved_value(node, "keepdim"):
        gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
    zeros = values.eq(0)
    counts = zeros.sum(dim, True)
    counts.sum()  # allocated to ask whether there is any zero
    return torch.mul(gradient, (result / values).conj())


def _differentiate_running_product(node: Any, gradient: torch.Tensor) -> torch.Tensor:
    """`cumprod_backward` (ReduceOps.cpp)."""
    values, result, dim = saved_value(node, "self"), saved_value(node, "result"), _read_dim(node)
    if values.numel() <= 1 or values.shape[dim] == 1:
        return gradient
    products = result.conj() * gradient
    zeros = values.eq(0)
    zeros.any()  # allocated to ask whether there is any zero
    first = products.flip(dim)
    sums = first.cumsum(dim)
    backwards = sums.flip(dim)
    del first, sums
    return torch.div(backwards, values.conj())


def _differentiate_masked_fill(node: Any, gradient: torch.Tensor) -> list[torch.Tensor | None]:
    """`masked_fill(mask, value)`, `masked_fill_backward`."""
    mask = saved_value(node, "mask")
    (consumer, _), (of_value, _) = node.next_functions
    filled = None if consumer is None else gradient.masked_fill(mask, 0)
    return [filled, None if of_value is None else gradient.masked_select(mask).sum()]


def _read_dim(node: Any) -> int:
    """The dimension that a node has saved; a negative one is read as unsigned."""
    dim: int = saved_value(node, "dim")
    return dim if dim < 1 << 63 else dim - (1 << 64)


def _differentiate_extreme(node: Any, gradient: torch.Tensor) -> torch.Tensor:
    """`evenly_distribute_backward`: of the largest, smallest or middle element of all."""
    values, result = saved_value(node, "self"), saved_value(node, "result")
    if values.is_cuda:
        missing = values.isnan().logical_and_(result.isnan())
        mask = (values == result).logical_or_(missing)
        return torch.mul(mask, gradient / mask.sum())
    result.isnan()  # allocated to ask whether the extreme is a number
    mask = values == result
    return gradient.new_zeros(values.shape).masked_fill_(mask, gradient / mask.sum())


FORMULAS: Final[dict[str, Callable[[Any, torch.Tensor], torch.Tensor | list[torch.Tensor | None]]]] = {
    "CumprodBackward0": _differentiate_running_product,
    "MaskedFillBackward1": _differentiate_masked_fill,
    "ProdBackward0": _differentiate_product,
    "ProdBackward1": _differentiate_product_of_rows,
    **dict.fromkeys(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _differentiate_extreme),
}
"""By name of a node with one gradient; what it returns, or all that it returns."""
