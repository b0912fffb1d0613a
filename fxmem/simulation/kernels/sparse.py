"""Operators on sparse tensors (COO), written as their kernels are: of other operators, on indices and values.

A sparse tensor's memory is that of its indices and its values; torch's kernels for FakeTensors know few operators of
them. Here each runs as others, which the recorder sees one by one. Sources: SparseTensor.cpp, SparseTensorMath.cpp,
cuda/SparseCUDATensor.cu and cuda/SparseCUDATensorMath.cu in aten/src/ATen/native/sparse.

How many indices are distinct follows from their values, where these are known.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.asked import known_values
from fxmem.simulation.kernels.fake_kernels import answers
from fxmem.simulation.kernels.inner_ops import Answer, Kernel, composes

aten = torch.ops.aten
parts = torch_wrappers.sparse_parts


def _of_sparse(kernel: Kernel) -> Kernel:
    """Leave calls whose first tensor is dense to others."""

    @functools.wraps(kernel)
    def run(answer: Answer, func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(answer, func, tensor, *args, **kwargs) if torch_wrappers.is_sparse(tensor) else NotImplemented

    return run


def _make(indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool | None = None) -> Tensor:
    """A sparse tensor of these parts, which it shares; of the shape of `like`."""
    is_coalesced = torch_wrappers.is_coalesced(like) if coalesced is None else coalesced
    return torch_wrappers.make_sparse(indices, values, tuple(like.shape), coalesced=is_coalesced)


# --- what allocates nothing -------------------------------------------------------------------------------------------


@composes("_sparse_coo_tensor_with_dims_and_tensors")
def _construct(
    _: Answer, func: Any, sparse: int, dense: int, size: Any, indices: Tensor, values: Tensor, **kwargs: Any
) -> Tensor:
    return torch_wrappers.make_sparse(indices, values, tuple(size), coalesced=bool(kwargs.get("is_coalesced")))


@composes("is_coalesced")
@_of_sparse
def _is_coalesced(_: Answer, func: Any, tensor: Tensor) -> bool:
    return torch_wrappers.is_coalesced(tensor)


@composes("_coalesced_")
@_of_sparse
def _set_coalesced(_: Answer, func: Any, tensor: Tensor, coalesced: bool) -> Tensor:
    torch_wrappers.set_sparse_parts(tensor, *parts(tensor), coalesced=coalesced)
    return tensor


@composes("_nnz")
@_of_sparse
def _count_places(_: Answer, func: Any, tensor: Tensor) -> int:
    return parts(tensor)[0].shape[1]


@composes("_indices indices")
@_of_sparse
def _indices(_: Answer, func: Any, tensor: Tensor) -> Any:
    return aten.alias.default(parts(tensor)[0])


@composes("_values values")
@_of_sparse
def _values(_: Answer, func: Any, tensor: Tensor) -> Any:
    return aten.alias.default(parts(tensor)[1])


@composes("detach alias")
@_of_sparse
def _share(_: Answer, func: Any, tensor: Tensor) -> Any:
    return _make(*parts(tensor), tensor)


# --- copies, and what is done to each value ---------------------------------------------------------------------------


@composes("clone _to_copy neg abs sqrt pow.Tensor_Scalar mul.Scalar div.Scalar")
@_of_sparse
def _on_values(_: Answer, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`clone_sparse`, `neg_out_sparse`, `mul_out_sparse_zerodim`: copied indices, and new values."""
    indices, values = parts(tensor)
    moved = {"device": kwargs["device"]} if kwargs.get("device") is not None else {}
    for option in ("memory_format", "layout"):
        kwargs.pop(option, None)
    copied = aten._to_copy.default(indices, **moved) if moved else indices.clone()
    return _make(copied, func(values, *args, **kwargs), tensor)


@composes("mul_.Scalar div_.Scalar neg_")
@_of_sparse
def _on_own_values(_: Answer, func: Any, tensor: Tensor, *args: Any) -> Tensor:
    func(parts(tensor)[1], *args)
    return tensor


@composes("mul.Tensor div.Tensor mul_.Tensor div_.Tensor")
@_of_sparse
def _scale(answer: Answer, func: Any, tensor: Tensor, other: Any) -> Any:
    """By a number; `_mul_dense_sparse_out` by a dense tensor of its shape."""
    if isinstance(other, Tensor) and other.dim():
        return NotImplemented
    return (_on_own_values if torch_common.is_mutable(func) else _on_values)(answer, func, tensor, other)


@composes("zero_")
@_of_sparse
def _clear(_: Answer, func: Any, tensor: Tensor) -> Tensor:
    """`zero_sparse_`: a zero is not kept."""
    indices, values = parts(tensor)
    empty = indices.new_empty((indices.shape[0], 0)), values.new_empty((0, *values.shape[1:]))
    torch_wrappers.set_sparse_parts(tensor, *empty, coalesced=True)
    return tensor


@composes("norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype")
@_of_sparse
def _norm(_: Answer, func: Any, tensor: Tensor, p: Any = 2, *__: Any, **kwargs: Any) -> Any:
    """`norm_sparse`: of the coalesced values."""
    return tensor.coalesce()._values().norm(p, dtype=kwargs.get("dtype"))


