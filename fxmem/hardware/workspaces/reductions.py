"""Buffers of a card's reductions that several blocks share: `gpu_reduce_kernel` of torch.

Where few results are summed over many numbers, each result is divided among blocks, which leave their parts in memory:
up to twice the bytes of what is summed. Everything is read in torch 2.11's header `ATen/native/cuda/Reduce.cuh`
(`setReduceConfig`, `ReduceConfig`); the sizes, and the length from which on there are any, are those of published
allocator snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import HiddenEvent, HiddenMemory, alloc, output
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, read_layout
from fxmem.hardware.workspaces.copies import SUMMING, converted_input
from fxmem.records.profile import Target

REDUCTIONS = frozenset({"sum", "nansum", "mean", "prod", "amax", "amin", "linalg_vector_norm"})
"""Operators, without `aten.` and overload, whose kernel keeps one number for each result."""
_THREADS, _WARP, _VALUES = 512, 32, 4
_INDEX_MAX = 2**31 - 1
_SOURCE = "aten/src/ATen/native/cuda/Reduce.cuh"


class _Dim(NamedTuple):
    size: int
    stride: int
    """Of the input, in elements."""
    reduced: bool


def reduction_memory(short: str, args: Sequence[Any], result: Any, target: Target) -> HiddenMemory | None:
    """What a reduction allocates beside its result; None for nothing.

    Args:
        short: one of `REDUCTIONS`.
        args: its positional arguments.
        result: what it returned.
        target: a CUDA target, whose multiprocessors decide how many blocks share a result.
    """
    source = converted_input(args, result, on_card=True) if short in SUMMING else read_layout(args[0])
    position = 2 if short == "linalg_vector_norm" else 1
    given = args[position] if len(args) > position else None
    if isinstance(given, int):
        given = [given]
    dims = given if isinstance(given, Sequence) and given else range(source.rank)
    item = max(ITEM_BYTES[source.dtype], ITEM_BYTES[read_layout(result).dtype])
    accumulated = item if short in ("amax", "amin") else max(4, item)
    events = reduction_events(source, dims, accumulated, target)
    return HiddenMemory(events=(output("result"), *events), source=_SOURCE) if events else None


def reduction_events(
    source: TensorLayout, dims: Sequence[int], accumulated: int, target: Target
) -> tuple[HiddenEvent, ...]:
    """The buffers of one reduction of a tensor over some dimensions.

    Args:
        source: what is reduced.
        dims: the dimensions over which it is reduced.
        accumulated: bytes of the number that the kernel keeps for each result.
        target: a CUDA target.
    """
    if not source.numel:
        return ()
    shape = _order_dims(source, {dim % source.rank for dim in dims} if source.rank else set())
    while not _fits_32bit_index(shape, ITEM_BYTES[source.dtype]):
        shape = _half(shape)
    parts, semaphores = _buffers(shape, accumulated, target)
    return (alloc("parts of the results", parts), alloc("semaphores", semaphores)) if parts else ()


def _order_dims(source: TensorLayout, reduced: set[int]) -> list[_Dim]:
    """The dimensions as `TensorIterator` orders and joins them: reduced ones first, by stride."""
    dims = [
        _Dim(size, stride, dim in reduced)
        for dim, (size, stride) in reversed(list(enumerate(zip(source.shape, source.stride, strict=True))))
        if size != 1
    ]
    inner = sorted((dim for dim in dims if dim.reduced), key=lambda dim: dim.stride)
    joined: list[_Dim] = []
    for dim in (*inner, *(dim for dim in dims if not dim.reduced)):
        last = joined[-1] if joined else None
        if last is not None and last.reduced == dim.reduced and last.size * last.stride == dim.stride:
            joined[-1] = last._replace(size=last.size * dim.size)
        else:
            joined.append(dim)
    return joined


def _fits_32bit_index(dims: Sequence[_Dim], item: int) -> bool:
    """`TensorIteratorBase::can_use_32bit_indexing`."""
    numel, offset = prod(dim.size for dim in dims), 1 + sum((dim.size - 1) * dim.stride * item for dim in dims)
    return numel <= _INDEX_MAX and offset <= _INDEX_MAX


def _half(dims: list[_Dim]) -> list[_Dim]:
    """The larger half of what `TensorIteratorBase::split` makes of the dimension that reaches farthest."""
    at = max(range(len(dims)), key=lambda i: (dims[i].size - 1) * dims[i].stride)
    return [dim._replace(size=-(-dim.size // 2)) if i == at else dim for i, dim in enumerate(dims)]


def _buffers(dims: Sequence[_Dim], accumulated: int, target: Target) -> tuple[int, int]:
    """Bytes of the parts and of the semaphores; zeros where a block computes its results alone."""
    reduced = [dim for dim in dims if dim.reduced]
    kept = [dim for dim in dims if not dim.reduced]
    inputs, outputs = prod(dim.size for dim in reduced), prod(dim.size for dim in kept)
    if not reduced:
        return 0, 0
    along_input = not kept or reduced[0].stride < kept[0].stride
    width, height = (inputs, outputs) if along_input else (outputs, inputs)
    vector = 1
    if along_input and reduced[0].stride == 1 and width >= 128 and len(reduced) == 1:
        width //= _VALUES
    elif not along_input and kept[0].stride == 1:
        vector = _output_vector(dims, len(reduced))
        width //= vector
    block_width, block_height = _block(width, height, _THREADS // vector)
    by_input, by_output = (block_width, 1) if along_input else (1, block_width)
    if -(-inputs // by_input) < min(block_height * 16, 256):
        return 0, 0
    values = -(-inputs // (by_input * block_height))
    properties = device_properties(target)
    blocks = properties.multi_processor_count * (properties.max_threads_per_sm // (block_width * block_height))
    grid = -(-(outputs // vector) // by_output)
    if values < 256 or grid > blocks:
        return 0, 0
    shares = max(min(-(-blocks // grid), -(-values // 16)), -(-values // 256))
    if shares <= 1:
        return 0, 0
    return accumulated * outputs * shares * (1 if along_input else block_width * vector), 4 * grid


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """`ReduceConfig::set_block_dimension`: width and height of a block of threads."""
    width, height = (min(1 << (size.bit_length() - 1), threads) for size in (width, height))
    block_height = min(height, threads // min(width, _WARP))
    return min(width, threads // block_height), block_height


def _output_vector(dims: Sequence[_Dim], first_kept: int) -> int:
    """`get_output_vec_size`: results that a thread computes together; the tensor is taken to begin at a multiple."""
    vector = _VALUES
    numbers = (dims[first_kept].size, *(dim.stride for i, dim in enumerate(dims) if i != first_kept))
    while any(number % vector for number in numbers):
        vector //= 2
    return vector
