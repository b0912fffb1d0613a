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

_aten = torch.ops.aten

IN_PLACE: Final[dict[Any, tuple[Any, frozenset[str]]]] = {
    _aten.index_put.default: (_aten.index_put_.default, frozenset()),
    _aten.index_add.default: (_aten.index_add_.default, frozenset()),
    _aten.scatter.src: (_aten.scatter_.src, frozenset()),
    _aten.scatter_add.default: (_aten.scatter_add_.default, frozenset()),
    _aten.put.default: (_aten.put_.default, frozenset({"TakeBackward0"})),
    _aten.sub.Tensor: (_aten.sub_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
    _aten.mul.Tensor: (_aten.mul_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
    _aten.logical_and.default: (_aten.logical_and_.default, frozenset({"ClampBackward0"})),
    _aten.logical_or.default: (_aten.logical_or_.default, frozenset({"ClampBackward0"})),
}
"""Ops that a node in C++ runs out of place for subclasses only, on a tensor of its own: in place, and in which nodes.

No nodes: in all, on zeros. `index_backward`, `index_select_backward_symint`, `value_selecting_reduction_backward`,
`gather_backward`, `take_backward`, `binary_cross_entropy_with_logits_backward`, `clamp_backward_min_max`
(FunctionsManual.cpp, aten/src/ATen/native/TensorAdvancedIndexing.cpp). A real run has one tensor where a fake one would
have two.
"""


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
    dim = saved_value(node, "dim")
    dim = dim if dim < values.dim() else dim - (1 << 64)  # a negative one is read as unsigned
    if not saved_value(node, "keepdim"):
        gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
    zeros = values.eq(0)
    counts = zeros.sum(dim, True)
    counts.sum()  # allocated to ask whether there is any zero
    return torch.mul(gradient, (result / values).conj())


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


FORMULAS: Final[dict[str, Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "ProdBackward0": _differentiate_product,
    "ProdBackward1": _differentiate_product_of_rows,
    "MaxBackward1": _differentiate_extreme,
    "MinBackward1": _differentiate_extreme,
    "MedianBackward0": _differentiate_extreme,
    "NanmedianBackward0": _differentiate_extreme,
}
"""By name of a node with one input and one gradient."""