# --- sums -------------------------------------------------------------------------------------------------------------


def _flatten(indices: Tensor, shape: torch.Size, *, copies: bool) -> Tensor:
    """`flatten_indices` (ATen/native/SparseTensorUtils.cpp): one number for each place."""
    if indices.shape[0] == 1:
        return indices.squeeze(0).clone() if copies else indices.squeeze(0)
    return indices.mul(indices.new_empty((indices.shape[0], 1))).sum(0)


def _find_distinct(answer: Answer, func: Any, tensor: Tensor) -> tuple[int, Tensor | None]:
    """How many distinct places a tensor has, and which, if its indices are known."""
    known = known_values.find_value(parts(tensor)[0])
    if known is None:
        return answer(func, (tensor,)), None
    with torch_common.no_modes():
        places = torch.unique(known, dim=1)
    return places.shape[1], places


@composes("_coalesce")
@_of_sparse
def _coalesce(answer: Answer, func: Any, tensor: Tensor) -> Tensor:
    """`_coalesce_sparse_cpu` keeps the memory of all places, of which it uses the first; `_coalesce_sparse_cuda` sorts
    by merging, which takes a second copy of keys and items, and a few thousand bytes that are left out."""
    indices, values = parts(tensor)
    if (count := indices.shape[1]) < 2:
        return _make(indices.clone(), values.clone(), tensor, coalesced=True)
    distinct, places = _find_distinct(answer, func, tensor)
    if not values.is_cuda:
        values, flat = values.contiguous(), _flatten(indices, tensor.shape, copies=False)
        made = torch.empty_like(indices, memory_format=torch.contiguous_format)
        summed = torch.empty_like(values)
        order: tuple[Tensor, ...] = flat.sort(0)
        made, summed = made[:, :distinct], summed[:distinct]
    else:
        flat = _flatten(indices, tensor.shape, copies=True)
        order = torch.empty_like(flat), torch.empty_like(flat)
        flat.new_empty((2, count))
        made = flat[:distinct].unsqueeze(0)
        summed = values.new_empty((distinct, *values.shape[1:]))
        values = values.contiguous()
        if indices.shape[0] > 1:
            made = indices.new_empty((indices.shape[0], distinct))
    if places is not None and isinstance(made, torch_common.FakeTensor):
        known_values.attach(made, places)
    del order, values
    return _make(made, summed, tensor, coalesced=True)


@composes("add.Tensor add_.Tensor")
def _add(_: Answer, func: Any, one: Any, other: Any, *, alpha: Any = 1) -> Any:
    """`add_out_sparse_cpu`, `add_out_sparse_cuda`: the places of both; `add_out_dense_sparse_cpu` and its like on a
    card: into the dense tensor, which allocates nothing. The CPU takes two places that it meets as equal for one, which
    saves a row of what is read later: not followed."""
    if not torch_wrappers.is_sparse(other):
        return NotImplemented
    in_place = torch_common.is_mutable(func)
    if not torch_wrappers.is_sparse(one):
        return one if in_place else one.clone()
    values = parts(other)[1]
    if alpha != 1 and values.is_cuda:
        values = values.mul(alpha)
    indices = torch.cat([parts(one)[0], parts(other)[0]], 1)
    made = torch.cat([parts(one)[1], values])
    if not in_place:
        return _make(indices, made, one, coalesced=False)
    torch_wrappers.set_sparse_parts(one, indices, made, coalesced=False)
    return one


@composes("_to_sparse")
def _from_dense(_: Answer, func: Any, dense: Tensor, **kwargs: Any) -> Any:
    """`dense_to_sparse` (SparseTensorUtils.h, TensorConversions.cpp): where it is not zero, and what is there."""
    if torch_wrappers.is_sparse(dense) or kwargs.get("layout", torch.sparse_coo) is not torch.sparse_coo:
        return NotImplemented
    indices = aten.nonzero.default(dense).t()
    values = aten.index.Tensor(dense, list(indices.unbind(0)))
    return torch_wrappers.make_sparse(indices, values, tuple(dense.shape), coalesced=True)


# --- with dense tensors -----------------------------------------------------------------------------------------------


@composes("t transpose.int")
@_of_sparse
def _transpose(_: Answer, func: Any, tensor: Tensor, *dims: int) -> Any:
    """`sparse_transpose_` (TensorShape.cpp) of a clone: two rows of indices change places."""
    if len(tensor.shape) != 2 or dims[:1] == dims[1:] != ():
        return NotImplemented
    indices, values = parts(tensor)
    indices, values = indices.clone(), values.clone()
    rows, columns = indices.select(0, 0), indices.select(0, 1)
    swapped = torch.zeros_like(rows)
    swapped.copy_(rows)
    rows.copy_(columns)
    columns.copy_(swapped)
    return torch_wrappers.make_sparse(indices, values, tuple(reversed(tensor.shape)), coalesced=False)


