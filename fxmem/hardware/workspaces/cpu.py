"""What CPU kernels allocate beside their results, where the shapes determine it.

The scratch of oneDNN's convolutions and recurrent layers and of attention depends on the machine (instruction set,
threads) and is not here; neither are single numbers that a kernel wraps as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from fxmem.hardware.hidden_memory import HeldBuffer, HiddenMemory, alloc, free, output
from fxmem.hardware.tensor_layouts import ITEM_BYTES, MemoryFormat, TensorLayout, read_layout
from fxmem.hardware.workspaces.collector import Seen, unknown_buffers
from fxmem.hardware.workspaces.copies import (
    COMPOSED,
    COPYING,
    PROMOTING,
    SUMMING,
    add_copies,
    add_input_copy,
    cast_slice,
    composed_memory,
    operand_copies,
)
from fxmem.hardware.workspaces.cublas import product_operands
from fxmem.hardware.workspaces.other_kernels import is_tensor, undetermined_memory
from fxmem.records.profile import Assumption, Phase, Unknown


class CpuCollector:
    """As `Collector`, for a step on the CPU."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything; a new step begins."""
        self._memory: dict[int, tuple[str, HiddenMemory]] = {}

    def look(self, name: str, args: Sequence[Any], result: Any) -> Seen | None:
        """What a call hides; None for nothing."""
        short = name.removeprefix("aten.").partition(".")[0]
        memory = None
        if short in COPYING:
            memory = add_copies(short, args, result, None)
        elif short in COMPOSED:
            memory = composed_memory(short, args)
        elif short in _KERNELS:
            memory = _KERNELS[short](args, result)
        elif short in PROMOTING:
            memory = operand_copies(args)
        elif short in SUMMING:
            memory = add_input_copy(args, result, None)
        elif operands := product_operands(short, args):
            memory = _product_copies(operands)
        else:
            memory = undetermined_memory(short)
        return None if memory is None else Seen(name, multiplies=False, multiplies_lt=False, memory=memory)

    def saw(self, index: int, seen: Seen, phase: Phase, stream: int = 0) -> None:
        """Op `index` of the step was a call that hides this."""
        if seen.memory is not None:
            self._memory[index] = seen.name, seen.memory

    def settle(self) -> dict[int, HiddenMemory]:
        """By op index, what it hides."""
        return {index: memory for index, (_, memory) in self._memory.items()}

    def held(self) -> dict[str, HeldBuffer]:
        """Nothing stays after the step."""
        return {}

    def assumptions(self) -> Iterator[Assumption]:
        """Nothing is taken for granted."""
        yield from ()

    def unknowns(self) -> Iterator[Unknown]:
        """Buffers whose size is not known."""
        yield from unknown_buffers(self._memory.values())


