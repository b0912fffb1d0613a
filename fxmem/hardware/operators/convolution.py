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
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Literal, NamedTuple, cast

from fxmem.hardware.hidden_memory import ConvSignature, Events, HiddenMemory, alloc, free, output
from fxmem.hardware.operators.reductions import reduction_events
from fxmem.hardware.operators.registry import Call, ConvSettings, NamedCall, Operator
from fxmem.hardware.tensor_layouts import ITEM_BYTES, MemoryFormat, TensorLayout, fix_size_one_strides
from fxmem.records.profile import Target

_CUDNN_DTYPES = ("float16", "bfloat16", "float32", "float64")
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


_CUDNN = ConvBackend.CUDNN, ConvBackend.CUDNN_TRANSPOSE


class ConvolutionMemory(HiddenMemory):
    """The hidden memory of one convolution op."""

    backend: ConvBackend


class _Window(NamedTuple):
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
        stride, padding, dilation, output_padding = self.stride, self.padding, self.dilation, self.output_padding
        return _Window((1, *stride), (0, *padding), (1, *dilation), self.transposed, (0, *output_padding), self.groups)

    def narrow_shape(self, wide: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
        """`conv_output_size`: the result of a convolution of `wide`."""
        sides = zip(wide[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True)
        spatial = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, dilation in sides
        )
        return (wide[0], weight[0], *spatial)

    def wide_shape(self, narrow: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
        """`conv_input_size`: the result of a transposed convolution of `narrow`."""
        sides = zip(narrow[2:], weight[2:], self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        spatial = (
            (size - 1) * step - 2 * pad + dilation * (kernel - 1) + 1 + extra
            for size, kernel, step, pad, dilation, extra in sides
        )
        return (narrow[0], weight[1] * self.groups, *spatial)

    def result_shape(self, source: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
        return (self.wide_shape if self.transposed else self.narrow_shape)(source, weight)


@dataclass(frozen=True)
class _Convolution:
    """One convolution: its input, and all that decides how it is computed."""

    source: TensorLayout
    weight: TensorLayout
    window: _Window
    target: Target
    settings: ConvSettings

    def as_2d(self) -> _Convolution:
        """Of a 1-d one, as which it is computed."""
        source, weight = self.source.contiguous().unsqueeze(2), self.weight.unsqueeze(2)
        return replace(self, source=source, weight=weight, window=self.window.as_2d())

    @property
    def backend(self) -> ConvBackend:
        """`_select_conv_backend` for CUDA tensors of rank 4 or 5. It asks about the target's hardware, not the
        machine's."""
        source, weight, window = self.source, self.weight, self.window
        if 0 in source.shape[:2]:
            return ConvBackend.EMPTY
        flat = source.rank == 4
        channels = source.shape[1]
        is_depthwise = channels == window.groups > 1 and weight.shape[0] % channels == 0
        if is_depthwise and not window.transposed:
            if self._uses_cudnn_depthwise():
                return ConvBackend.CUDNN
            return ConvBackend.CUDA_DEPTHWISE_2D if flat else ConvBackend.CUDA_DEPTHWISE_3D
        if self._uses_cudnn():
            return ConvBackend.CUDNN_TRANSPOSE if window.transposed else ConvBackend.CUDNN
        if window.transposed:
            return ConvBackend.SLOW_TRANSPOSE_2D if flat else ConvBackend.SLOW_TRANSPOSE_3D
        if not flat:
            return ConvBackend.SLOW_DILATED_3D
        return ConvBackend.SLOW_DILATED_2D if window.is_dilated else ConvBackend.SLOW_2D

    def _uses_cudnn(self) -> bool:
        """`ConvParams::use_cudnn`."""
        source, weight, settings = self.source, self.weight, self.settings
        half = source.dtype in ("float16", "bfloat16")
        wrong_3d_kernels = (
            90800 <= settings.cudnn_version < 91500 and half and weight.rank == 5 and set(weight.shape[2:]) != {1}
        )
        if not settings.enabled or (wrong_3d_kernels and _format(source, weight) is _CONTIGUOUS):
            return False
        result = self.window.result_shape(source.shape, weight.shape)
        per_sample = max(source.numel // source.shape[0], prod(result[1:])) if source.numel else 0
        if per_sample > _INT_MAX and settings.cudnn_version < 90300:
            return False
        if "bfloat16" in (source.dtype, weight.dtype) and (self.target.capability or (0, 0)) < (8, 0):
            return False
        return not self.window.output_padding_big

    def _uses_cudnn_depthwise(self) -> bool:
        """`ConvParams::use_cudnn_depthwise`."""
        source, weight, window, settings = self.source, self.weight, self.window, self.settings
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
            (self.target.capability or (0, 0)) >= (7, 0)
            and self._uses_cudnn()
            and source.dtype == weight.dtype == "float16"
            and source.rank == 4
            and not window.is_dilated
            and square_or_1d
            and source.shape[1] >= 32
            and _depthwise_workload_suits_cudnn(source.shape, weight.shape, window.stride[1])
        )

    def forward(self) -> ConvolutionMemory:
        """What it hides."""
        source, weight, window = self.source, self.weight, self.window
        if weight.rank == 3:
            return _after_copy_of_1d(source, self.as_2d().forward())
        backend = self.backend
        dense = (*_copy_events("dense input", source, _CONTIGUOUS), *_copy_events("dense weight", weight, _CONTIGUOUS))
        if backend in _CUDNN and source.dtype in _CUDNN_DTYPES:
            wanted = _format(source, weight)
            copy = _copy_events("input in the backend's memory format", source, wanted)
            events = (*copy, *replace(self, source=source.contiguous(wanted)).cudnn_forward())
        elif backend in (ConvBackend.CUDA_DEPTHWISE_2D, ConvBackend.CUDA_DEPTHWISE_3D):
            events = (*dense, output("result"))
        elif backend is ConvBackend.SLOW_2D and window.groups == 1:
            # `requires_columns`: more than a 1 x 1 product of dense images.
            unfolds = {*weight.shape[2:], *window.stride} != {1} or any(window.padding)
            events = (*dense, output("result"), *(self._columns() if unfolds else ()))
        else:
            events = (output("result"), *_native_scratch(backend))
        return ConvolutionMemory(events=events, backend=backend)

    def backward(self, grad: TensorLayout, mask: tuple[bool, bool, bool]) -> ConvolutionMemory:
        """What `convolution_backward` hides. The bias gradient is a sum over `grad_output` and comes last."""
        source, weight = self.source, self.weight
        if weight.rank == 3:
            return _after_copy_of_1d(source, self.as_2d().backward(grad.unsqueeze(2), mask))
        backend = self.backend
        events: Events
        grads = tuple(output(name) for name, wanted in zip(("grad_input", "grad_weight"), mask, strict=False) if wanted)
        read = (
            *_copy_events("dense grad_output", grad, _CONTIGUOUS),
            *_copy_events("dense input", source, _CONTIGUOUS),
        )
        if backend in _CUDNN and source.dtype in _CUDNN_DTYPES:
            wanted = _format(source, weight)
            copy = _copy_events("input in the backend's memory format", source, wanted) if mask[1] else ()
            dense = source.contiguous(wanted) if mask[1] else source
            events = (*copy, *replace(self, source=dense)._cudnn_backward(grad, mask))
        elif backend is ConvBackend.CUDA_DEPTHWISE_2D:
            events = (*read, *grads)
        elif backend is ConvBackend.SLOW_2D and self.window.groups == 1:
            copies = (*read, *_copy_events("dense weight", weight, _CONTIGUOUS))
            events = (*copies, *grads[:1], *self._columns(), *grads[1:])
        else:
            events = (*grads, *_native_scratch(backend))
        if mask[2]:
            ended = {event.name for event in events if event.action == "free"}
            events += (
                *free(*(event.name for event in events if event.action == "alloc" and event.name not in ended)),
                output("grad_bias"),
                *reduction_events(grad, (0, *range(2, grad.rank)), max(4, ITEM_BYTES[grad.dtype]), self.target),
            )
        return ConvolutionMemory(events=events, backend=backend)

    def cudnn_forward(self) -> Events:
        """`cudnn_convolution` and `cudnn_convolution_transpose`."""
        source, weight = self.source, self.weight
        shape = self.window.result_shape(source.shape, weight.shape)
        result = replace(source, shape=shape).dense(_format(source, weight))
        if self.window.transposed:
            return output("result"), *self._call("dgrad", result, weight, source)
        return output("result"), *self._call("fwd", source, weight, result)

    def _cudnn_backward(self, grad: TensorLayout, mask: tuple[bool, bool, bool]) -> Events:
        """`cudnn_convolution_backward` and `cudnn_convolution_transpose_backward`."""
        events: Events = ()
        source, weight, transposed = self.source, self.weight, self.window.transposed
        wanted = source.memory_format()
        if transposed:
            events += _copy_events("grad_output in the input's memory format", grad, wanted)
            grad = grad.contiguous(wanted)
        elif grad.memory_format() is not wanted:
            # `Tensor.to(memory_format)` looks at the suggested format, not at density: an expanded gradient passes.
            events += (alloc("grad_output in the input's memory format", grad.nbytes),)
            grad = grad.dense(wanted)
        if mask[0]:
            result = source.dense(_format(grad, weight))
            call = self._call("fwd", grad, weight, result) if transposed else self._call("dgrad", result, weight, grad)
            events += (output("grad_input"), *call)
        if mask[1]:
            layout = _format(source, grad)
            wide, narrow = (grad, source) if transposed else (source, grad)
            copies = (
                *_copy_events("dense narrow side", narrow, layout),
                *_copy_events("dense wide side", wide, layout),
            )
            sides = wide.contiguous(layout), weight.dense(layout), narrow.contiguous(layout)
            ends = free(*(event.name for event in copies))
            events += (*copies, output("grad_weight"), *self._call("wgrad", *sides), *ends)
        return events

    def _call(
        self, op: Literal["fwd", "dgrad", "wgrad"], wide: TensorLayout, weight: TensorLayout, narrow: TensorLayout
    ) -> Events:
        """One cuDNN call: dense copies of what is not the result, then the workspace; all of it goes when the call is
        queued."""
        result = {"fwd": narrow, "dgrad": wide, "wgrad": weight}[op]
        if 0 in result.shape:
            return ()
        copies: Events = ()
        if op != "wgrad":
            wanted = narrow.memory_format() if op == "fwd" else _format(narrow, weight)
            operand = wide if op == "fwd" else narrow
            copies = (*_copy_events("dense weight", weight, wanted), *_copy_events("dense operand", operand, wanted))
            weight = weight.contiguous(wanted)
            wide, narrow = (wide.contiguous(wanted), narrow) if op == "fwd" else (wide, narrow.contiguous(wanted))
        layout, window = _format(wide, weight), self.window
        x, w, y = (fix_size_one_strides(each.shape, each.stride, layout) for each in (wide, weight, narrow))
        signature = ConvSignature(
            op=op, x=wide.shape, x_stride=x, w=weight.shape, w_stride=w, y=narrow.shape, y_stride=y,
            padding=window.padding, stride=window.stride, dilation=window.dilation, groups=window.groups,
            dtype=cast("Literal['float16', 'bfloat16', 'float32', 'float64']", wide.dtype),
            allow_tf32=self.settings.allow_tf32, deterministic=self.settings.deterministic,
        )  # fmt: skip
        name = f"cuDNN {op} workspace"
        return (*copies, alloc(name, None, signature), *free(name, *(event.name for event in copies)))

    def _columns(self) -> Events:
        """`slow_conv2d_forward`, `slow_conv2d_backward` (cuda/ConvolutionMM2d.cu): one image at a time is unfolded to
        columns, in one buffer for all; backward has it for any window."""
        source, weight = self.source, self.weight
        positions = prod(self.window.narrow_shape(source.shape, weight.shape)[2:])
        return (alloc("columns of one image", prod(weight.shape[1:]) * positions * ITEM_BYTES[source.dtype]),)


def _after_copy_of_1d(source: TensorLayout, memory: ConvolutionMemory) -> ConvolutionMemory:
    """A 1-d input's copy replaces the argument for the whole op."""
    copy = _copy_events("contiguous 1-d input", source, _CONTIGUOUS)
    return memory.model_copy(update={"events": (*copy, *memory.events)})


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


def _format(first: TensorLayout, second: TensorLayout) -> MemoryFormat:
    """`cudnn_conv_suggest_memory_format`."""
    if "float64" in (first.dtype, second.dtype) or second.rank not in (4, 5):
        return _CONTIGUOUS
    return _CHANNELS_LAST if _CHANNELS_LAST in (first.memory_format(), second.memory_format()) else _CONTIGUOUS


def _copy_events(name: str, tensor: TensorLayout, wanted: MemoryFormat) -> Events:
    return () if tensor.is_contiguous(wanted) else (alloc(name, tensor.nbytes),)


def _native_scratch(backend: ConvBackend) -> Events:
    return () if backend is ConvBackend.EMPTY else (alloc(f"{backend.value} kernel's buffers", None),)


def _window(args: Sequence[object], weight: TensorLayout) -> _Window:
    """From `stride, padding, dilation, transposed, output_padding, groups`; a single number stands for every
    dimension."""
    stride, padding, dilation, transposed, output_padding, groups = args

    def expand(value: object) -> tuple[int, ...]:
        numbers = tuple(int(number) for number in cast(Sequence[int], value))
        return numbers * (weight.rank - 2) if len(numbers) == 1 else numbers

    own = expand(stride), expand(padding), expand(dilation)
    return _Window(*own, bool(transposed), expand(output_padding), int(cast(int, groups)))


# --- the rows ---------------------------------------------------------------------------------------------------------


def _backward_flops(c: NamedCall) -> int:
    """Each of the gradients of input and weight costs the forward's multiply-adds. There is one for each number of the
    weight at each place that it is put; torch's formula takes the weight's for that of one group, and multiplies by
    their number."""
    narrow = c.input if c.transposed else c.grad_output
    forward: int = 2 * c.weight.numel * narrow.shape[0] * prod(narrow.shape[2:])
    return forward * sum(map(bool, c.output_mask[:2]))


def _read(call: Call, *, first: int, window: int, **own: bool) -> _Convolution:
    """The convolution of a call, whose input is its argument `first`, under switches of its own if it has such."""
    source, weight, settings = call.layout(first), call.layout(first + 1), call.platform.settings
    parameters = _window(call.args[window : window + 6], weight)
    return _Convolution(source, weight, parameters, call.card, settings.model_copy(update=own))


def _convolution(call: Call) -> ConvolutionMemory:
    """Sizes of cuDNN's workspaces are open (`signatures`), to be asked for and filled in.

    The native kernels that torch falls back to get one buffer of unknown size, except the depthwise ones, which need
    none.
    """
    return _read(call, first=0, window=3).forward()


def _convolution_of_settings(call: Call) -> ConvolutionMemory:
    """The same with switches of its own."""
    _, deterministic, enabled, allow_tf32 = map(bool, call.args[9:13])
    own = {"deterministic": deterministic, "enabled": enabled, "allow_tf32": allow_tf32}
    return _read(call, first=0, window=3, **own).forward()


def _convolution_backward(call: Call) -> ConvolutionMemory:
    wants_input, wants_weight, wants_bias = call.args[10]
    return _read(call, first=1, window=4).backward(call.layout(0), (wants_input, wants_weight, wants_bias))


def _cudnn_convolution(call: Call) -> ConvolutionMemory:
    """cuDNN whatever the shapes, with switches of its own."""
    transposed = call.name == "cudnn_convolution_transpose"
    padding, *rest = call.args[2:]
    output_padding = rest.pop(0) if transposed else (0,)
    stride, dilation, groups, _, deterministic, allow_tf32 = rest
    own = {"deterministic": bool(deterministic), "allow_tf32": bool(allow_tf32)}
    source, weight, settings = call.layout(0), call.layout(1), call.platform.settings.model_copy(update=own)
    window = _window((stride, padding, dilation, transposed, output_padding, groups), weight)
    events = _Convolution(source, weight, window, call.card, settings).cudnn_forward()
    return ConvolutionMemory(events=events, backend=ConvBackend.CUDNN_TRANSPOSE if transposed else ConvBackend.CUDNN)


_CONVOLUTION = Operator(kind="convolution", counts_macs=True)
_PRODUCT = replace(_CONVOLUTION, is_product=True)

ROWS = {
    "Convolution.cpp, cudnn/ConvShared.cpp, cudnn/Conv_v8.cpp": {
        "convolution": replace(_PRODUCT, one_dtype=(0, 1, 2), is_opaque=True, cuda=_convolution),
        "_convolution": replace(_PRODUCT, is_opaque=True, cuda=_convolution_of_settings),
        "convolution_overrideable": _PRODUCT,
        "mkldnn_convolution": Operator(kind="convolution", is_product=True),
        "cudnn_convolution": replace(_CONVOLUTION, is_opaque=True, cuda=_cudnn_convolution),
        "cudnn_convolution_transpose": Operator(is_opaque=True, cuda=_cudnn_convolution),
        "_slow_conv2d_forward": _CONVOLUTION,
        "convolution_backward": Operator(
            _backward_flops, corrects_torch=True, is_opaque=True, cuda=_convolution_backward
        ),
    }
}
