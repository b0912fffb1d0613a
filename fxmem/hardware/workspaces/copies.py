"""What operators allocate on a card as on the CPU: copies of arguments, and results of the kernels they are made of.

Softmax, layer norm and RMS norm copy arguments that are not contiguous: logits of `(batch, classes, tokens)` made by a
transpose are copied whole by the loss, images of `channels_last` too, and so is what `permute` hands a layer norm over
channels. A loss that is reduced has the losses of all elements first.

Kernels compute in one dtype only: a card's elementwise kernels convert number by number, the CPU's copy an operand of
another dtype first. Sums are taken over a copy in the result's dtype on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from math import prod
from typing import Any

from fxmem.hardware.hidden_memory import HiddenEvent, HiddenMemory, alloc, free, output
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, read_layout
from fxmem.hardware.workspaces.other_kernels import is_tensor

COPYING: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # `host_softmax`, `host_softmax_backward` (aten/src/ATen/native/cuda/SoftMax.cu), aten/src/ATen/native/SoftMax.cpp.
    "_softmax": ((), (0,)),
    "_log_softmax": ((), (0,)),
    "_log_softmax_backward_data": ((), (0, 1)),
    # `layer_norm_cuda`, `layer_norm_backward_cuda` (cuda/layer_norm_kernel.cu), layer_norm.cpp. Backward: gradient,
    # input, ...
    "native_layer_norm": ((0,), ()),
    "native_layer_norm_backward": ((1,), (0,)),
    # `_fused_rms_norm_cuda`, `_fused_rms_norm_backward_cuda` in the same file.
    "_fused_rms_norm": ((0,), ()),
    "_fused_rms_norm_backward": ((1,), (0,)),
}
"""By operator, positions of the arguments that are copied before the results are made, and of those copied after."""


def add_copies(short: str, args: Sequence[Any], result: Any, memory: HiddenMemory | None) -> HiddenMemory | None:
    """What one of these operators hides, the copies that it makes of these arguments included; the copies last until it
    returns.

    Args:
        short: its name without `aten.` and overload.
        result: what the call returned: a tensor, or several of which some may be None.
        memory: what else it hides; None for nothing.
    """
    before, after = (_copies(args, positions) for positions in COPYING[short])
    if not before and not after:
        return memory
    results = [each for each in (result if isinstance(result, tuple | list) else [result]) if each is not None]
    events = (
        memory.events if memory is not None else tuple(output(f"result {number}") for number in range(len(results)))
    )
    made = sum(event.action == "output" for event in events)
    assert all(event.action == "output" for event in events[:made])
    return HiddenMemory(
        events=(*before, *events[:made], *after, *events[made:]),
        source=memory.source if memory is not None else "aten/src/ATen/native",
    )


def _copies(args: Sequence[Any], positions: Sequence[int]) -> tuple[HiddenEvent, ...]:
    layouts = ((position, read_layout(args[position])) for position in positions)
    return tuple(
        alloc(f"contiguous argument {position}", layout.nbytes)
        for position, layout in layouts
        if not layout.is_contiguous()
    )


def composed_memory(short: str, args: Sequence[Any]) -> HiddenMemory | None:
    """What an operator of `COMPOSED` allocates beside its result, on any device; None for nothing.

    Args:
        short: its name without `aten.` and overload.
        args: its positional arguments.
    """
    return COMPOSED[short](args)


def _bytes_of_both(args: Sequence[Any]) -> int:
    """Bytes of an elementwise result of the first two arguments."""
    first, second = read_layout(args[0]), read_layout(args[1])
    sizes = zip_longest(reversed(first.shape), reversed(second.shape), fillvalue=1)
    return prod(a if b == 1 else b for a, b in sizes) * max(ITEM_BYTES[first.dtype], ITEM_BYTES[second.dtype])


def _reduces(args: Sequence[Any], position: int) -> bool:
    return len(args) <= position or args[position] != 0


def _loss(args: Sequence[Any]) -> HiddenMemory | None:
    """`mse_loss_out`, `smooth_l1_loss_out`: the loss of each element beside a result that is as large."""
    if not _reduces(args, 2):
        return None
    return HiddenMemory(events=(output("loss"), alloc("loss of each element", _bytes_of_both(args))), source=_LOSS)


def _huber_loss(args: Sequence[Any]) -> HiddenMemory | None:
    """`huber_loss`: the loss of each element, then its mean or sum."""
    if not _reduces(args, 2):
        return None
    return HiddenMemory(events=(alloc("loss of each element", _bytes_of_both(args)), output("loss")), source=_LOSS)


def _complex_to_real(args: Sequence[Any]) -> HiddenMemory | None:
    """`unary_op_impl_with_complex_to_float` (UnaryOps.cpp): the result as complex numbers first."""
    source = read_layout(args[0])
    if not source.dtype.startswith("complex"):
        return None
    events = (output("result"), alloc("complex result", source.nbytes))
    return HiddenMemory(events=events, source="aten/src/ATen/native/UnaryOps.cpp")


def _scatter_reduce(args: Sequence[Any]) -> HiddenMemory | None:
    """`scatter_reduce_two` (TensorAdvancedIndexing.cpp): how many numbers each mean is of, and where it is none."""
    own, source = read_layout(args[0]), read_layout(args[3])
    if args[4] != "mean":
        return None
    buffers = (alloc("ones", source.nbytes), alloc("counts", own.nbytes), alloc("counts of 0", own.numel))
    return HiddenMemory(events=(output("result"), *buffers), source="aten/src/ATen/native/TensorAdvancedIndexing.cpp")


def _im2col(args: Sequence[Any]) -> HiddenMemory:
    """`im2col_cpu`, `im2col_cuda`: the result begins as large as the input, and is there beside the one it grows to."""
    events = (alloc("result before it grows", read_layout(args[0]).nbytes), output("result"))
    return HiddenMemory(events=events, source="aten/src/ATen/native/Im2Col.cpp, cuda/Im2Col.cu")


def _roll(args: Sequence[Any]) -> HiddenMemory | None:
    """`roll_common` (TensorTransformations.h): the tensor is rolled along one dimension after the other."""
    dims = args[2] if len(args) > 2 else ()
    events = (alloc(f"rolled along {dim}", read_layout(args[0]).nbytes) for dim in dims[:-1])
    return HiddenMemory(events=(*events, output("result")), source="aten/src/ATen/native") if dims[1:] else None


_LOSS = "aten/src/ATen/native/Loss.cpp"
COMPOSED: Mapping[str, Callable[[Sequence[Any]], HiddenMemory | None]] = {
    "mse_loss": _loss,
    "smooth_l1_loss": _loss,
    "huber_loss": _huber_loss,
    "abs": _complex_to_real,
    "angle": _complex_to_real,
    "im2col": _im2col,
    "roll": _roll,
    "scatter_reduce": _scatter_reduce,
}
"""By operator: what a kernel that is written in terms of other kernels allocates, the same on the CPU and on a card."""


# --- copies in another dtype ------------------------------------------------------------------------------------------

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


# --- FSDP2's copy-in of gradients -------------------------------------------------------------------------------------

_COPY_IN = "fsdp.chunk_cat"
_BYTES_PER_BLOCK = 2048
"""Of a chunk, what one block of threads copies (`BLOCK_SIZE * BYTES_PER_THREAD`)."""


def copy_in_memory(name: str, args: Sequence[Any], out: Any, *, on_card: bool) -> HiddenMemory | None:
    """What a call hides by which FSDP2 joins gradients in chunks; None for nothing.

    `fsdp::chunk_cat` (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) until torch 2.14, then
    `fsdp::chunk_cat_mixed_dtype` (torch/csrc/distributed/fsdp/ChunkCat.cpp and .cu); `_pad_chunk` and `cat`
    (TensorShape.cpp), `_chunk_cat_out_cuda` (cuda/TensorShape.cu). The bytes were read from torch 2.11 and 2.15: the
    CPU's in its profiler's log, a card's in the allocator's, where torch's host code ran on a stand-in.

    Args:
        name: of the operator.
        args: its positional arguments: gradients, dimension, and how many chunks.
        out: the buffer that they are copied into.
        on_card: whether a card computes it.
    """
    if not name.startswith(_COPY_IN) or out is None:
        return None
    gradients, buffer, chunks = [read_layout(each) for each in args[0]], read_layout(out), args[2]
    events = tuple(_join(gradients, buffer, chunks, on_card=on_card))
    return HiddenMemory(events=events, source="torch/csrc/distributed/fsdp/ChunkCat.cpp") if events else None


def _join(gradients: Sequence[TensorLayout], out: TensorLayout, chunks: int, *, on_card: bool) -> Iterator[HiddenEvent]:
    """Gradients of several dtypes are cast first, unless a card's kernel casts as it copies."""
    if len({each.dtype for each in gradients}) < 2:
        yield from _join_alike(gradients, out, chunks, on_card=on_card)
    elif on_card and all(_casts_as_it_copies(each, out) for each in gradients):
        yield _places(gradients, out, chunks, numbers=6)
    else:
        cast = [each.model_copy(update={"dtype": out.dtype}) for each in gradients]
        for number, (given, made) in enumerate(zip(gradients, cast, strict=True), 1):
            if given.dtype != made.dtype:
                yield alloc(f"gradient {number} in {made.dtype}", made.nbytes)
        yield from _join_alike(cast, out, chunks, on_card=on_card)