def _batch_norm_backward(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`batch_norm_backward_cpu_template` (aten/src/ATen/native/Normalization.cpp): for dense arguments it makes the
    input's gradient a second time.

    The second takes the first one's place once both are there. Arguments: grad_out, input, ...; results: the gradients
    that were asked for, or None.
    """
    grad, source = read_layout(args[0]), read_layout(args[1])
    dense = all(each.is_contiguous() or each.is_contiguous(MemoryFormat.CHANNELS_LAST) for each in (grad, source))
    if result[0] is None or not dense or grad.memory_format() is not source.memory_format():
        return None
    outputs = (output(f"gradient {position}") for position, each in enumerate(result) if each is not None)
    events = (*outputs, alloc("the input's first gradient", read_layout(result[0]).nbytes))
    return HiddenMemory(events=events, source="aten/src/ATen/native/Normalization.cpp")


def _batch_norm(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`batch_norm_cpu_contiguous_impl` (cpu/batch_norm_kernel.cpp): a factor and a summand for each channel."""
    source = read_layout(args[0])
    nbytes = source.shape[1] * max(4, ITEM_BYTES[source.dtype])
    outputs = (output("result"), output("mean"), output("inverse deviation"))
    events = (*outputs, alloc("factors", nbytes), alloc("summands", nbytes))
    return HiddenMemory(events=events, source="aten/src/ATen/native/cpu/batch_norm_kernel.cpp")


def _group_norm_backward(args: Sequence[Any], result: Any) -> HiddenMemory:
    """`GroupNormBackwardKernelImpl` (cpu/group_norm_kernel.cpp): two sums for each channel of each image.

    A gradient that is not laid out as the input is copied first, as a run of torch 2.15 shows; before, autograd copies
    it. Arguments: grad_out, input, mean, rstd, weight, N, C, ...; results: three gradients, of which some may be None.
    """
    grad, source = read_layout(args[0]), read_layout(args[1])
    nbytes = args[5] * args[6] * max(4, ITEM_BYTES[source.dtype])
    dense = grad.is_contiguous(source.memory_format())
    copies = () if dense else (alloc("dense gradient", grad.nbytes),)
    outputs = (output("gradient") for each in result if each is not None)
    sums = alloc("sums of gradient * input", nbytes), alloc("sums of gradient", nbytes)
    return HiddenMemory(events=(*copies, *outputs, *sums), source="aten/src/ATen/native/cpu/group_norm_kernel.cpp")


def _mean(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`mean_out` (ReduceOps.cpp): half precision is summed in a float32 copy, to a float32 sum."""
    made = read_layout(result)
    if ITEM_BYTES[made.dtype] > 2:
        return add_input_copy(args, result, None)
    source = 4 * read_layout(args[0]).numel
    events = (output("result"), alloc("mean in float32", 4 * made.numel), alloc("input in float32", source))
    return HiddenMemory(events=events, source="aten/src/ATen/native/ReduceOps.cpp")


def _cat(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`cat_out_cpu` (TensorShape.cpp): slices in another dtype than the result's are cast."""
    made, given = read_layout(result), [read_layout(each) for each in args[0]]
    slices = (
        cast_slice(number, each.nbytes)
        for number, each in enumerate(given, 1)
        if each.numel and each.dtype != made.dtype
    )
    events = tuple(chain.from_iterable(slices))
    return (
        HiddenMemory(events=(output("result"), *events), source="aten/src/ATen/native/TensorShape.cpp")
        if events
        else None
    )


def _masked_select(args: Sequence[Any], result: Any) -> HiddenMemory:
    """`masked_select_out_impl_cpu` (TensorAdvancedIndexing.cpp): the mask is counted in int64. Several threads share
    the work by sums over it."""
    counted = alloc("mask in int64", 8 * read_layout(args[1]).numel), *free("mask in int64"), output("result")
    shared = alloc("temporaries of several threads", None)
    return HiddenMemory(events=(*counted, shared), source="aten/src/ATen/native/TensorAdvancedIndexing.cpp")


def _product_copies(operands: Sequence[TensorLayout]) -> HiddenMemory | None:
    """`addmm_impl_cpu_`, `bmm_out_or_baddbmm_` (LinearAlgebra.cpp): matrices that BLAS cannot read are copied.

    MKL reads batches; where it cannot, each item is a product of its own. oneDNN, which computes half precision
    (`checksize` in mkldnn/Matmul.cpp), may copy both to a layout of its own, as the machine wants it.
    """
    first, second = operands
    size = first.shape[-2] * first.shape[-1] * second.shape[-1] if first.rank > 1 < second.rank else 0
    if ITEM_BYTES[first.dtype] < 4:
        small = size <= _SMALL_HALF_PRODUCT
        return None if small else HiddenMemory(events=(output("result"), alloc("oneDNN's copies", None)))
    copied = [each for each in operands if each.numel and not each.is_blas_matrix()]
    is_batch = first.rank == 3
    if not copied or (is_batch and size < _SMALL_PRODUCT):
        return None
    nbytes = (each.nbytes // (each.shape[0] if is_batch else 1) for each in copied)
    events = (alloc(f"contiguous matrix {number}", each) for number, each in enumerate(nbytes, 1))
    return HiddenMemory(events=(output("result"), *events), source="aten/src/ATen/native/LinearAlgebra.cpp")


def _sort(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`fill_indices` (Sorting.cpp): the positions of one row, which are written to all."""
    source = read_layout(args[0])
    dim = next((value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)), -1)
    if source.rank == 0:
        return None
    events = (output("values"), output("indices"), alloc("range", 8 * source.shape[dim]))
    return HiddenMemory(events=events, source=_SORTING)


def _kth_value(args: Sequence[Any], result: Any) -> HiddenMemory:
    """`kthvalue_out_impl_cpu` (Sorting.cpp): values and positions that are partitioned."""
    source = read_layout(args[0])
    events = (alloc("partitioned values", source.nbytes), alloc("partitioned positions", 8 * source.numel))
    return HiddenMemory(events=(output("values"), output("indices"), *events), source=_SORTING)


def _median(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`median_impl` (Sorting.cpp): a copy that is partitioned; with a dimension each row has its own, unseen."""
    if is_tensor(result):
        return HiddenMemory(events=(alloc("partitioned values", read_layout(args[0]).nbytes), output("median")))
    return None


def _embedding_bag(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`make_offset2bag_out` (EmbeddingBag.cpp): bags are counted in one place more than there are indices."""
    indices = read_layout(result[1]).numel
    if not indices:
        return None
    counted = "counted offsets"
    events = (output("bags"), alloc(counted, 8 * (indices + 1)), output("bag of each index"), *free(counted))
    return HiddenMemory(events=events, source="aten/src/ATen/native/EmbeddingBag.cpp")


def _grid_sample_backward(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`grid_sampler_2d_backward_cpu_kernel_impl` (cpu/GridSamplerKernel.cpp): reads a dense gradient."""
    if (copied := _dense_gradient(args, result)) is None:
        return None
    outputs = (output("gradient") for each in result if each is not None)
    return copied.model_copy(update={"events": (*outputs, *copied.events[1:])})


def _dropout_backward(args: Sequence[Any], result: Any) -> HiddenMemory:
    """`native_dropout_backward` (Dropout.cpp): the mask in the gradient's dtype, the product unscaled."""
    nbytes = read_layout(result).nbytes
    events = (alloc("mask", nbytes), alloc("product", nbytes), *free("mask"), output("gradient"))
    return HiddenMemory(events=events, source="aten/src/ATen/native/Dropout.cpp")


def _upsample(taps: int) -> Callable[[Sequence[Any], Any], HiddenMemory | None]:
    """`upsample_generic_Nd_kernel_impl` (cpu/UpSampleKernel.cpp): place and weight of each tap, by output position."""

    def rule(args: Sequence[Any], result: Any) -> HiddenMemory | None:
        made = read_layout(result)
        if made.memory_format() is MemoryFormat.CHANNELS_LAST and made.shape[1] > 3:
            return None
        nbytes = taps * sum(made.shape[2:]) * (8 + max(4, ITEM_BYTES[made.dtype]))
        return HiddenMemory(events=(output("result"), alloc("places and weights", nbytes)), source=_UPSAMPLE)

    return rule


def _upsample_image(taps: int) -> Callable[[Sequence[Any], Any], HiddenMemory | None]:
    """`_use_vectorized_kernel_cond_2d` (cpu/UpSampleKernel.cpp): small images are computed as channels-last copies."""
    large = _upsample(taps)

    def rule(args: Sequence[Any], result: Any) -> HiddenMemory | None:
        source, made = read_layout(args[0]), read_layout(result)
        if sum(made.shape[2:]) > 128:
            return large(args, result)
        copied = [each for each in (source, made) if not each.is_contiguous(MemoryFormat.CHANNELS_LAST)]
        events = (alloc(f"channels-last copy {number}", each.nbytes) for number, each in enumerate(copied, 1))
        return HiddenMemory(events=(output("result"), *events), source=_UPSAMPLE)

    return rule


def _dense_gradient(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """Kernels that read a dense gradient copy one that is not.

    Such is a sum's: one number seen from everywhere.
    """
    gradient = read_layout(args[0])
    if gradient.is_contiguous() or gradient.is_contiguous(MemoryFormat.CHANNELS_LAST):
        return None
    return HiddenMemory(
        events=(output("result"), alloc("dense gradient", gradient.nbytes)), source="aten/src/ATen/native"
    )


_NEAREST = "upsample_nearest", "_upsample_nearest_exact"
_READ_DENSE = (
    "gelu_backward", "_softmax_backward_data", "col2im", "pixel_shuffle", "pixel_unshuffle",
    *(f"max_pool{rank}d_with_indices_backward" for rank in (2, 3)),
    *(f"{name}{rank}d_backward" for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool") for rank in (2, 3)),
    *(f"{name}_pad{rank}d_backward" for name in ("reflection", "replication") for rank in (1, 2, 3)),
    *(f"{name}{rank}d_backward" for name in _NEAREST for rank in (1, 2, 3)),
    *(f"upsample_{name}_backward" for name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
)  # fmt: skip
_SMALL_PRODUCT = 400
"""Multiplications of an item of a batch below which a loop of torch's own computes it."""
_SMALL_HALF_PRODUCT = 16**3
"""The same in half precision."""
_UPSAMPLE = "aten/src/ATen/native/cpu/UpSampleKernel.cpp"
_SORTING = "aten/src/ATen/native/Sorting.cpp"
_KERNELS: Mapping[str, Callable[[Sequence[Any], Any], HiddenMemory | None]] = {
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "batch_norm_backward": _batch_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "native_dropout_backward": _dropout_backward,
    "_embedding_bag": _embedding_bag,
    "grid_sampler_2d_backward": _grid_sample_backward,
    **dict.fromkeys(_READ_DENSE, _dense_gradient),
    "cat": _cat,
    "mean": _mean,
    "masked_select": _masked_select,
    "sort": _sort,
    "kthvalue": _kth_value,
    "median": _median,
    "nanmedian": _median,
    **{f"{name}{rank}d": _upsample(1) for name in _NEAREST for rank in (1, 3)},
    **{f"{name}2d": _upsample_image(1) for name in _NEAREST},
    "upsample_linear1d": _upsample(2),
    "upsample_bilinear2d": _upsample_image(2),
    "upsample_trilinear3d": _upsample(2),
    "upsample_bicubic2d": _upsample(4),
}
"""By operator, without `aten.` and overload."""