@composes("mm")
@_of_sparse
def _multiply(_: Answer, func: Any, tensor: Tensor, dense: Tensor) -> Any:
    """`_sparse_mm`: zeros, to which the product is added."""
    if torch_wrappers.is_sparse(dense):
        return NotImplemented
    return aten.addmm.default(dense.new_zeros((tensor.shape[0], dense.shape[1])), tensor, dense, beta=0)


@composes("addmm _sparse_addmm")
def _add_product(_: Answer, func: Any, start: Tensor, tensor: Any, dense: Tensor, **kwargs: Any) -> Any:
    """`s_addmm_out_sparse_dense_cpu` allocates the result alone; `s_addmm_out_sparse_dense_cuda` makes 32-bit indices
    of rows (CSR) for cuSPARSE, which writes columns first."""
    if not torch_wrappers.is_sparse(tensor):
        return NotImplemented
    rows, columns = tensor.shape[0], dense.shape[1]
    if not dense.is_cuda:
        return _run_product(start.expand(rows, columns), tensor, dense)
    result = start.new_empty((rows, columns))
    tensor = tensor.coalesce()
    indices = parts(tensor)[0]
    of_rows = indices.new_empty(rows + 1, dtype=torch.int32)
    indices.select(0, 0).to(torch.int32)
    of_columns = indices.select(0, 1).to(torch.int32)
    by_columns = result if result.stride() == (1, rows) else result.t().clone(memory_format=torch.contiguous_format)
    if dense.stride() != (1, dense.shape[0]) and (dense.stride(1) != 1 or dense.stride(0) == columns):
        dense = dense.contiguous()
    _run_product(result, tensor, dense)
    del of_rows, of_columns, by_columns
    return result


def _run_product(start: Tensor, tensor: Tensor, dense: Tensor) -> Any:
    """What is left is recorded as one operator, of the values: indices are no tensors of numbers to it."""
    return aten._sparse_addmm.default(start, parts(tensor)[1], dense)


@answers("_sparse_addmm", everywhere=True)
def _product(_: Any, start: Tensor, values: Tensor, dense: Tensor) -> Any:
    return start if start.is_cuda else torch.empty_like(start, memory_format=torch.contiguous_format)


@composes("sparse_mask")
def _mask(_: Answer, func: Any, dense: Tensor, mask: Tensor) -> Tensor:
    """`sparse_mask`: times ones at the places of the mask (`_mul_dense_sparse_out`). In those of a sparse tensor,
    hashed, the mask's are looked up (SparseBinaryOpIntersectionCommon.h)."""
    indices, values = parts(mask)
    if torch_wrappers.is_sparse(dense):
        own, (there, given) = indices.shape[1], parts(dense if torch_wrappers.is_coalesced(dense) else dense.coalesce())
        sorting = [there.new_empty(shape) for shape in (max(own, there.shape[1]), there.shape[1], (2, own))]
        made = _make(indices.clone(), given.new_empty((own, *given.shape[1:])), mask)
        del sorting
        return made
    ones = values.new_ones(1).expand_as(values)
    picked = aten.index.Tensor(dense, list(indices.unbind(0)))
    return _make(indices.clone(), picked.mul(ones), mask)


@composes("_sparse_softmax _sparse_log_softmax")
@_of_sparse
def _softmax(_: Answer, func: Any, tensor: Tensor, *__: Any) -> Tensor:
    """`softmax_sparse_cpu` (SoftMax.cpp in the same folder): new values, and indices through a copy of them. On a card
    the places of each row, sorted, and a maximum of each are left out."""
    indices, values = parts(tensor.coalesce())
    copied = indices.clone()
    values = torch.empty_like(values)
    return _make(copied.clone(), values, tensor, coalesced=True)


@composes("_sparse_softmax_backward_data _sparse_log_softmax_backward_data")
@_of_sparse
def _softmax_backward(_: Answer, func: Any, gradient: Tensor, output: Tensor, *__: Any) -> Tensor:
    """`softmax_backward_sparse_cpu`: as many values as the output has."""
    gradient.coalesce()
    indices, values = parts(output)
    values = torch.zeros_like(values)
    return _make(indices.clone(), values, output, coalesced=True)


@composes("_to_dense")
@_of_sparse
def _to_dense(_: Answer, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`sparse_to_dense`: zeros, to which it is added."""
    return parts(tensor)[1].new_zeros(tensor.shape)


@composes("_embedding_bag_backward")
def _embedding_bag(_: Answer, func: Any, grad: Tensor, indices: Tensor, offsets: Tensor, *rest: Any) -> Any:
    """`_embedding_bag_backward_symint` (EmbeddingBag.cpp): bags of one kind come without the bag of each index."""
    of_index, bag_size, _, weights, by_frequency, mode, is_sparse, per_sample, *padding = rest
    if not is_sparse:
        return NotImplemented
    if indices.numel() and not of_index.numel():
        of_index = offsets.new_zeros(indices.shape[0] + offsets.shape[0])
        of_index.index_add_(0, offsets, torch.ones_like(offsets))
        of_index = of_index.cumsum(0)[: indices.shape[0]]
    settings = weights, by_frequency, mode, per_sample, *padding
    return aten._embedding_bag_sparse_backward.default(grad, indices, offsets, of_index, bag_size, *settings)
