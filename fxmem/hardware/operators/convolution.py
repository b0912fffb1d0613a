"""Which cuDNN calls torch makes for a convolution, and what it allocates around them.

Read in torch 2.11 (the sources named below; what changed between releases was checked against the 2.11 binary):
- `aten/src/ATen/native/Convolution.cpp`: `_select_conv_backend`, `use_cudnn`, `use_cudnn_depthwise`,
  `check_cudnn_depthwise_workload_with_filter`, `_convolution`, `convolution_backward`;
- `aten/src/ATen/native/ConvUtils.h`: `cudnn_conv_suggest_memory_format`, `conv_output_size`, `conv_input_size`;
- `aten/src/ATen/native/cudnn/ConvShared.cpp`: the contiguous copies; `grad_input` first, then `grad_weight`;
- `aten/src/ATen/native/cudnn/Conv_v8.cpp`: `run_conv_plan` allocates the workspace through the caching allocator, after
  the output and after every contiguous copy, and frees it when the kernel is queued; each cuDNN call has its own.

Not modelled: `torch.backends.cudnn.benchmark` (the fastest plan wins, not the first), MIOpen, complex convolutions
(torch splits them into real ones before this op), storages at addresses that are not a multiple of 32 bytes.

Running torch's own choice on fake CUDA tensors is no substitute: with no GPU it answers that bfloat16 and dilated
convolutions do not go to cuDNN, because it asks the (missing) device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from math import prod
from typing import Literal, cast

from fxmem.hardware.hidden_memory import ConvSignature, HiddenEvent, HiddenMemory, alloc, free, output
from fxmem.hardware.operators.reductions import reduction_events
from fxmem.hardware.operators.registry import Call, ConvSettings, NamedCall, Operator
from fxmem.hardware.tensor_layouts import ITEM_BYTES, MemoryFormat, TensorLayout, fix_size_one_strides
from fxmem.records.profile import Record, Target

_CUDNN_DTYPES = ("float16", "bfloat16", "float32", "float64")
_CONTIGUOUS_1D = "contiguous 1-d input"
_INT_MAX = 2**31 - 1
_CONTIGUOUS, _CHANNELS_LAST = MemoryFormat.CONTIGUOUS, MemoryFormat.CHANNELS_LAST


class ConvBackend(StrEnum):
    """torch's `_ConvBackend`, as far as a CUDA tensor can reach it."""

    CUDNN = "Cudnn"
    CUDNN_TRANSPOSE = "CudnnTranspose"
    CUDA_DEPTHWISE_2D = "CudaDepthwise2d"
    CUDA_DEPTHWISE_3D = "CudaDepthwise3d"
    EMPTY = "Empty"
    SLOW_2D = "Slow2d"
    SLOW_DILATED_2D = "SlowDilated2d"
    SLOW_DILATED_3D = "SlowDilated3d"
    SLOW_TRANSPOSE_2D = "SlowTranspose2d"
    SLOW_TRANSPOSE_3D = "SlowTranspose3d"


class ConvolutionMemory(HiddenMemory):
    """The hidden memory of one convolution op."""

    backend: ConvBackend


class _Window(Record):
    """The parameters of a convolution, one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def is_dilated(self) -> bool:
        return any(step != 1 for step in self.dilation)

    @property
    def output_padding_big(self) -> bool:
        return any(pad >= step for pad, step in zip(self.output_padding, self.stride, strict=True))

    def as_2d(self) -> _Window:
        """`view1d_as_2d`."""
        update = {
            "stride": (1, *self.stride),
            "padding": (0, *self.padding),
            "dilation": (1, *self.dilation),
            "output_padding": (0, *self.output_padding),
        }
        return self.model_copy(update=update)

    def narrow_shape(self, wide: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
        """`conv_output_size`: the result of a convolution of `wide`."""
        spatial = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1
            for size, kernel, pad, step, dilation in zip(
                wide[2:], weight[2:], self.padding, self.stride, self.dilation, strict=True
            )
        )
        return (wide[0], weight[0], *spatial)

    def wide_shape(self, narrow: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
        """`conv_input_size`: the result of a transposed convolution of `narrow`."""
        spatial = (
            (size - 1) * step - 2 * pad + dilation * (kernel - 1) + 1 + extra
            for size, kernel, pad, step, dilation, extra in zip(
                narrow[2:], weight[2:], self.padding, self.stride, self.dilation, self.output_padding, strict=True
            )
        )
        return (narrow[0], weight[1] * self.groups, *spatial)

    def result_shape(self, source: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
        return (self.wide_shape if self.transposed else self.narrow_shape)(source, weight)


def select_backend(
    source: TensorLayout, weight: TensorLayout, window: _Window, target: Target, settings: ConvSettings
) -> ConvBackend:
    """`_select_conv_backend` for CUDA tensors of rank 4 or 5. It asks about the target's hardware, not the
    machine's."""
    if 0 in source.shape[:2]:
        return ConvBackend.EMPTY
    flat = source.rank == 4
    depthwise = (
        not window.transposed and source.shape[1] == window.groups > 1 and weight.shape[0] % source.shape[1] == 0
    )
    if depthwise:
        if _uses_cudnn_depthwise(source, weight, window, target, settings):
            return ConvBackend.CUDNN
        return ConvBackend.CUDA_DEPTHWISE_2D if flat else ConvBackend.CUDA_DEPTHWISE_3D
    if _uses_cudnn(source, weight, window, target, settings):
        return ConvBackend.CUDNN_TRANSPOSE if window.transposed else ConvBackend.CUDNN
    if window.transposed:
        return ConvBackend.SLOW_TRANSPOSE_2D if flat else ConvBackend.SLOW_TRANSPOSE_3D
    if not flat:
        return ConvBackend.SLOW_DILATED_3D
    return ConvBackend.SLOW_DILATED_2D if window.is_dilated else ConvBackend.SLOW_2D


