"""Normalisation by layer, batch, group and root mean square, and softmax.

Softmax, layer norm and RMS norm copy arguments that are not contiguous: logits of `(batch, classes, tokens)` made by a
transpose are copied whole by the loss, images of `channels_last` too, and so is what `permute` hands a layer norm over
channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import Events, alloc, output
from fxmem.hardware.operators.registry import Call, NamedCall, Operator, dense_gradient, layouts_among, results_only
from fxmem.hardware.releases import find_release
from fxmem.hardware.tensor_layouts import ITEM_BYTES, MemoryFormat, TensorLayout, TensorLike, read_layout

# --- FLOPs: n elements, g groups that are normalised together ---------------------------------------------------------


def _normalize(n: int, g: int, weight: TensorLayout | None, bias: TensorLayout | None) -> int:
    """Mean (n + g), variance (3n + g), 1 / sqrt(variance + eps) (2g), (x - mean) rstd (2n), times weight (n), plus bias
    (n)."""
    return 6 * n + 4 * g + n * len(layouts_among((weight, bias)))


def _normalize_backward(n: int, g: int, weight: TensorLayout | None, mask: Sequence[bool] = (True, True, True)) -> int:
    """x^ = (x - mean) rstd (2n); dx = rstd (w dy - mean(w dy) - x^ mean(w dy x^)) (7n + 2g, and n for w); dw = sum(dy
    x^) (2n); db = sum(dy) (n)."""
    of_input = (7 * n + 2 * g + n * (weight is not None)) * mask[0]
    return 2 * n * (mask[0] or mask[1]) + of_input + 2 * n * mask[1] + n * mask[2]


def _rms_norm_backward(c: NamedCall) -> int:
    """x^ = x rstd (n); dx = rstd (w dy - x^ mean(w dy x^)) (5n + g, and n for w); dw = sum(dy x^) (2n)."""
    n: int = c.read
    g: int = c.rstd.numel
    mask: Sequence[bool] = c.output_mask
    return n * (mask[0] or mask[1]) + (5 * n + g + n * (c.weight is not None)) * mask[0] + 2 * n * mask[1]


def _batch_norm(c: NamedCall) -> int:
    """Training: a group per channel, and a moving average (3) for each running statistic. Else 1 / sqrt(running_var +
    eps) is all of the statistics."""
    x: TensorLayout = c.input
    n, channels = x.numel, x.shape[1]
    if getattr(c, "training", False):
        running = layouts_among((getattr(c, "running_mean", None), getattr(c, "running_var", None)))
        return _normalize(n, channels, c.weight, c.bias) + 3 * len(running) * channels
    return (2 + len(layouts_among((c.weight, c.bias)))) * n + 2 * channels


def _batch_norm_backward(c: NamedCall) -> int:
    """Not training, the statistics are constants: rstd (2 per channel), dx = dy (w rstd) (n, and 1 per channel), x^
    (2n), dw (2n), db (n)."""
    x: TensorLayout = c.input
    n, channels, (dx, dw, db) = x.numel, x.shape[1], map(bool, c.output_mask)
    if c.train:
        return _normalize_backward(n, channels, c.weight, c.output_mask)
    return 2 * channels * (dx or dw) + (n + channels * (c.weight is not None)) * dx + 4 * n * dw + n * db


def _gather_statistics(c: NamedCall) -> int:
    """Of each rank and channel: its variance (1 / invstd^2 - eps), the merged mean and squares (13 in all); 1 /
    sqrt(it + eps) (2), and a moving average (3) for each running statistic."""
    channels: int = c.result[0].numel
    of_ranks: int = 13 * c.mean.numel
    return of_ranks + (2 + 3 * len(layouts_among((c.running_mean, c.running_var)))) * channels


def _log_softmax(c: NamedCall) -> int:
    """x - max - log(sum(exp(x - max)))."""
    n: int = c.read
    return 5 * n + n // max(1, c.self.shape[c.dim] if c.self.rank else 1)


# --- on a card --------------------------------------------------------------------------------------------------------


def _sums_by_row_block(call: Call) -> Events:
    """`LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu): partial sums by row block when there are many short
    rows.

    Arguments: grad_out, input, mean, rstd, weight, bias; of RMS norm without mean and bias. Constants checked in the
    2.11 binary. The sums over the blocks replace grad_weight and grad_bias, which were allocated before.
    """
    is_rms = call.name == "_fused_rms_norm_backward"
    layouts, position, names = call.layouts(), 3 if is_rms else 4, ("grad_weight", "grad_bias")[: 1 if is_rms else 2]
    if len(layouts) <= position:
        return (output("grad_input"),)
    grads = (output("grad_input"), *(output(name) for name in names))
    if not find_release(call.platform.torch_version)[0].norms_sum_by_block:
        return grads
    columns = layouts[position].shape[-1]
    rows = layouts[1].numel // columns
    if not (rows > 64 * 1024 and columns // 32 < device_properties(call.card).multi_processor_count // 2):
        return grads
    blocks = min((64 * 1024 // 2) // -(-columns // 32), -(-rows // 32))
    nbytes = columns * ITEM_BYTES[layouts[1].dtype]
    partial = (alloc(f"partial {name}", blocks * nbytes) for name in names)
    return *grads, *partial, *(alloc(f"summed {name}", nbytes) for name in names)


def _group_norm_on_card(call: Call) -> Events:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): a factor and a summand for each channel of each image.

    Arguments: input, weight, bias, N, C, HxW, groups, ...
    """
    source, weight, bias, count, channels, positions = call.args[:6]
    nbytes = count * channels * _accumulator_bytes(source)
    fused = (weight is not None or bias is not None) and positions > 1
    factors = (alloc("factors", nbytes), alloc("summands", nbytes)) if fused else ()
    return output("result"), output("mean"), output("rstd"), *factors


def _group_norm_backward_on_card(call: Call) -> Events:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): two sums for each channel of each image, then a
    factor for each of them and two for each group, if the input's gradient is wanted.

    Arguments: grad_out, input, mean, rstd, weight, N, C, HxW, groups, mask. Measured steps of a B200 have exactly these
    bytes more than their tensors (Liger-Kernel's published benchmarks).
    """
    weight, count, channels, positions, groups, mask = call.args[4:10]
    item = _accumulator_bytes(call.args[1])
    nbytes, of_groups = count * channels * item, count * groups * item * mask[0]
    sums = (alloc("sums of gradient * input", nbytes), alloc("sums of gradient", nbytes)) if positions > 1 else ()
    factors = (alloc("factors of the gradient", nbytes),) if mask[0] and weight is not None and positions > 1 else ()
    by_group = (alloc("factors of the input", of_groups), alloc("summands", of_groups))
    return output("grad_input"), output("grad_weight"), output("grad_bias"), *sums, *by_group, *factors


def _sums_of_channels_last(call: Call, numbers: int) -> Events:
    """`flexible_launch_configs` (cuda/Normalization.cuh): blocks of 512 threads, of 16 rows each, sum channels that lie
    last; where 8 blocks or more share a channel, up to 128 do, and leave their numbers and a semaphore in memory.

    Args:
        call: its first argument has the channels.
        numbers: how many each block leaves for a channel.
    """
    source = call.layout()
    made = tuple(output(f"result {position}") for position in range(len(call.results)))
    is_last = source.is_contiguous(MemoryFormat.CHANNELS_LAST) or (source.is_contiguous() and source.stride[1] == 1)
    if not source.fits_32bit_index() or not is_last:
        return made
    channels = source.shape[1]
    rows = source.numel // channels
    columns = min(_power_of_two(channels), 32)
    lines = min(_power_of_two(-(-rows // 16)), 512 // columns)
    if lines * columns != 512:
        columns = min(_power_of_two(channels), 512 // lines)
    blocks = min(-(-rows // (lines * 16)), 128)
    if blocks < 8:
        return made
    nbytes = numbers * channels * blocks * _accumulator_bytes(source)
    return *made, alloc("sums of blocks", nbytes), alloc("semaphores", 4 * -(-channels // columns))


def _power_of_two(number: int) -> int:
    """The largest that is not above a number."""
    return 1 << (number.bit_length() - 1)


def _accumulator_bytes(source: TensorLike | TensorLayout) -> int:
    """Bytes of a number in the type that a kernel accumulates in (`acc_type`)."""
    return max(4, ITEM_BYTES[read_layout(source).dtype])


def _softmax_backward_on_card(call: Call) -> Events:
    """`softmax_backward_cuda_out` (SoftMax.cu): the kernel wants the product of gradient and output, which is as large
    as either (2.11 binary)."""
    first, second = call.layouts()[:2]
    item = max(ITEM_BYTES[first.dtype], ITEM_BYTES[second.dtype])
    return output("grad_input"), alloc("grad_output * output", first.numel * item)


def _safe_softmax_on_card(call: Call) -> Events:
    """`_safe_softmax` (SoftMax.cpp) of the last dimension: which scores are -inf, one byte each, to find the rows that
    are nothing else, and the zero that goes there."""
    scores = call.layout()
    found = alloc("scores that are -inf", scores.numel), alloc("rows of -inf", prod(scores.shape[:-1]))
    return output("result"), *found, alloc("zero", ITEM_BYTES[scores.dtype])


# --- on the CPU -------------------------------------------------------------------------------------------------------


def _batch_norm_on_cpu(call: Call) -> Events:
    """`batch_norm_cpu_contiguous_impl` (cpu/batch_norm_kernel.cpp): a factor and a summand for each channel."""
    nbytes = call.layout().shape[1] * _accumulator_bytes(call.args[0])
    outputs = (output("result"), output("mean"), output("inverse deviation"))
    return *outputs, alloc("factors", nbytes), alloc("summands", nbytes)


def _batch_norm_backward_on_cpu(call: Call) -> Events | None:
    """`batch_norm_backward_cpu_template` (Normalization.cpp): for dense arguments it makes the input's gradient a
    second time.

    The second takes the first one's place once both are there. Arguments: grad_out, input, ...; results: the gradients
    that were asked for, or None.
    """
    grad, source = call.layout(0), call.layout(1)
    dense = all(each.is_contiguous() or each.is_contiguous(MemoryFormat.CHANNELS_LAST) for each in (grad, source))
    if call.result[0] is None or not dense or grad.memory_format() is not source.memory_format():
        return None
    outputs = (output(f"gradient {number}") for number in range(len(call.results)))
    return *outputs, alloc("the input's first gradient", read_layout(call.result[0]).nbytes)


def _group_norm_backward_on_cpu(call: Call) -> Events:
    """`GroupNormBackwardKernelImpl` (cpu/group_norm_kernel.cpp): two sums for each channel of each image.

    A gradient that is not laid out as the input is copied first, as a run of torch 2.15 shows; before, autograd copies
    it. Arguments: grad_out, input, mean, rstd, weight, N, C, ...; results: three gradients, of which some may be None.
    """
    grad, source = call.layout(0), call.layout(1)
    nbytes = call.args[5] * call.args[6] * _accumulator_bytes(source)
    copies = () if grad.is_contiguous(source.memory_format()) else (alloc("dense gradient", grad.nbytes),)
    outputs = (output("gradient") for _ in call.results)
    return *copies, *outputs, alloc("sums of gradient * input", nbytes), alloc("sums of gradient", nbytes)


# --- the rows ---------------------------------------------------------------------------------------------------------

ROWS = {
    "layer_norm.cpp, cuda/layer_norm_kernel.cu": {
        "native_layer_norm": Operator(
            lambda c: _normalize(c.made, c.result[1].numel, c.weight, c.bias), cuda=results_only, copies=((0,), ())
        ),
        "native_layer_norm_backward": Operator(
            lambda c: _normalize_backward(c.read, c.mean.numel, c.weight, c.output_mask),
            cuda=_sums_by_row_block,
            copies=((1,), (0,)),
        ),
        # Mean of squares (2n + g), 1 / sqrt(it + eps) (2g), x rstd (n), times weight (n).
        "_fused_rms_norm": Operator(
            lambda c: (3 + (c.weight is not None)) * c.made + 3 * c.result[1].numel, copies=((0,), ())
        ),
        "_fused_rms_norm_backward": Operator(_rms_norm_backward, cuda=_sums_by_row_block, copies=((1,), (0,))),
    },
    "group_norm.cpp, cuda/group_norm_kernel.cu, cpu/group_norm_kernel.cpp": {
        "native_group_norm": Operator(
            lambda c: _normalize(c.made, c.result[1].numel, c.weight, c.bias), cuda=_group_norm_on_card
        ),
        "native_group_norm_backward": Operator(
            lambda c: _normalize_backward(c.read, c.mean.numel, c.weight, c.output_mask),
            cuda=_group_norm_backward_on_card,
            cpu=_group_norm_backward_on_cpu,
        ),
    },
    "Normalization.cpp, cpu/batch_norm_kernel.cpp, cudnn/BatchNorm.cpp": {
        "native_batch_norm _native_batch_norm_legit": Operator(_batch_norm, cpu=_batch_norm_on_cpu),
        "cudnn_batch_norm _native_batch_norm_legit_no_training": Operator(_batch_norm),
        "_batch_norm_with_update": Operator(cpu=_batch_norm_on_cpu),
        "native_batch_norm_backward": Operator(_batch_norm_backward, cpu=_batch_norm_backward_on_cpu),
        "batch_norm_backward": Operator(cpu=_batch_norm_backward_on_cpu),
        "cudnn_batch_norm_backward": Operator(lambda c: _normalize_backward(c.read, c.input.shape[1], c.weight)),
    },
    # `torch.nn.SyncBatchNorm`.
    "cuda/Normalization.cu, cuda/Normalization.cuh": {
        # Mean, variance, 1 / sqrt(it + eps), as `_normalize` has them.
        "batch_norm_stats": Operator(
            lambda c: 4 * (c.read + c.result[0].numel), cuda=lambda call: _sums_of_channels_last(call, 4)
        ),
        "batch_norm_gather_stats_with_counts": Operator(_gather_statistics, cuda=results_only, traffic="picks"),
        # (x - mean) rstd, times weight, plus bias
        "batch_norm_elemt": Operator(
            lambda c: (2 + len(layouts_among((c.weight, c.bias)))) * c.made, cuda=results_only
        ),
        # sum(dy), sum(dy (x - mean)), that times rstd
        "batch_norm_backward_reduce": Operator(
            lambda c: 4 * c.read + c.mean.numel, cuda=lambda call: _sums_of_channels_last(call, 2)
        ),
        # (dy - mean(dy) - (x - mean) f) rstd w, f = rstd^2 mean(dy (x - mean))
        "batch_norm_backward_elemt": Operator(lambda c: 5 * c.made + 5 * c.mean.numel, cuda=results_only),
    },
    "WeightNorm.cpp, cuda/WeightNorm.cu": {
        "_weight_norm_interface": Operator(lambda c: 3 * c.v.numel + 2 * c.g.numel),  # v (g / |v|)
        # dg = sum(dw v) / |v|, (g / |v|) (dw - v (dg / |v|))
        "_weight_norm_interface_backward": Operator(lambda c: 5 * c.saved_v.numel + 3 * c.saved_g.numel),
    },
    # `host_softmax`, `host_softmax_backward`.
    "SoftMax.cpp, cuda/SoftMax.cu": {
        "_softmax": Operator((5, 0), cuda=results_only, copies=((), (0,))),  # exp(x - max) / sum(exp(x - max))
        # (dy - sum(dy y)) y
        "_softmax_backward_data": Operator(4, cuda=_softmax_backward_on_card, cpu=dense_gradient),
        "_safe_softmax": Operator((5, 0), cuda=_safe_softmax_on_card),
        "_log_softmax": Operator(_log_softmax, cuda=results_only, copies=((), (0,))),
        # dy - exp(y) sum(dy)
        "_log_softmax_backward_data": Operator(4, cuda=results_only, copies=((), (0, 1))),
    },
}
