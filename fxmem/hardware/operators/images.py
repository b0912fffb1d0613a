"""Images and windows of them: pooling, padding, resampling, unfolding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from fxmem.hardware.hidden_memory import Events, HiddenEvent, HiddenMemory, alloc, output
from fxmem.hardware.operators.registry import Call, FlopRule, Operator, ScratchRule, dense_gradient, undetermined
from fxmem.hardware.tensor_layouts import ITEM_BYTES, MemoryFormat, TensorLayout

# --- FLOPs ------------------------------------------------------------------------------------------------------------


def _window(dims: int, size: Sequence[int]) -> int:
    """Places in a pooling window; one size stands for all dimensions."""
    return int(prod(size) ** (dims if len(size) == 1 else 1))


def _max_pool(dims: int) -> Operator:
    """An operation per place of the window."""
    return Operator(lambda c: c.made * _window(dims, c.kernel_size))


def _average_pool(dims: int) -> FlopRule:
    """One more for the average."""
    return lambda c: c.made * (_window(dims, c.kernel_size) + 1)


def _average_pool_backward(dims: int) -> Operator:
    return Operator(lambda c: c.read * (_window(dims, c.kernel_size) + 1), cpu=dense_gradient)


def _window_elements(whole: Sequence[int], windows: Sequence[int]) -> int:
    """Elements in all windows of adaptive pooling: the i-th of o over s elements is [floor(i s / o), ceil((i + 1) s /
    o))."""
    return prod(sum(-(-(i + 1) * s // o) - i * s // o for i in range(o)) for s, o in zip(whole, windows, strict=True))


# --- memory -----------------------------------------------------------------------------------------------------------


def _im2col(call: Call) -> Events | None:
    """`im2col_cpu`, `im2col_cuda`: the result begins as large as the input, and is there beside the one it grows to."""
    before = call.layout().nbytes
    return (alloc("result before it grows", before), output("result")) if call.made.nbytes > before else None


def _upsample(taps: int) -> ScratchRule:
    """`upsample_generic_Nd_kernel_impl` (cpu/UpSampleKernel.cpp): place and weight of each tap, by output position."""

    def rule(call: Call) -> Events | None:
        made = call.made
        if made.memory_format() is MemoryFormat.CHANNELS_LAST and made.shape[1] > 3:
            return None
        nbytes = taps * sum(made.shape[2:]) * (8 + max(4, ITEM_BYTES[made.dtype]))
        return output("result"), alloc("places and weights", nbytes)

    return rule


def _upsample_image(taps: int) -> ScratchRule:
    """`_use_vectorized_kernel_cond_2d` (cpu/UpSampleKernel.cpp): small images are computed as channels-last copies."""
    large = _upsample(taps)

    def rule(call: Call) -> HiddenMemory | Iterable[HiddenEvent] | None:
        source, made = call.layout(), call.made
        if sum(made.shape[2:]) > 128:
            return large(call)
        copied = [each for each in (source, made) if not each.is_contiguous(MemoryFormat.CHANNELS_LAST)]
        events = (alloc(f"channels-last copy {number}", each.nbytes) for number, each in enumerate(copied, 1))
        return output("result"), *events

    return rule


def _nearest_on_card(call: Call) -> Events | None:
    """cuda/UpSampleNearest*.cu: what does not have its channels last is read and written dense."""
    source, made = call.layout(), call.made
    if source.shape == made.shape or _has_channels_last_kernel(source):
        return None
    copied = (("dense result", made), ("dense input", source))
    return output("result"), *(alloc(name, each.nbytes) for name, each in copied if not each.is_contiguous())


def _nearest_backward_on_card(call: Call) -> Events | None:
    """As `_nearest_on_card`, of the gradient."""
    gradient = call.layout()
    if gradient.is_contiguous() or gradient.shape == call.made.shape or _has_channels_last_kernel(gradient):
        return None
    return output("result"), alloc("dense gradient", gradient.nbytes)


def _has_channels_last_kernel(source: TensorLayout) -> bool:
    return (
        source.rank == 4
        and source.shape[1] >= 4
        and source.is_contiguous(MemoryFormat.CHANNELS_LAST)
        and (source.memory_format() is MemoryFormat.CHANNELS_LAST)
    )


def _grid_sample_backward_on_cpu(call: Call) -> Events | None:
    """`grid_sampler_2d_backward_cpu_kernel_impl` (cpu/GridSamplerKernel.cpp): reads a dense gradient."""
    copied = dense_gradient(call)
    return None if copied is None else (*(output("gradient") for _ in call.results), *copied[1:])


def _max_pool_backward_on_cpu(call: Call) -> Events | None:
    """`max_pool2d_backward_kernel_impl` (cpu/MaxPoolKernel.cpp): the layout of the output's gradient decides in which
    all three are read or written; those in another are copied, the indices and the result among them."""
    gradient = call.layout()
    laid_out = gradient.memory_format()
    read = {"dense gradient": gradient, "dense indices": call.layout(7), "dense result": call.made}
    copies = tuple(alloc(name, each.nbytes) for name, each in read.items() if not each.is_contiguous(laid_out))
    return (output("result"), *copies) if copies else None


# --- the rows ---------------------------------------------------------------------------------------------------------

# Gradients that meet in one place are added: each once …
_ADDED, _ADDED_DENSE = Operator((1, 0)), Operator((1, 0), cpu=dense_gradient)
_SKIPS = Operator(uncounted="points outside the input are skipped")

ROWS = {
    "Pooling.cpp, DilatedMaxPool*.cpp, AveragePool*.cpp, AdaptiveAveragePooling*.cpp, AdaptiveMaxPooling*.cpp": {
        "max_pool1d": _max_pool(1),
        "max_pool2d_with_indices": _max_pool(2),
        "max_pool3d_with_indices": _max_pool(3),
        "max_pool2d_with_indices_backward": Operator((1, 0), cpu=_max_pool_backward_on_cpu),
        "max_pool3d_with_indices_backward": _ADDED_DENSE,
        "avg_pool2d": Operator(_average_pool(2)),
        "avg_pool3d": Operator(_average_pool(3)),
        "avg_pool2d_backward": _average_pool_backward(2),
        "avg_pool3d_backward": _average_pool_backward(3),
        "adaptive_max_pool2d adaptive_max_pool3d": Operator(
            lambda c: _window_elements(c.self.shape, c.result[0].shape)
        ),
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward": _ADDED_DENSE,
        "_adaptive_avg_pool2d _adaptive_avg_pool3d": Operator(
            lambda c: _window_elements(c.self.shape, c.result.shape) + c.made
        ),
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward": Operator(
            lambda c: _window_elements(c.self.shape, c.grad_output.shape) + c.read, cpu=dense_gradient
        ),
        "fractional_max_pool*": Operator(scratch=undetermined),  # with samples by thread
    },
    "ReflectionPad.cpp, ReplicationPadding.cpp, PixelShuffle.cpp, ChanelShuffle.cpp": {
        "reflection_pad1d reflection_pad2d reflection_pad3d": Operator(0),
        "replication_pad1d replication_pad2d replication_pad3d": Operator(0),
        """reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward""": _ADDED_DENSE,
        "constant_pad_nd channel_shuffle": Operator(0),
        "pixel_shuffle pixel_unshuffle": Operator(0, cpu=dense_gradient),
    },
    "Im2Col.cpp, Col2Im.cpp, cuda/Im2Col.cu, cuda/Col2Im.cu, UnfoldBackward.cpp": {
        "im2col": Operator(0, scratch=_im2col),
        "col2im": Operator((1, 0), copies=((), (0,))),
        "unfold_backward": _ADDED,
    },
    "UpSample*.cpp, cpu/UpSampleKernel.cpp": {
        "upsample_nearest1d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact3d": Operator(
            0, cpu=_upsample(1), cuda=_nearest_on_card
        ),
        "upsample_nearest2d _upsample_nearest_exact2d": Operator(0, cpu=_upsample_image(1), cuda=_nearest_on_card),
        """upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward""": replace(_ADDED_DENSE, cuda=_nearest_backward_on_card),
        "upsample_linear1d": Operator(3, cpu=_upsample(2)),
        # two rows of two points and a column, 3 each (2 products, 1 sum)
        "upsample_bilinear2d": Operator(9, cpu=_upsample_image(2)),
        "upsample_trilinear3d": Operator(21, cpu=_upsample(2)),  # two planes and a pair
        # four rows of four points and a column, 7 each (4 products, 3 sums)
        "upsample_bicubic2d": Operator(35, cpu=_upsample(4)),
        # … or to each of the points it was made of, after a product per dimension.
        "upsample_linear1d_backward": Operator((4, 0), cpu=dense_gradient),
        "upsample_bilinear2d_backward": Operator((12, 0), cpu=dense_gradient),
        "upsample_trilinear3d_backward": Operator((32, 0), cpu=dense_gradient),
        "upsample_bicubic2d_backward": Operator((48, 0), cpu=dense_gradient),
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa": Operator(scratch=undetermined),
    },
    "AffineGridGenerator.cpp, GridSampler.cpp, cpu/GridSamplerKernel.cpp": {
        "affine_grid_generator": Operator(lambda c: 2 * c.theta.shape[-1] * c.made),  # homogeneous coordinates by theta
        "grid_sampler_2d grid_sampler_3d grid_sampler_3d_backward": _SKIPS,
        "grid_sampler_2d_backward": replace(_SKIPS, cpu=_grid_sample_backward_on_cpu),
    },
}
