"""What some operators return on a card, where torch's FakeTensor kernels differ or are missing.

Each is given to FakeTensorMode by `_torch.kernels.override_fake_kernels`, takes the operator and its arguments, runs in
that mode and returns FakeTensors of the sizes, strides and dtypes the CUDA kernel would; NotImplemented leaves a call
to torch. Kept to what the step's memory needs: checks of arguments are torch's. They stand by the families of
`fxmem.hardware.operators`, which knows all that needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem.hardware.operators import OPERATORS
from fxmem.hardware.tensor_layouts import MemoryFormat, read_layout
from fxmem.simulation.asked import known_values

aten = torch.ops.aten
Kernel = Callable[..., Any]

EVERYWHERE: Final[dict[Any, Kernel]] = {}
"""Results on the CPU as on a card; the recorder asks here, because FakeTensorMode prefers its decompositions of some of
them."""
FAKE_KERNELS: Final[dict[Any, Kernel]] = {}
"""Results on a card, by operator: `implementation(mode, operator, *args, **kwargs)`."""


def answers(names: str, *, everywhere: bool = False) -> Callable[[Kernel], Kernel]:
    """Register a kernel for these operators of ATen, as far as torch has them; an operator has one.

    Args:
        names: with the overload, where that is not the default one.
        everywhere: on the CPU too.
    """
    table = EVERYWHERE if everywhere else FAKE_KERNELS

    def register(kernel: Kernel) -> Kernel:
        for name in names.split():
            packet, _, overload = name.partition(".")
            func = getattr(getattr(aten, packet, None), overload or "default", None)
            if func in table:
                raise ValueError(f"expected one kernel for {name}, got a second one")
            if func is not None:
                table[func] = _in_mode(kernel)
        return kernel

    return register


def _in_mode(kernel: Kernel) -> Kernel:
    """`kernel(operator, ...)` as the tables have it."""

    def run(fakes: torch_common.FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with fakes:
            return kernel(*args, **kwargs)

    return run


# --- Least squares ----------------------------------------------------------------------------------------------------


@answers("linalg_lstsq", everywhere=True)
def _least_squares(
    _: Any, matrix: Tensor, other: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, ...]:
    """`linalg_lstsq_out` (BatchLinearAlgebra.cpp): the solution lies in what held `other`, by columns. The sizes of the
    rest depend on the driver, and with some of them on the rank: taken as full."""
    rows, columns = matrix.shape[-2:]
    is_vector = other.dim() == 1 or (matrix.dim() - 1 == other.dim() and other.shape == matrix.shape[:-1])
    right = other.unsqueeze(-1) if is_vector else other
    batch: Any = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    driver = driver or ("gels" if matrix.is_cuda else "gelsy")
    solution = matrix.new_empty((*batch, right.shape[-1], max(rows, columns))).mT.narrow(-2, 0, columns)
    real = matrix.real.dtype if matrix.is_complex() else matrix.dtype
    residuals = matrix.new_empty((*batch, right.shape[-1]) if rows > columns and driver != "gelsy" else 0, dtype=real)
    rank = matrix.new_empty(batch if driver != "gels" else 0, dtype=torch.int64)
    values = matrix.new_empty((*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else 0, dtype=real)
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, values


# --- Strides of dimensions of size 1 ----------------------------------------------------------------------------------
# They say nothing of where elements lie, and yet torch asks them whether a tensor is one with channels last
# (`is_channels_last_strides_2d`, c10/core/MemoryFormat.h). So an image of a batch of one that was a sequence before, as
# attention leaves it in autoencoders of diffusion models, has its channels last and is upsampled to one that has not.


@answers("view _unsafe_view", everywhere=True)
def _view(_: Any, source: Tensor, shape: Any) -> Any:
    """`computeStride` (aten/src/ATen/TensorUtils.cpp); torch's own for fakes splits dimensions one by one, and raises
    a ValueError of other words where there is no view: a program that catches a card's RuntimeError would end."""
    if source.is_contiguous():
        return NotImplemented
    with torch_common.no_modes():
        made = torch.empty_strided(source.shape, source.stride(), device="meta").view(shape)
    return source.as_strided(made.shape, made.stride())