def _uses_cudnn(
    source: TensorLayout, weight: TensorLayout, window: _Window, target: Target, settings: ConvSettings
) -> bool:
    """`ConvParams::use_cudnn`."""
    half = source.dtype in ("float16", "bfloat16")
    wrong_3d_kernels = (
        90800 <= settings.cudnn_version < 91500 and half and weight.rank == 5 and set(weight.shape[2:]) != {1}
    )
    if not settings.enabled or (wrong_3d_kernels and _format(source, weight) is _CONTIGUOUS):
        return False
    per_sample = (
        max(source.numel // source.shape[0], prod(window.result_shape(source.shape, weight.shape)[1:]))
        if source.numel
        else 0
    )
    if per_sample > _INT_MAX and settings.cudnn_version < 90300:
        return False
    if "bfloat16" in (source.dtype, weight.dtype) and _capability(target) < (8, 0):
        return False
    return not window.output_padding_big


def _uses_cudnn_depthwise(
    source: TensorLayout, weight: TensorLayout, window: _Window, target: Target, settings: ConvSettings
) -> bool:
    """`ConvParams::use_cudnn_depthwise`."""
    if not settings.enabled:
        return False
    channels_last = _format(source, weight) is _CHANNELS_LAST
    if not (source.fits_32bit_index() and weight.fits_32bit_index()):
        broken = channels_last and 91000 < settings.cudnn_version < 91500
        return settings.cudnn_version >= 90300 and not broken
    if channels_last:
        return True
    square_or_1d = window.stride[0] == window.stride[1] or source.shape[2] == 1
    return (
        _capability(target) >= (7, 0)
        and _uses_cudnn(source, weight, window, target, settings)
        and source.dtype == weight.dtype == "float16"
        and source.rank == 4
        and not window.is_dilated
        and square_or_1d
        and source.shape[1] >= 32
        and _depthwise_workload_suits_cudnn(source.shape, weight.shape, window.stride[1])
    )


def _depthwise_workload_suits_cudnn(source: tuple[int, ...], weight: tuple[int, ...], stride: int) -> bool:
    """`check_cudnn_depthwise_workload_with_filter`."""
    batch, channels, height, width = source
    kernel = weight[3]
    if height == 1 and stride == 1:
        return True
    if weight[2] != kernel or kernel not in (1, 3, 5) or width < 7 or stride not in (1, 2):
        return False
    if stride == 1:
        return True
    if batch == 1:
        return kernel in (3, 5) or width <= 28
    if kernel == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def _forward(
    source: TensorLayout, weight: TensorLayout, window: _Window, target: Target, settings: ConvSettings
) -> ConvolutionMemory:
    events: tuple[HiddenEvent, ...] = ()
    if weight.rank == 3:
        events += _copy_events(_CONTIGUOUS_1D, source, _CONTIGUOUS)
        source, weight, window = source.contiguous().unsqueeze(2), weight.unsqueeze(2), window.as_2d()
    backend = select_backend(source, weight, window, target, settings)
    if backend in (ConvBackend.CUDNN, ConvBackend.CUDNN_TRANSPOSE) and source.dtype in _CUDNN_DTYPES:
        wanted = _format(source, weight)
        events += _copy_events("input in the backend's memory format", source, wanted)
        events += _cudnn_forward(source.contiguous(wanted), weight, window, settings)
    elif backend in (ConvBackend.CUDA_DEPTHWISE_2D, ConvBackend.CUDA_DEPTHWISE_3D):
        events += (
            *_copy_events("dense input", source, _CONTIGUOUS),
            *_copy_events("dense weight", weight, _CONTIGUOUS),
            output("result"),
        )
    elif backend is ConvBackend.SLOW_2D and window.groups == 1:
        events += (
            *_copy_events("dense input", source, _CONTIGUOUS),
            *_copy_events("dense weight", weight, _CONTIGUOUS),
            output("result"),
            *(_columns(source, weight, window) if _is_more_than_a_product(weight, window) else ()),
        )
    else:
        events += (output("result"), *_native_scratch(backend))
    return ConvolutionMemory(events=events, backend=backend)


def _backward(
    grad: TensorLayout,
    source: TensorLayout,
    weight: TensorLayout,
    window: _Window,
    mask: tuple[bool, bool, bool],
    target: Target,
    settings: ConvSettings,
) -> ConvolutionMemory:
    """`convolution_backward`. The bias gradient is a sum over `grad_output` and comes last."""
    events: tuple[HiddenEvent, ...] = ()
    if weight.rank == 3:
        events += _copy_events(_CONTIGUOUS_1D, source, _CONTIGUOUS)
        grad, source, weight, window = (
            grad.unsqueeze(2),
            source.contiguous().unsqueeze(2),
            weight.unsqueeze(2),
            window.as_2d(),
        )
    backend = select_backend(source, weight, window, target, settings)
    grads = tuple(output(name) for name, wanted in zip(("grad_input", "grad_weight"), mask, strict=False) if wanted)
    if backend in (ConvBackend.CUDNN, ConvBackend.CUDNN_TRANSPOSE) and source.dtype in _CUDNN_DTYPES:
        dense = source
        if mask[1]:
            wanted = _format(source, weight)
            events += _copy_events("input in the backend's memory format", source, wanted)
            dense = source.contiguous(wanted)
        events += _cudnn_backward(grad, dense, weight, window, mask, settings)
    elif backend is ConvBackend.CUDA_DEPTHWISE_2D:
        events += (
            *_copy_events("dense grad_output", grad, _CONTIGUOUS),
            *_copy_events("dense input", source, _CONTIGUOUS),
            *grads,
        )
    elif backend is ConvBackend.SLOW_2D and window.groups == 1:
        events += (
            *_copy_events("dense grad_output", grad, _CONTIGUOUS),
            *_copy_events("dense input", source, _CONTIGUOUS),
            *_copy_events("dense weight", weight, _CONTIGUOUS),
            *grads[:1],
            *_columns(source, weight, window),
            *grads[1:],
        )
    else:
        events += (*grads, *_native_scratch(backend))
    if mask[2]:
        # A 1-d input's copy replaces the argument for the whole op; the rest went with the convolutions.
        ended = {event.name for event in events if event.action == "free"} | {_CONTIGUOUS_1D}
        events += (
            *free(*(event.name for event in events if event.action == "alloc" and event.name not in ended)),
            output("grad_bias"),
            *reduction_events(grad, (0, *range(2, grad.rank)), max(4, ITEM_BYTES[grad.dtype]), target),
        )
    return ConvolutionMemory(events=events, backend=backend)


def _cudnn_forward(
    source: TensorLayout, weight: TensorLayout, window: _Window, settings: ConvSettings
) -> tuple[HiddenEvent, ...]:
    """`cudnn_convolution` and `cudnn_convolution_transpose`."""
    result = replace(source, shape=window.result_shape(source.shape, weight.shape)).dense(_format(source, weight))
    if window.transposed:
        return (
            output("result"),
            *_call("dgrad", result, weight, source, window, settings, fixed=result, wanted=_format(source, weight)),
        )
    return (
        output("result"),
        *_call("fwd", source, weight, result, window, settings, fixed=result, wanted=result.memory_format()),
    )


def _cudnn_backward(
    grad: TensorLayout,
    source: TensorLayout,
    weight: TensorLayout,
    window: _Window,
    mask: tuple[bool, bool, bool],
    settings: ConvSettings,
) -> tuple[HiddenEvent, ...]:
    """`cudnn_convolution_backward` and `cudnn_convolution_transpose_backward`."""
    events: tuple[HiddenEvent, ...] = ()
    wanted = source.memory_format()
    if window.transposed:
        events += _copy_events("grad_output in the input's memory format", grad, wanted)
        grad = grad.contiguous(wanted)
    elif grad.memory_format() is not wanted:
        # `Tensor.to(memory_format)` looks at the suggested format, not at density: an expanded gradient passes.
        events += (alloc("grad_output in the input's memory format", grad.nbytes),)
        grad = grad.dense(wanted)
    if mask[0]:
        layout = _format(grad, weight)
        result = source.dense(layout)
        events += (output("grad_input"),)
        if window.transposed:
            events += _call("fwd", grad, weight, result, window, settings, fixed=result, wanted=result.memory_format())
        else:
            events += _call("dgrad", result, weight, grad, window, settings, fixed=result, wanted=layout)
    if mask[1]:
        layout = _format(source, grad)
        wide, narrow = (grad, source) if window.transposed else (source, grad)
        copies = (*_copy_events("dense narrow side", narrow, layout), *_copy_events("dense wide side", wide, layout))
        result = weight.dense(layout)
        call = _call(
            "wgrad",
            wide.contiguous(layout),
            result,
            narrow.contiguous(layout),
            window,
            settings,
            fixed=result,
            wanted=layout,
        )
        events += (*copies, output("grad_weight"), *call, *free(*(event.name for event in copies)))
    return events


def _call(
    op: Literal["fwd", "dgrad", "wgrad"],
    wide: TensorLayout,
    weight: TensorLayout,
    narrow: TensorLayout,
    window: _Window,
    settings: ConvSettings,
    *,
    fixed: TensorLayout,
    wanted: MemoryFormat,
) -> tuple[HiddenEvent, ...]:
    """One cuDNN call: dense copies of what is not the result, then the workspace; all of it goes when the call is
    queued."""
    if 0 in fixed.shape:
        return ()
    copies: tuple[HiddenEvent, ...] = ()
    if op != "wgrad":
        operand = wide if fixed is narrow else narrow
        copies = (*_copy_events("dense weight", weight, wanted), *_copy_events("dense operand", operand, wanted))
        weight = weight.contiguous(wanted)
        wide, narrow = (wide.contiguous(wanted), narrow) if fixed is narrow else (wide, narrow.contiguous(wanted))
    layout = _format(wide, weight)
    strides = {
        side: fix_size_one_strides(tensor.shape, tensor.stride, layout)
        for side, tensor in (("x", wide), ("w", weight), ("y", narrow))
    }
    signature = ConvSignature(
        op=op, x=wide.shape, x_stride=strides["x"], w=weight.shape, w_stride=strides["w"], y=narrow.shape,
        y_stride=strides["y"],
        padding=window.padding, stride=window.stride, dilation=window.dilation, groups=window.groups,
        dtype=cast("Literal['float16', 'bfloat16', 'float32', 'float64']", wide.dtype),
        allow_tf32=settings.allow_tf32, deterministic=settings.deterministic,
    )  # fmt: skip
    name = f"cuDNN {op} workspace"
    return (*copies, alloc(name, None, signature), *free(name, *(event.name for event in copies)))


def _format(first: TensorLayout, second: TensorLayout) -> MemoryFormat:
    """`cudnn_conv_suggest_memory_format`."""
    if "float64" in (first.dtype, second.dtype) or second.rank not in (4, 5):
        return _CONTIGUOUS
    return _CHANNELS_LAST if _CHANNELS_LAST in (first.memory_format(), second.memory_format()) else _CONTIGUOUS


def _copy_events(name: str, tensor: TensorLayout, wanted: MemoryFormat) -> tuple[HiddenEvent, ...]:
    return () if tensor.is_contiguous(wanted) else (alloc(name, tensor.nbytes),)


def _columns(source: TensorLayout, weight: TensorLayout, window: _Window) -> tuple[HiddenEvent, ...]:
    """`slow_conv2d_forward`, `slow_conv2d_backward` (cuda/ConvolutionMM2d.cu): one image at a time is unfolded to
    columns, in one buffer for all; backward has it for any window."""
    positions = prod(window.narrow_shape(source.shape, weight.shape)[2:])
    return (alloc("columns of one image", prod(weight.shape[1:]) * positions * ITEM_BYTES[source.dtype]),)


def _is_more_than_a_product(weight: TensorLayout, window: _Window) -> bool:
    """Whether a window is more than a 1 x 1 product of dense images (`requires_columns`)."""
    return {*weight.shape[2:], *window.stride} != {1} or any(window.padding)


def _native_scratch(backend: ConvBackend) -> tuple[HiddenEvent, ...]:
    return () if backend is ConvBackend.EMPTY else (alloc(f"{backend.value} kernel's buffers", None),)


def _capability(target: Target) -> tuple[int, int]:
    return target.capability or (0, 0)


def _window(args: Sequence[object], weight: TensorLayout) -> _Window:
    """From `stride, padding, dilation, transposed, output_padding, groups`; a single number stands for every
    dimension."""
    stride, padding, dilation, transposed, output_padding, groups = args
    rank = weight.rank - 2

    def expand(value: object) -> tuple[int, ...]:
        numbers = tuple(int(number) for number in cast(Sequence[int], value))
        return numbers * rank if len(numbers) == 1 else numbers

    return _Window(
        stride=expand(stride),
        padding=expand(padding),
        dilation=expand(dilation),
        transposed=bool(transposed),
        output_padding=expand(output_padding),
        groups=int(cast(int, groups)),
    )


# --- the rows ---------------------------------------------------------------------------------------------------------


def _backward_flops(c: NamedCall) -> int:
    """Each of the gradients of input and weight costs the forward's multiply-adds. There is one for each number of the
    weight at each place that it is put; torch's formula takes the weight's for that of one group, and multiplies by
    their number."""
    narrow = c.input if c.transposed else c.grad_output
    forward: int = 2 * c.weight.numel * narrow.shape[0] * prod(narrow.shape[2:])
    return forward * sum(map(bool, c.output_mask[:2]))


def _convolution(call: Call) -> ConvolutionMemory:
    """Sizes of cuDNN's workspaces are open (`signatures`), to be asked for and filled in.

    The native kernels that torch falls back to get one buffer of unknown size, except the depthwise ones, which need
    none.
    """
    source, weight = call.layout(0), call.layout(1)
    return _forward(source, weight, _window(call.args[3:9], weight), call.card, call.platform.settings)


def _convolution_of_settings(call: Call) -> ConvolutionMemory:
    """The same with switches of its own."""
    _, deterministic, enabled, allow_tf32 = map(bool, call.args[9:13])
    own = {"deterministic": deterministic, "enabled": enabled, "allow_tf32": allow_tf32}
    platform = replace(call.platform, settings=call.platform.settings.model_copy(update=own))
    return _convolution(replace(call, platform=platform))


def _convolution_backward(call: Call) -> ConvolutionMemory:
    grad, source, weight = (call.layout(position) for position in range(3))
    wants_input, wants_weight, wants_bias = call.args[10]
    mask = (wants_input, wants_weight, wants_bias)
    window = _window(call.args[4:10], weight)
    return _backward(grad, source, weight, window, mask, call.card, call.platform.settings)


def _cudnn_convolution(call: Call) -> ConvolutionMemory:
    """cuDNN whatever the shapes, with switches of its own."""
    source, weight = call.layout(0), call.layout(1)
    transposed = call.name == "cudnn_convolution_transpose"
    padding, *rest = call.args[2:]
    output_padding = rest.pop(0) if transposed else (0,)
    stride, dilation, groups, _, deterministic, allow_tf32 = rest
    own = {"deterministic": bool(deterministic), "allow_tf32": bool(allow_tf32)}
    window = _window((stride, padding, dilation, transposed, output_padding, groups), weight)
    return ConvolutionMemory(
        events=_cudnn_forward(source, weight, window, call.platform.settings.model_copy(update=own)),
        backend=ConvBackend.CUDNN_TRANSPOSE if transposed else ConvBackend.CUDNN,
    )


ROWS = {
    "Convolution.cpp, cudnn/ConvShared.cpp, cudnn/Conv_v8.cpp": {
        "convolution": Operator(
            kind="convolution",
            counts_macs=True,
            is_product=True,
            one_dtype=(0, 1, 2),
            is_opaque=True,
            cuda=_convolution,
        ),
        "_convolution": Operator(
            kind="convolution", counts_macs=True, is_product=True, is_opaque=True, cuda=_convolution_of_settings
        ),
        "convolution_overrideable": Operator(kind="convolution", counts_macs=True, is_product=True),
        "mkldnn_convolution": Operator(kind="convolution", is_product=True),
        "cudnn_convolution": Operator(kind="convolution", counts_macs=True, is_opaque=True, cuda=_cudnn_convolution),
        "cudnn_convolution_transpose": Operator(is_opaque=True, cuda=_cudnn_convolution),
        "_slow_conv2d_forward": Operator(kind="convolution", counts_macs=True),
        "convolution_backward": Operator(
            _backward_flops, corrects_torch=True, is_opaque=True, cuda=_convolution_backward
        ),
    }
}
