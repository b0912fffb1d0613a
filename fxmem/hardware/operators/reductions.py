"""Sums and other reductions, and the buffers that several blocks of a card share: `gpu_reduce_kernel` of torch.

Where few results are summed over many numbers, each result is divided among blocks, which leave their parts in memory:
up to twice the bytes of what is summed. Everything is read in torch 2.11's header `ATen/native/cuda/Reduce.cuh`
(`setReduceConfig`, `ReduceConfig`); the sizes, and the length from which on there are any, are those of published
allocator snapshots.

Sums are taken over a copy of the input in the result's dtype, on the CPU as on a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import NamedTuple

from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import Events, HiddenEvent, alloc, output
from fxmem.hardware.operators.registry import Call, NamedCall, Operator, ScratchRule
from fxmem.hardware.tensor_layouts import HALF, ITEM_BYTES, TensorLayout, broadcast_shapes, read_layout
from fxmem.records.profile import Target

_THREADS, _WARP, _VALUES = 512, 32, 4
_INDEX_MAX = 2**31 - 1


class _Dim(NamedTuple):
    size: int
    stride: int
    """Of the input, in elements."""
    reduced: bool


def reduction_events(source: TensorLayout, dims: Sequence[int], accumulated: int, target: Target) -> Events:
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


# --- the rows ---------------------------------------------------------------------------------------------------------


def _converted_input(call: Call) -> TensorLayout:
    """The tensor that is summed: the input, or a copy of it. A card sums half precision in float32 without one."""
    source, made = call.layout(), call.made
    in_kernel = call.platform.card is not None and source.dtype in HALF and made.dtype == "float32"
    return source if source.dtype == made.dtype or in_kernel else replace(source, dtype=made.dtype)


def _sum(call: Call, *rest: HiddenEvent) -> Events | None:
    """`make_reduction` (ReduceOpsUtils.h), `cumsum` (ReduceOps.cpp): the input is read in the dtype of the result."""
    source, given = _converted_input(call), call.layout()
    copy = () if source == given or not given.rank else (alloc(f"input in {source.dtype}", source.nbytes),)
    return (output("result"), *copy, *rest) if copy or rest else None


def _sum_on_card(call: Call) -> Events | None:
    return _sum(call, *_shared(call, _converted_input(call)))


def _in_parts(*, position: int = 1, smallest: int = 4) -> ScratchRule:
    """The result, and what the blocks share; arguments as for `_shared`."""

    def rule(call: Call) -> Events | None:
        events = _shared(call, call.layout(), position, smallest)
        return (output("result"), *events) if events else None

    return rule


def _shared(call: Call, source: TensorLayout, position: int = 1, smallest: int = 4) -> Events:
    """What the blocks share.

    The dimensions stand at a position; the number that is kept for a result has at least so many bytes.
    """
    given = call.argument(position)
    dims = [given] if isinstance(given, int) else given if isinstance(given, Sequence) and given else range(source.rank)
    item = max(ITEM_BYTES[source.dtype], ITEM_BYTES[call.made.dtype], smallest)
    return reduction_events(source, dims, item, call.card)


def _mean_on_cpu(call: Call) -> Events | None:
    """`mean_out` (ReduceOps.cpp): half precision is summed in a float32 copy, to a float32 sum."""
    made = call.made
    if ITEM_BYTES[made.dtype] > 2:
        return _sum(call)
    source = 4 * call.layout().numel
    return output("result"), alloc("mean in float32", 4 * made.numel), alloc("input in float32", source)


def _foreach_norm(call: Call) -> Events:
    """`foreach_tensor_norm_cuda` (ForeachReduceOp.cu): for each tensor, as many partial norms as the largest has chunks
    of 65,536 elements."""
    layouts = [read_layout(each) for each in call.args[0]]
    chunks = max((-(-layout.numel // 65536) for layout in layouts), default=0)
    item = 8 if any(layout.dtype == "float64" for layout in layouts) else 4
    return alloc("partial norms", len(layouts) * chunks * item), *(output("norm") for _ in layouts)


def _norm_flops(read: int, made: int, order: float | None) -> int:
    """2: squares, sum, root. 1 and infinity: absolute values, their sum or the largest. 0: a count. Any p: absolute
    values, powers, sum, root."""
    fixed = {2.0: (2, 1), 1.0: (2, 0), inf: (2, 0), -inf: (2, 0), 0.0: (1, 0)}
    per_element, per_result = fixed.get(2.0 if order is None else float(order), (3, 1))
    return per_element * read + per_result * made


def _dist_flops(c: NamedCall) -> int:
    """The norm of the difference."""
    n = prod(broadcast_shapes(c.self.shape, c.other.shape))
    return n + _norm_flops(n, 1, c.p)


ROWS = {
    "ReduceOps.cpp, ReduceOpsUtils.h, cuda/Reduce.cuh": {
        "sum": Operator((1, 0), complex=2, cuda=_sum_on_card, cpu=_sum),
        "nansum prod": Operator((1, 0), cuda=_sum_on_card, cpu=_sum),
        "mean": Operator((1, 1), cuda=_sum_on_card, cpu=_mean_on_cpu),
        "amax amin": Operator((1, 0), cuda=_in_parts(smallest=1)),
        "max min": Operator((1, 0)),
        "aminmax": Operator((2, 0)),
        "std std_mean": Operator((4, 3)),
        "var var_mean": Operator((4, 2)),  # mean (n + m), sum of (x - mean) (x - mean) over n - 1 (3n + m)
        "logsumexp": Operator((4, 2)),  # max + log(sum(exp(x - max)))
        "cumsum cumprod": Operator(1, scratch=_sum),
        "cummax cummin": Operator(1),
        "logcumsumexp": Operator(4),  # log(exp(x) + exp(y)), with what came before
        "all any argmax argmin count_nonzero": Operator(0),
        "dist": Operator(_dist_flops),
        "trace": Operator(lambda c: min(c.self.shape)),
    },
    "LinearAlgebra.cpp, cuda/ReduceNormKernel.cu": {
        "linalg_vector_norm": Operator(lambda c: _norm_flops(c.read, c.made, c.ord), cuda=_in_parts(position=2)),
        "norm": Operator(lambda c: _norm_flops(c.read, c.made, c.p if hasattr(c, "p") else c.ord)),
    },
    # On a card the offsets of segments whose lengths are given are left out: a number for each.
    "SegmentReduce.cpp": {
        "segment_reduce": Operator(copies=((0,), ())),
        "_segment_reduce_backward": Operator(copies=((0, 1, 2), ())),
    },
    "cuda/ForeachReduceOp.cu": {"_foreach_norm": Operator(cuda=_foreach_norm)},
}