@answers("add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Scalar remainder.Scalar", everywhere=True)
def _with_number(_: Any, source: Any, other: Any, **__: Any) -> Any:
    """A number has another shape than a tensor, so that `TensorIterator` keeps the strides as they are; torch's own for
    fakes (`fast_binary_impl`, torch/_subclasses/fake_impls.py) makes those of the memory format."""
    if not isinstance(other, int | float) or not isinstance(source, Tensor) or not source.is_floating_point():
        return NotImplemented
    return _as_it_lies(source)


@answers("empty_like zeros_like ones_like rand_like randn_like", everywhere=True)
def _made_like(
    _: Any, source: Tensor, *, memory_format: Any = None, dtype: Any = None, device: Any = None, **__: Any
) -> Any:
    """`empty_like` (aten/src/ATen/native/TensorFactories.cpp); torch's own for fakes writes strides anew."""
    return _as_it_lies(source, dtype, device) if memory_format in (None, torch.preserve_format) else NotImplemented


def _as_it_lies(source: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """A new tensor with all strides of one that has its channels last, but for the batch of one."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if source.dim() not in formats or source.shape[0] != 1 or source.stride(0) == source.numel():
        return NotImplemented
    if not source.is_contiguous(memory_format=formats[source.dim()]):
        return NotImplemented
    return torch.empty_strided(
        source.shape, source.stride(), dtype=dtype or source.dtype, device=device or source.device
    )


# --- Products and attention -------------------------------------------------------------------------------------------


@answers("_scaled_dot_product_cudnn_attention")
def _cudnn_attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """torch's own always has a log-sum-exp; `_cudnn_attention_forward` (transformers/cuda/attention.cu) allocates it
    only where it is asked for."""
    _bias, compute_log_sumexp, *_options = rest
    if compute_log_sumexp:
        return NotImplemented
    shape = (*query.shape[:3], value.shape[-1])
    if tuple(query.shape) == shape:
        out = torch.empty_like(query)
    else:
        order = sorted(range(4), key=lambda dim: query.stride(dim), reverse=True)
        out = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return out, None, None, None, query.shape[2], key.shape[2], seed, offset, None


@answers("_scaled_dot_product_efficient_attention")
def _efficient_attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """Seed and offset are numbers of the CPU (`_efficient_attention_forward`, transformers/cuda/attention.cu, but for
    CUDA graphs); torch's own has them on the card."""
    _bias, compute_log_sumexp, *_options = rest
    batch, heads, rows = query.shape[:3]
    out = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    padded = -(-rows // 32) * 32 if compute_log_sumexp else 0
    logsumexp = query.new_empty((batch, heads, padded), dtype=torch.float32)
    seed, offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out, logsumexp, seed, offset


@answers("_efficient_attention_backward", everywhere=True)
def _efficient_attention_backward(_: Any, gradient: Tensor, *given: Any, **kwargs: Any) -> Any:
    """Seed and offset are tensors of the CPU, empty without dropout, which torch's own refuses; without a bias there is
    no gradient of it (transformers/cuda/attention_backward.cu)."""
    *tensors, bias = given[:4]
    if bias is not None:
        return NotImplemented
    if not kwargs.get("shared_storage_dqdkdv"):
        return *(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in tensors), None
    *rows, heads, size = tensors[0].shape
    return *tensors[0].new_empty((*rows, 3, heads, size)).unbind(-3), None


@answers("_grouped_mm", everywhere=True)
def _grouped_mm(
    _: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """torch's own takes bfloat16 only; the operator loops over the groups for other dtypes, with the same output.

    `_grouped_mm_cuda` (cuda/GroupedBlas.cpp), `_grouped_mm_fallback` and `create_grouped_gemm_output_tensor`
    (GroupedMMUtils.h): rows are padded to 16 bytes.
    """
    dtype = out_dtype or a.dtype
    if a.dtype is b.dtype is torch.bfloat16 or dtype.itemsize not in (2, 4):
        return NotImplemented
    rows, columns = a.shape[-2], b.shape[-1]
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device=a.device)
    groups = a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0]
    return torch.empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype, device=a.device)