def _join_alike(
    gradients: Sequence[TensorLayout], out: TensorLayout, chunks: int, *, on_card: bool
) -> Iterator[HiddenEvent]:
    """`_chunk_cat`: gradients are padded unless a card's kernel pads as it copies."""
    if on_card and all(_casts_as_it_copies(each, out) for each in gradients):
        yield _places(gradients, out, chunks, numbers=6, more=2)
        return
    padded = [prod(_pad(each, chunks)) * ITEM_BYTES[each.dtype] for each in gradients]
    for number, (given, nbytes) in enumerate(zip(gradients, padded, strict=True), 1):
        if given.nbytes != nbytes:
            yield alloc(f"padded gradient {number}", nbytes)
    if not on_card and gradients[0].dtype != out.dtype:
        yield from chain.from_iterable(map(cast_slice, range(1, len(padded) + 1), padded))


def cast_slice(number: int, nbytes: int) -> tuple[HiddenEvent, ...]:
    """`cat` on the CPU of several dtypes: a slice, written in its own first."""
    name = f"slice {number} before it is cast"
    return alloc(name, nbytes), *free(name)


def _casts_as_it_copies(gradient: TensorLayout, out: TensorLayout) -> bool:
    casts = (gradient.dtype, out.dtype) == ("bfloat16", "float32")
    return gradient.is_contiguous() and (gradient.dtype == out.dtype or casts)


def _places(
    gradients: Sequence[TensorLayout], out: TensorLayout, chunks: int, *, numbers: int, more: int = 0
) -> HiddenEvent:
    """Where a card's kernel reads and writes: numbers by block of threads and by gradient."""
    item = ITEM_BYTES[out.dtype]
    sizes = (prod(_pad(each, chunks)) // chunks * item for each in gradients)
    blocks = sum(-(-size // _BYTES_PER_BLOCK) for size in sizes)
    return alloc("places of the chunks", 8 * (numbers * len(gradients) + more + blocks))


def _pad(gradient: TensorLayout, chunks: int) -> tuple[int, ...]:
    """The shape that the chunks divide."""
    return -(-gradient.shape[0] // chunks) * chunks, *gradient.shape[1:]