@answers("mm.dtype_out bmm.dtype_out addmm.dtype_out baddbmm.dtype_out _scaled_mm.out", everywhere=True)
def _product_of_dtype(_: Any, *args: Any, out: Tensor, **kwargs: Any) -> Any:
    """A product into `out` of another dtype (`_bmm_dtype_out_cuda`, `_scaled_mm_out_cuda`, cuda); torch has none."""
    return out


@answers("mm.dtype bmm.dtype", everywhere=True)
def _wide_product(_: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Any:
    """`_mm_dtype_cuda`, `_bmm_dtype_cuda` (cuda/Blas.cpp)."""
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


@answers("addmm.dtype baddbmm.dtype", everywhere=True)
def _wide_sum(_: Any, source: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, **__: Any) -> Any:
    """`_addmm_dtype_cuda`, `_baddbmm_dtype_cuda` (cuda/Blas.cpp); torch's decomposition takes the dtype for beta."""
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


# --- Normalisation ----------------------------------------------------------------------------------------------------


@answers("batch_norm_stats")
def _batch_statistics(_: Any, source: Tensor, *__: Any) -> Any:
    """`batch_norm_stats_cuda` (cuda/Normalization.cu), and of those below: the parts of
    `torch.nn.SyncBatchNorm`, for which torch has no fake kernels. Numbers of each channel, in the accumulator's type.
    """
    return _by_channel(source, source.shape[1]), _by_channel(source, source.shape[1])


@answers("batch_norm_gather_stats_with_counts")
def _gathered_statistics(_: Any, source: Tensor, mean: Tensor, *__: Any) -> Any:
    """`batch_norm_gather_stats_cuda_template` (cuda/Normalization.cuh) of the means of each rank, in rows."""
    return _by_channel(mean, mean.shape[1]), _by_channel(mean, mean.shape[1])


@answers("batch_norm_elemt")
def _normalized_by_channel(_: Any, source: Tensor, *__: Any) -> Any:
    """`batch_norm_elemt_cuda`: in the input's memory format, dense."""
    layout = read_layout(source)
    strides = layout.dense(layout.memory_format()).stride
    return torch.empty_strided(source.shape, strides, dtype=source.dtype, device=source.device)


@answers("batch_norm_backward_reduce")
def _reduced_by_channel(
    _: Any, gradient: Tensor, source: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> Any:
    """`batch_norm_backward_reduce_cuda`: two sums, and the gradients of weight and bias. The kernel for channels last
    makes all of them."""
    if _is_channels_last(gradient) and _is_channels_last(source):
        wanted = (True, True, True)
    sums = (torch.empty_like(mean) if wanted[0] else None for _ in range(2))
    of_parameters = mean if weight is None else weight
    size = 0 if weight is None else source.shape[1]
    gradients = (of_parameters.new_empty(size) if each else None for each in wanted[1:])
    return *sums, *gradients


@answers("batch_norm_backward_elemt")
def _gradient_by_channel(_: Any, gradient: Tensor, source: Tensor, *__: Any) -> Any:
    """`batch_norm_backward_elemt_cuda`: contiguous, but for channels last."""
    return torch.empty_like(source) if _is_channels_last(gradient) else source.new_empty(source.shape)


def _by_channel(source: Tensor, channels: int) -> Tensor:
    half = source.dtype in (torch.bfloat16, torch.float16)
    return source.new_empty(channels, dtype=torch.float32 if half else source.dtype)


def _is_channels_last(source: Tensor) -> bool:
    """`batch_norm_use_channels_last_kernels` (cuda/Normalization.cu)."""
    layout = read_layout(source)
    return layout.is_contiguous(MemoryFormat.CHANNELS_LAST) or (layout.is_contiguous() and layout.stride[1] == 1)


@answers("native_layer_norm native_group_norm native_batch_norm", everywhere=True)
def _mixed_norm(func: Any, source: Tensor, *rest: Any) -> Any:
    """The CPU keeps float32 statistics of half precision where weights are float32.

    `param_scalar_type` (aten/src/ATen/native/cpu/mixed_data_type.h).
    """
    if not _is_mixed(source, rest):
        return NotImplemented
    result, *statistics = func(source, *rest)
    return result, *(each.new_empty(each.shape, dtype=torch.float32) for each in statistics)


@answers("native_group_norm_backward", everywhere=True)
def _mixed_norm_backward(func: Any, gradient: Tensor, *rest: Any) -> Any:
    """Each gradient has its tensor's dtype; torch's decomposition promotes."""
    if not _is_mixed(gradient, rest):
        return NotImplemented
    weight = next(each for each in rest if isinstance(each, Tensor) and each.dim() == 1)
    dtypes = gradient.dtype, weight.dtype, weight.dtype
    results = zip(func(gradient, *rest), dtypes, strict=True)
    return tuple(None if each is None else torch.empty_like(each, dtype=dtype) for each, dtype in results)


def _is_mixed(source: Tensor, rest: tuple[Any, ...]) -> bool:
    """Whether the CPU normalizes half precision with float32 weights."""
    half = source.device.type == "cpu" and source.dtype in (torch.bfloat16, torch.float16)
    return half and any(isinstance(each, Tensor) and each.dim() == 1 and each.dtype is torch.float32 for each in rest)


# --- Losses -----------------------------------------------------------------------------------------------------------


@answers("mse_loss smooth_l1_loss soft_margin_loss", everywhere=True)
def _elementwise_loss(_: Any, source: Tensor, target: Tensor, reduction: int = 1, *rest: Any, **kwargs: Any) -> Any:
    """A mean or sum in the memory of the unreduced loss: the result is made of its size and resized to a number, which
    frees nothing.

    `TORCH_META_FUNC(mse_loss)`, `smooth_l1_loss`; `soft_margin_loss_out` (Loss.cpp). Kept until the loss is freed, as
    a rule by the step's end.
    """
    if reduction == 0:
        return NotImplemented
    # Torch has no types for it.
    shape = torch.broadcast_shapes(source.shape, target.shape)  # type: ignore[no-untyped-call]
    return source.new_empty(shape, dtype=torch.promote_types(source.dtype, target.dtype)).resize_(())


@answers("binary_cross_entropy", everywhere=True)
def _binary_cross_entropy(
    _: Any, source: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Any:
    """The same for `binary_cross_entropy_out_cuda` (cuda/Loss.cu) and `binary_cross_entropy_out_cpu` (Loss.cpp):
    `loss.resize_as_(loss_reduced)`."""
    del target, weight
    return NotImplemented if reduction == 0 else torch.empty_like(source).resize_(())


@answers("_use_cudnn_ctc_loss _use_cudnn_ctc_loss.Tensor")
def _use_cudnn_ctc_loss(
    _: Any, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int
) -> Any:
    """`_use_cudnn_ctc_loss` (cudnn/LossCTC.cpp): cuDNN takes flat int32 targets and blank 0 only, of whole sequences
    and up to 255 labels. Lists of lengths come with targets on the host."""
    kinds = [each.dtype for each in (targets, input_lengths, target_lengths) if isinstance(each, Tensor)]
    allowed = torch.backends.cudnn.enabled and blank == 0 and targets.dim() == 1 and log_probs.dtype is torch.float32
    if not allowed or any(kind is not torch.int32 for kind in kinds):
        return False
    lengths = [input_lengths, target_lengths]
    with torch_common.no_modes():
        known = [known_values.find_value(each) if isinstance(each, Tensor) else torch.tensor(each) for each in lengths]
        if known[0] is None or known[1] is None or (len(kinds) == 1 and targets.device.type != "cpu"):
            return NotImplemented if len(kinds) > 1 else False
        inputs, labels = known[0], known[1]
        whole = len(kinds) > 1 or bool((inputs == log_probs.shape[0]).all())
        return whole and bool((labels < 256).all() and (labels <= inputs).all())


@answers("_cudnn_ctc_loss _cudnn_ctc_loss.Tensor")
def _cudnn_ctc_loss(_: Any, log_probs: Tensor, *__: Any) -> Any:
    """`_cudnn_ctc_loss` (cudnn/LossCTC.cpp): a loss for each item, and the gradient of all inputs."""
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


@answers("_use_miopen_ctc_loss _use_miopen_ctc_loss.Tensor")
def _use_miopen_ctc_loss(*_: Any) -> bool:
    """Whether AMD's library would run; torch asks since 2.11."""
    return False


@answers("_ctc_loss _ctc_loss.Tensor", everywhere=True)
def _ctc_loss(_: Any, log_probs: Tensor, targets: Tensor, *lengths_and_rest: Any, **kwargs: Any) -> Any:
    """`ctc_loss_gpu_template` (cuda/LossCTC.cu), `ctc_loss_cpu_template` (LossCTC.cpp): log_alpha has two places for
    each label of the longest target, and one.

    Targets in rows, one for each item, bound that length where the lengths' values are not known.
    """
    _input_lengths, target_lengths, *_rest = lengths_and_rest
    is_tensor = isinstance(target_lengths, Tensor)
    with torch_common.no_modes():
        lengths = known_values.find_value(target_lengths) if is_tensor else torch.tensor(target_lengths)
        if lengths is None and targets.dim() == 1:
            return NotImplemented
        longest = targets.shape[1] if lengths is None else int(lengths.max())
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, time, 2 * longest + 1))


@answers(
    """multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward _ctc_loss_backward
    _ctc_loss_backward.Tensor""",
    everywhere=True,
)
def _input_gradient(_: Any, grad: Tensor, source: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """A contiguous gradient of the input (LossMultiMargin.cpp, LossMultiLabelMargin.cpp, FractionalMaxPool3d.cpp; the
    same in cuda/, and `ctc_loss_backward_gpu_template` in cuda/LossCTC.cu)."""
    del grad, rest, kwargs
    return source.new_empty(source.shape)


# --- Images -----------------------------------------------------------------------------------------------------------


@answers("cudnn_grid_sampler")
def _cudnn_grid_sampler(_: Any, source: Tensor, grid: Tensor) -> Any:
    """`cudnn_grid_sampler_forward` (cudnn/GridSampler.cpp): contiguous, of the grid's size."""
    return source.new_empty((source.shape[0], source.shape[1], grid.shape[1], grid.shape[2]))


@answers("cudnn_grid_sampler_backward")
def _cudnn_grid_sampler_backward(_: Any, source: Tensor, grid: Tensor, grad: Tensor) -> Any:
    """`cudnn_grid_sampler_backward` (cudnn/GridSampler.cpp): contiguous gradients of both."""
    return source.new_empty(source.shape), grid.new_empty(grid.shape)


@answers("col2im", everywhere=True)
def _col2im(_: Any, source: Tensor, size: Any, *rest: Any, **kwargs: Any) -> Any:
    """`col2im_out_cpu_template` (Col2Im.cpp), `col2im_out_cuda_template` (cuda/Col2Im.cu): the result is made as large
    as the columns and resized, which frees nothing."""
    kernel, output = rest[0], tuple(size)
    channels = source.shape[-2] // (kernel[0] * kernel[1])
    return torch.empty_like(source).resize_((*source.shape[:-2], channels, *output))


@answers("max_pool1d", everywhere=True)
def _max_pool1d(_: Any, source: Tensor, *rest: Any) -> Any:
    """The CPU has a kernel without indices (MaxPooling.cpp); a card finds the indices all the same."""
    if source.device.type != "cpu":
        return NotImplemented
    with torch_common.no_modes():
        shape = torch.max_pool1d(torch.empty(source.shape, device="meta"), *rest).shape
    return source.new_empty(shape)


# --- Moves ------------------------------------------------------------------------------------------------------------


@answers("as_strided_scatter diagonal_scatter select_scatter slice_scatter", everywhere=True)
def _written_copy(_: Any, source: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """`clone_preserve_strides` (TensorShape.cpp): a copy of the whole storage; a contiguous one of what is expanded,
    which torch's decompositions copy as it is."""
    del rest, kwargs
    if any(not stride and size > 1 for size, stride in zip(source.shape, source.stride(), strict=True)):
        return source.clone()
    count = source.untyped_storage().nbytes() // source.element_size()
    return source.new_empty(count).as_strided(source.shape, source.stride(), source.storage_offset())


# --- Recurrent cells, optimizers, libraries, quantisation -------------------------------------------------------------


@answers("_thnn_fused_gru_cell")
def _gru_cell(_: Any, input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Any) -> Any:
    """`_thnn_fused_gru_cell_cuda` (cuda/RNN.cu): the new state and five values per element for backward."""
    workspace = hx.new_empty((hx.shape[0], 5 * hx.shape[1]))
    return torch.empty_like(hx, memory_format=torch.contiguous_format), workspace


@answers("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(_: Any, grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """`_thnn_fused_gru_cell_backward_cuda` (cuda/RNN.cu)."""
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    grad_gates = [workspace.new_empty((batch, 3 * hidden)) for _ in range(2)]  # of input and hidden state
    grad_hx = torch.empty_like(grad_hy, memory_format=torch.contiguous_format)
    grad_biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *grad_gates, grad_hx, *grad_biases


@answers("_fused_sgd_ _fused_sgd_.tensor_lr _fused_adagrad_", everywhere=True)
def _write_only(_: Any, *args: Any, **kwargs: Any) -> None:
    """A fused optimizer's kernel updates its lists of tensors and allocates nothing (FusedSGD.cpp, FusedAdagrad.cpp,
    cuda/FusedSgdKernel.cu)."""
    del args, kwargs


@answers("geqrf", everywhere=True)
def _geqrf(_: Any, source: Tensor) -> Any:
    """`geqrf_out` (BatchLinearAlgebra.cpp): the factors by columns, and a number for each reflector."""
    *batch, rows, columns = source.shape
    return source.new_empty((*batch, columns, rows)).mT, source.new_empty((*batch, min(rows, columns)))


@answers("histogram.bin_ct histogram.bins_tensor", everywhere=True)
def _histogram(_: Any, source: Tensor, bins: Tensor | int = 100, *rest: Any, **kwargs: Any) -> Any:
    """`histogram_out` (Histogram.cpp): a number for each bin, and the edges."""
    del rest, kwargs
    count = bins if isinstance(bins, int) else bins.shape[0] - 1
    return source.new_empty(count), source.new_empty(count + 1)


@answers(
    """fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams""",
    everywhere=True,
)
def _fake_quantize(_: Any, source: Tensor, *rest: Any) -> Any:
    """`fake_quantize_per_channel_affine_cachemask` (quantized/FakeQuantPerChannelAffine.cpp): values and a mask."""
    del rest
    return torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)


# --- Checks, and what a group of processes does -----------------------------------------------------------------------


_passing = [True]


@contextlib.contextmanager
def answer_checks(value: bool) -> Iterator[None]:
    """Within this context torch's own checks of values pass where they find this one."""
    _passing.append(value)
    try:
        yield
    finally:
        _passing.pop()


@answers("equal", everywhere=True)
def _check_of_arguments(_: Any, first: Tensor, second: Tensor) -> Any:
    """Torch's own checks of values, which raise if they fail, are taken to hold: `is_scalar_tensor_true`
    (TensorSubclassLikeUtils.h, in `quantile`, `cov`)."""
    is_check = first.dim() == second.dim() == 0 and first.dtype is second.dtype is torch.bool
    return _passing[-1] if is_check else NotImplemented


@answers("is_set_to", everywhere=True)
def _is_set_to(_: Any, first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are one view of one storage (`is_set_to`, TensorShape.cpp)."""
    return torch_common.is_same(first, second)


def _wait(_: Any, source: Tensor) -> Any:
    """`wait_tensor` (distributed/c10d/Functional.cpp): the tensor itself; torch's meta kernel makes another."""
    return aten.alias.default(source)


def _coalesced(_: Any, outputs: list[Tensor], inputs: list[Tensor], group: Any, *__: Any, **___: Any) -> Any:
    """The work of several collectives as one (distributed/c10d/Ops.cpp), as of the first; torch has none for fakes."""
    return torch.ops.c10d._allgather_base_.default(outputs[0], inputs[0], group)[1]


def _reduced(_: Any, tensors: list[Tensor], group: Any, *__: Any, **___: Any) -> Any:
    """The same for `allreduce_coalesced_`, which writes to what it reads: gloo has it, NCCL groups its calls."""
    return _coalesced(_, tensors, tensors, group)


if torch.distributed.is_available():
    for each in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        EVERYWHERE[getattr(torch.ops.c10d, each).default] = _in_mode(_coalesced)
    EVERYWHERE[torch.ops.c10d.allreduce_coalesced_.default] = _in_mode(_reduced)
    EVERYWHERE[torch.ops._c10d_functional.wait_tensor.default] = _in_mode(_wait)
# A card has it from FakeTensorMode, too.
FAKE_KERNELS[aten._grouped_mm.default] = EVERYWHERE[aten._grouped_mm.default]


NO_VIEW: Final = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
    "contiguous subspaces). Use .reshape(...) instead."
)
"""ATen's words (TensorUtils.cpp); torch's kernel for FakeTensors has another error."""


def run_kernel(fakes: torch_common.FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on FakeTensors."""
    if func in EVERYWHERE and (made := EVERYWHERE[func](fakes, func, *args, **kwargs)) is not NotImplemented:
        return made
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "Expected a value of type 'Tensor' for argument" not in str(error):
            raise
        return func.overloadpacket(*args, **kwargs)  # C++ wraps the number of `x & 15`: another overload takes it


# --- what rows say of results and arguments ---------------------------------------------------------------------------

_ROWS: Final = {getattr(aten, name).default: row for name, row in OPERATORS.items() if row.order or row.one_dtype}
ALLOCATED: Final[dict[Any, tuple[int, ...]]] = {func: row.order for func, row in _ROWS.items() if row.order}
"""Which results a kernel allocates, in its order, where that is not the order of the results."""

ONE_DTYPE: Final[dict[Any, tuple[int, ...]]] = {func: row.one_dtype for func, row in _ROWS.items() if row.one_dtype}
"""Operators whose kernels take one dtype only, which torch's kernels for FakeTensors do not check; and which of their
arguments."""

INDICES: Final[dict[Any, int]] = {
    getattr(packet, overload): row.index_at
    for name, row in OPERATORS.items()
    if row.index_at is not None
    for packet in (getattr(aten, form) for form in (name, f"{name}_") if hasattr(aten, form))
    for overload in ("default", "Tensor")
    if hasattr(packet, overload)
}
"""Operators whose kernels take whole numbers for indices, which torch's kernels for FakeTensors do not check; and which
of their arguments these are."""


def check_arguments(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what a real kernel refuses. Raises RuntimeError, in the place where torch would."""
    at, name = INDICES.get(func, len(args)), func.name().removeprefix("aten::")
    if at < len(args) and args[at].dtype not in (torch.int64, torch.int32):
        got = str(args[at].dtype)[6:]
        raise RuntimeError(f"{name.partition('.')[0]} expected indices of int64 or int32, got {got}")
    is_table = func is aten.embedding.default  # what sparse kernels select by are sizes, too
    if is_table and (known := known_values.find_value(args[at])) is not None and known.numel():
        rows = args[0].shape[0]
        with torch_common.no_modes():
            found = next((int(each) for each in known.aminmax() if not 0 <= each < rows), None)
        if found is not None:
            raise IndexError(
                f"{name} expected indices from 0 to {rows - 1}, got {found}; on a card a kernel asserts it"
            )
    dtypes = [args[i].dtype for i in ONE_DTYPE.get(func, ()) if i < len(args) and isinstance(args[i], Tensor)]
    if any(dtype is not dtypes[0] for dtype in dtypes):
        raise RuntimeError(f"{name} expected tensors of one dtype, got {', '.join(str(each)[6:] for each in dtypes)}")
