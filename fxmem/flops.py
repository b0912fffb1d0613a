"""Floating-point operations of one ATen call, of forward and backward ops alike.

What is counted, for an op as a dispatch mode below autograd sees it:

* One multiply-add is two operations. Where torch's own registry (`torch.utils.flop_counter`) has a formula it is used as it is: matrix
  products, convolutions and attention agree with `FlopCounterMode` to the last digit. So the bias added inside `addmm` or a convolution and
  the softmax inside fused attention are left out, and products with padding or with scores that a mask hides are counted.
* Elsewhere, the operations of the op's definition. A scalar factor that is exactly 1 costs nothing. Of the branches of a piecewise
  definition the longest counts. The larger or smaller of two values is one operation, hence `relu` and each place of a max pool.
* A function of C's `math.h` (`exp`, `sqrt`, `tanh`, `erf`, `pow`, …) is one operation. How many instructions it takes differs between
  machines and libraries, so a count that means the same everywhere can only count the call.
* The sum of n numbers is n operations, not n - 1, as it is for multiply-adds.
* Zero: moving, viewing, creating, selecting, ordering and converting numbers, drawing random ones, and arithmetic on integers and booleans,
  comparisons included. Complex numbers count what their real and imaginary parts cost.
* None, never 0: an op that computes and is not known here. `UNCOUNTED` says why for those left out on purpose.

Composite ops (`aten.linear`, `aten.matmul`, …) reach a dispatch mode only under `torch.inference_mode`; they are None as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from math import inf, prod
from types import SimpleNamespace as Call
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxmem._torch import OpOverload, OpOverloadPacket, op_arguments

__all__ = ["UNCOUNTED", "Formula", "is_counted_by_torch", "op_flops", "torch_formulas"]

Formula: TypeAlias = Callable[..., int | None]
"""Called with the op's own arguments and its result, `formula(*args, out_val=out, **kwargs)`; returns FLOPs, None for unknown."""

_Rule: TypeAlias = Callable[[Call], int]
"""A formula of this file: reads a call's arguments by name."""


def op_flops(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, extra: Mapping[OpOverloadPacket, Formula] | None = None
) -> int | None:
    """Floating-point operations of the call `out = func(*args, **kwargs)`; None when it computes and has no formula.

    Reads shapes, dtypes and plain numbers only, so tensors may be fake. `extra` maps op packets (`torch.ops.mylib.attention`) to formulas and
    goes before every other rule; formulas given to `torch.utils.flop_counter.register_flop_formula` are honoured too.
    Whatever a formula of `extra` raises is passed on.
    """
    packet = _packet(func)
    if extra is not None and packet in extra:
        return extra[packet](*args, **kwargs, out_val=out)
    if packet in (registered := torch_formulas()):
        # torch's formulas refuse some calls they are registered for: grouped-query heads, `bmm.dtype`.
        with suppress(AssertionError, TypeError):
            return int(registered[packet](*args, **kwargs, out_val=out))
    name = _base_name(func)
    if name in _NO_ARITHMETIC:
        return 0
    formula = _FORMULAS.get(name)
    result = out if _tensors(out) else args[0] if args else None  # in-place foreach and fused ops return nothing
    if formula is None or not _tensors(result):
        return None
    dtype = _tensors(result)[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0
    each = _COMPLEX.get(name) if dtype.is_complex else 1
    return None if each is None else each * formula(_call(func, args, kwargs, result))


def is_counted_by_torch(func: OpOverload) -> bool:
    """Whether `FlopCounterMode` counts this op; the sum over such ops is the figure it reports."""
    return _packet(func) in torch_formulas()


@cache
def torch_formulas() -> Mapping[Any, Callable[..., Any]]:
    """The live table of `register_flop_formula`. Its module imports Triton where that is installed, which takes longer than all of fxmem."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)  # a higher-order operator has no overloads


def _base_name(func: Any) -> str:
    """`aten::_foreach_add_.Scalar` and `aten::add_.Tensor` are both `add`; a name outside aten keeps its namespace."""
    name: str = func.name().partition(".")[0]
    return name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_") if name.startswith("aten::") else name


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Call:
    """The arguments by their names in the schema, the elements of the first one (`read`) and of the result (`made`), and the result."""
    schema = op_arguments(func)
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    return Call(**(named | {"read": _numel(named[schema[0].name]), "made": _numel(result), "result": result}))


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, list | tuple) else (value,)) if isinstance(t, Tensor)]


def _numel(value: Any) -> int:
    """Elements of a tensor, of a tuple's first tensor (the main result), or of all floating-point tensors of a list (foreach)."""
    tensors = _tensors(value)
    return sum(t.numel() for t in tensors if t.is_floating_point()) if isinstance(value, list) else tensors[0].numel() if tensors else 0


# --- Matrix products and attention that torch's registry lacks or refuses ---------------------------------------------------------------


def _product(a: Tensor, b: Tensor) -> int:
    return 2 * a.numel() * b.shape[-1]


def _grouped_mm(a: Tensor, b: Tensor) -> int:
    """Groups split the rows (2d x 3d), the columns (3d x 2d) or the contraction (2d x 2d), so they add up to one product; 3d x 3d is a batch."""
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """q k', then scores v: as torch counts them, with the key and value heads repeated to the query's."""
    return 2 * prod(q.shape[:3]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The scores again, their gradient, and those of v, q and k: three products over q's head size, two over v's."""
    return 2 * prod(q.shape[:3]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


# --- Recurrent layers -------------------------------------------------------------------------------------------------------------------

_CELLS = {0: (1, 1, 2), 1: (1, 1, 4), 2: (4, 18, 24), 3: (3, 14, 17)}
"""By cuDNN's mode (relu, tanh, LSTM, GRU): gates, then operations per hidden element beyond the gates' sums, forward and backward.

LSTM: three sigmoids (4 each), tanh, c = f c + i g (3), h = o tanh(c) (2). GRU: two sigmoids, r (U h), tanh, h = (1 - z) n + z h (4).
Backward, both: the two gradients that meet in h (1). LSTM: tanh(c), do = dh tanh(c) (1), dc += dh o (1 - tanh(c) tanh(c)) (5), di, df, dg and
the next dc (4), four gates' derivatives (3 each). GRU: dn, dz (2 each), the next dh (1), tanh' (3), dr, d(U h) (1 each), two sigmoids' (3 each).
"""


def _rnn(c: Call, weights: Sequence[Tensor]) -> int:
    """Per step: the products, the biases, the sum of a gate's two products, and the cell."""
    gates, pointwise, _ = _CELLS[c.mode]
    products, biases = _products_and_biases(weights)
    return _steps(c) * (products + biases + _hidden(c, weights) * (gates + pointwise))


def _rnn_backward(c: Call, weights: Sequence[Tensor], weights_too: bool = True) -> int:
    """Every product once for its input and once for its weight, every bias summed."""
    _, _, pointwise = _CELLS[c.mode]
    products, biases = _products_and_biases(weights)
    return _steps(c) * (products + (products + biases) * weights_too + _hidden(c, weights) * pointwise)


def _cell(c: Call, mode: int) -> int:
    """A cell by itself takes the gates' two products and sums them with the biases."""
    gates, pointwise, _ = _CELLS[mode]
    n: int = c.input_gates.numel()
    return n * (1 + len(_tensors((c.input_bias, c.hidden_bias)))) + n // gates * pointwise


def _products_and_biases(weights: Sequence[Tensor]) -> tuple[int, int]:
    return 2 * sum(w.numel() for w in weights if w.dim() == 2), sum(w.numel() for w in weights if w.dim() == 1)


def _steps(c: Call) -> int:
    """Time steps times batch, packed sequences included."""
    return prod(c.input.shape[:-1])


def _hidden(c: Call, weights: Sequence[Tensor]) -> int:
    """Hidden elements of all layers and directions: each has two matrices with a row per gate and element (a projection has fewer)."""
    rows: int = _CELLS[c.mode][0] * c.hidden_size
    return sum(w.dim() == 2 and w.shape[0] == rows for w in weights) // 2 * (rows // _CELLS[c.mode][0])


def _mkldnn_weights(c: Call) -> list[Tensor]:
    """Two matrices and two biases, numbered from 0 in the forward op and from 1 in the backward one."""
    weights = _tensors([getattr(c, f"weight{i}", None) for i in range(5)])
    return weights if c.has_biases else weights[:2]


# --- Normalisation: n elements, g groups that are normalised together -------------------------------------------------------------------


def _normalize(n: int, g: int, weight: Tensor | None, bias: Tensor | None) -> int:
    """Mean (n + g), variance (3n + g), 1 / sqrt(variance + eps) (2g), (x - mean) rstd (2n), times weight (n), plus bias (n)."""
    return 6 * n + 4 * g + n * len(_tensors((weight, bias)))


def _normalize_backward(n: int, g: int, weight: Tensor | None, mask: Sequence[bool] = (True, True, True)) -> int:
    """x^ = (x - mean) rstd (2n); dx = rstd (w dy - mean(w dy) - x^ mean(w dy x^)) (7n + 2g, and n for w); dw = sum(dy x^) (2n); db = sum(dy) (n)."""
    return 2 * n * (mask[0] or mask[1]) + (7 * n + 2 * g + n * (weight is not None)) * mask[0] + 2 * n * mask[1] + n * mask[2]


def _rms_norm(n: int, g: int, weight: Tensor | None) -> int:
    """Mean of squares (2n + g), 1 / sqrt(it + eps) (2g), x rstd (n), times weight (n)."""
    return 3 * n + 3 * g + n * (weight is not None)


def _rms_norm_backward(n: int, g: int, weight: Tensor | None, mask: Sequence[bool]) -> int:
    """x^ = x rstd (n); dx = rstd (w dy - x^ mean(w dy x^)) (5n + g, and n for w); dw = sum(dy x^) (2n)."""
    return n * (mask[0] or mask[1]) + (5 * n + g + n * (weight is not None)) * mask[0] + 2 * n * mask[1]


def _batch_norm(c: Call) -> int:
    """Training: a group per channel, and a moving average (3) for each running statistic. Else 1 / sqrt(running_var + eps) is all of the statistics."""
    x: Tensor = c.input
    n, channels = x.numel(), x.shape[1]
    if getattr(c, "training", False):
        running = _tensors((getattr(c, "running_mean", None), getattr(c, "running_var", None)))
        return _normalize(n, channels, c.weight, c.bias) + 3 * len(running) * channels
    affine = len(_tensors((c.weight, c.bias)))
    return (2 + affine) * n + 2 * channels


def _batch_norm_backward(c: Call) -> int:
    """Not training, the statistics are constants: rstd (2 per channel), dx = dy (w rstd) (n, and 1 per channel), x^ (2n), dw (2n), db (n)."""
    x: Tensor = c.input
    n, channels, (dx, dw, db) = x.numel(), x.shape[1], map(bool, c.output_mask)
    if c.train:
        return _normalize_backward(n, channels, c.weight, c.output_mask)
    return 2 * channels * (dx or dw) + (n + channels * (c.weight is not None)) * dx + 4 * n * dw + n * db


# --- Pooling, losses, norms, sums by index ----------------------------------------------------------------------------------------------


def _kernel(dims: int, size: Sequence[int]) -> int:
    return int(prod(size) ** (dims if len(size) == 1 else 1))


def _window_elements(whole: Sequence[int], windows: Sequence[int]) -> int:
    """Elements in all windows of adaptive pooling: the i-th of o over s elements is [floor(i s / o), ceil((i + 1) s / o))."""
    return prod(sum(-(-(i + 1) * s // o) - i * s // o for i in range(o)) for s, o in zip(whole, windows, strict=True))


def _loss(c: Call, per_element: int) -> int:
    """`reduction` is 0 for none, 1 for the mean, 2 for the sum."""
    n: int = c.self.numel()
    return per_element * n + (0, n + 1, n)[c.reduction]


def _nll(c: Call) -> int:
    """-x[t], times weight; a weighted mean also sums the weights. Targets to be ignored cannot be told from shapes, and count."""
    n: int = c.target.numel()
    weighted = c.weight is not None
    return (1 + weighted) * n + (0, n + 1, n)[c.reduction] + n * (weighted and c.reduction == 1)


def _norm(read: int, made: int, order: float | None) -> int:
    """2: squares, sum, root. 1 and infinity: absolute values, their sum or the largest. 0: a count. Any p: absolute values, powers, sum, root."""
    fixed = {2.0: (2, 1), 1.0: (2, 0), inf: (2, 0), -inf: (2, 0), 0.0: (1, 0)}
    per_element, per_result = fixed.get(2.0 if order is None else float(order), (3, 1))
    return per_element * read + per_result * made


def _dist(c: Call) -> int:
    n = _broadcast_numel(c.self.shape, c.other.shape)
    return n + _norm(n, 1, c.p)


def _broadcast_numel(*shapes: Sequence[int]) -> int:
    return prod(0 if 0 in sizes else max(sizes) for sizes in zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1))


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> int:
    """One addition per element written, if it accumulates. `values` may be broadcast to them; with masks its own size is all that is known."""
    given = _tensors(indices)
    if not accumulate or any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return values.numel() if accumulate else 0
    kept = [size for d, size in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    return _broadcast_numel(*(i.shape for i in given)) * prod(kept)


def _bag(c: Call, width: int) -> int:
    """Rows looked up times their width; weighted rows are multiplied too."""
    rows: int = c.indices.numel()
    return rows * width * (1 + (c.per_sample_weights is not None))


# --- Element by element, and optimizers -------------------------------------------------------------------------------------------------


def _each(flops: int) -> _Rule:
    return lambda c: flops * c.made


def _of(read: int, made: int) -> _Rule:
    return lambda c: read * c.read + made * c.made


def _factors(c: Call) -> int:
    """How many scalar factors are there and not 1: foreach ops call `value` also `scalars`, and either may be a list or tensor."""
    given = [getattr(c, name) for name in ("alpha", "beta", "value", "scalars") if hasattr(c, name)]
    return sum(not (isinstance(factor, int | float) and factor == 1) for factor in given)


def _gelu_backward(c: Call) -> int:
    """dy (cdf + x pdf), cdf = (1 + erf(x / sqrt(2))) / 2 (4), pdf = c exp(-x x / 2) (4).

    With tanh: t = tanh(b (x + k x x x)) (6), i = b (1 + 3 k x x) (3: x x is there), dy ((1 + t) / 2 + x / 2 (1 - t t) i) (9).
    """
    return _each(18 if c.approximate == "tanh" else 11)(c)


def _fused_adam(c: Call, decay: int) -> int:
    """m = lerp(m, g, 1 - b1) (3), v = b2 v + (1 - b2) g g (4), p - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps) (6), for AMSGrad max(v, v^) (1)."""
    return _fused(c, 13 + c.amsgrad, decay)


def _fused_sgd(c: Call) -> int:
    """p - lr g (2); with momentum b = mu b + (1 - damping) g (2, damped 3; the first step copies g), for Nesterov g + mu b (2)."""
    buffer = (0 if c.is_first_step else 2 + (c.dampening != 0)) + 2 * c.nesterov
    return _fused(c, 2 + buffer * (c.momentum != 0), decay=2)


def _fused(c: Call, flops: int, decay: int) -> int:
    """Per element of the parameters, with weight decay, g + wd p (2) or p (1 - lr wd) (1), `maximize` (-g) and the gradient scaler's division."""
    return _each(flops + decay * (c.weight_decay != 0) + c.maximize + (c.grad_scale is not None))(c)


# --- The tables. A name stands for its in-place and foreach forms too -------------------------------------------------------------------


def _names(*lines: str) -> list[str]:
    return " ".join(lines).split()


_NO_ARITHMETIC = frozenset(
    _names(
        # Views and shapes.
        "alias as_strided detach diagonal expand permute reshape select slice split split_with_sizes squeeze t transpose unbind unfold unsafe_split",
        "unsafe_split_with_sizes unsqueeze view _unsafe_view _reshape_alias _conj _neg_view view_as_complex view_as_real resize set lift lift_fresh",
        # Copies, conversions and rearrangements, and the gradients of views.
        "_to_copy cat clone copy stack repeat repeat_interleave flip roll rot90 tril triu diag_embed complex constant_pad_nd im2col pixel_shuffle",
        "pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
        "as_strided_scatter diagonal_scatter select_scatter slice_scatter diagonal_backward select_backward slice_backward _local_scalar_dense",
        # Creation and random numbers.
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full full_like",
        "new_full zero fill scalar_tensor arange linspace eye tril_indices triu_indices _efficientzerotensor rand rand_like randn randn_like randint",
        "randint_like randperm bernoulli cauchy exponential geometric log_normal multinomial normal random uniform",
        # Reading and writing by index or mask.
        "index _unsafe_index index_copy index_fill index_select gather take masked_fill masked_scatter masked_select where embedding nan_to_num",
        # Comparing, ordering, counting and logic: the result is a mask, an index, an integer, or a number that was there before.
        "eq ne lt le gt ge equal isnan isinf signbit all any argmax argmin count_nonzero nonzero sort argsort topk kthvalue median nanmedian mode",
        "unique_dim _unique2 bucketize searchsorted logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor",
        "bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ _assert_async _linalg_check_errors _int_mm",
        # Outside aten.
        "prim::device profiler::_record_function_enter_new profiler::_record_function_exit",
    )
)

_EACH = {
    **dict.fromkeys(
        _names(
            "abs neg sign sgn reciprocal mul maximum minimum fmax fmin clamp_min clamp_max floor ceil round trunc",
            "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh",
            "erf erfc erfinv lgamma digamma polygamma sinc hypot fmod remainder copysign angle cumsum cumprod cummax cummin _amp_update_scale",
            "relu threshold leaky_relu _prelu_kernel rrelu_with_noise hardshrink softshrink threshold_backward leaky_relu_backward",
            "rrelu_with_noise_backward hardshrink_backward softshrink_backward hardtanh_backward hardsigmoid_backward",
        ),
        1,
    ),
    "_log_softmax_backward_data": 4,  # dy - exp(y) sum(dy)
    "_prelu_kernel_backward": 2,  # dy w, dy x
    "_softmax_backward_data": 4,  # (dy - sum(dy y)) y
    "celu": 3,  # a expm1(x b)
    "elu": 3,  # a expm1(x b)
    "floor_divide": 2,  # floor(x / y)
    "frac": 2,  # x - trunc(x)
    "glu": 5,  # a sigmoid(b)
    "hardsigmoid": 4,  # min(max(x + 3, 0), 6) / 6
    "hardswish": 5,  # x min(max(x + 3, 0), 6) / 6
    "hardswish_backward": 3,  # dy (x / 3 + 1 / 2)
    "hardtanh": 2,  # min(max(x, low), high)
    "huber_loss_backward": 3,  # c (x - t) dy
    "lerp": 3,  # x + w (y - x)
    "linalg_cross": 3,  # x1 y2 - x2 y1
    "log_sigmoid_backward": 8,  # dy (d - s z / (1 + z)), z = exp(-|x|)
    "log_sigmoid_forward": 6,  # min(0, x) - log1p(exp(-|x|))
    "logaddexp": 4,  # log(exp(x) + exp(y))
    "logaddexp2": 4,  # log2(exp2(x) + exp2(y))
    "logcumsumexp": 4,  # log(exp(x) + exp(y)), with what came before
    "logit": 3,  # log(x / (1 - x))
    "logit_backward": 3,  # dy / (x (1 - x))
    "mish": 4,  # x tanh(log1p(exp(x)))
    "mish_backward": 13,  # dy (t + x s (1 - t t)), s = sigmoid(x), t = tanh(log1p(exp(x)))
    "mse_loss_backward": 3,  # c (x - t) dy
    "native_dropout_backward": 2,  # dy mask / (1 - p)
    "polar": 4,  # r cos(a), r sin(a)
    "sigmoid": 4,  # 1 / (1 + exp(-x))
    "sigmoid_backward": 3,  # dy (1 - y) y
    "silu": 4,  # x / (1 + exp(-x))
    "silu_backward": 9,  # dy s (1 + x (1 - s)), s = sigmoid(x)
    "smooth_l1_loss_backward": 4,  # c (x - t) dy / beta
    "softplus": 4,  # log1p(exp(x b)) / b
    "softplus_backward": 5,  # dy z / (z + 1), z = exp(x b)
    "tanh_backward": 3,  # dy (1 - y y)
    "upsample_bicubic2d": 35,  # four rows of four points and a column, 7 each (4 products, 3 sums)
    "upsample_bilinear2d": 9,  # two rows of two points and a column, 3 each (2 products, 1 sum)
    "upsample_linear1d": 3,
    "upsample_trilinear3d": 21,  # two planes and a pair
    "xlogy": 2,  # x log(y)
}
"""FLOPs per element of the result."""

_EACH_READ = {
    "_safe_softmax": (5, 0),
    "_softmax": (5, 0),  # exp(x - max) / sum(exp(x - max))
    "aminmax": (2, 0),
    "histc": (4, 0),  # bins (x - min) / (max - min), and counting
    "logsumexp": (4, 2),  # max + log(sum(exp(x - max)))
    "mean": (1, 1),
    "std": (4, 3),
    "std_mean": (4, 3),
    "var": (4, 2),  # mean (n + m), sum of (x - mean) (x - mean) over n - 1 (3n + m)
    "var_mean": (4, 2),
    **dict.fromkeys(_names("_amp_foreach_non_finite_check_and_unscale amax amin max min nansum prod sum"), (1, 0)),
    # Gradients that meet in one place are added: each once …
    **dict.fromkeys(_names("adaptive_max_pool2d_backward adaptive_max_pool3d_backward col2im embedding_dense_backward unfold_backward"), (1, 0)),
    **dict.fromkeys(_names("max_pool2d_with_indices_backward max_pool3d_with_indices_backward"), (1, 0)),
    **{f"{name}{d}d_backward": (1, 0) for d in (1, 2, 3) for name in ("reflection_pad", "replication_pad", "upsample_nearest", "_upsample_nearest_exact")},
    # … or to each of the points it was made of, after a product per dimension.
    "upsample_bicubic2d_backward": (48, 0),
    "upsample_bilinear2d_backward": (12, 0),
    "upsample_linear1d_backward": (4, 0),
    "upsample_trilinear3d_backward": (32, 0),
}
"""FLOPs per element of the first argument, and per element of the result."""

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable")

_FORMULAS: dict[str, _Rule] = {
    **{name: _each(flops) for name, flops in _EACH.items()},
    **{name: _of(*flops) for name, flops in _EACH_READ.items()},
    # Products. Those torch counts are for the overloads its formulas refuse.
    **dict.fromkeys(["mm", "bmm"], lambda c: _product(c.self, c.mat2)),
    "addmm": lambda c: _product(c.mat1, c.mat2),
    **dict.fromkeys(["baddbmm", "addbmm"], lambda c: _product(c.batch1, c.batch2)),
    **dict.fromkeys(["mv", "dot", "vdot"], lambda c: 2 * c.read),
    "addmv": lambda c: 2 * c.mat.numel(),
    **dict.fromkeys(["_grouped_mm", "_scaled_grouped_mm"], lambda c: _grouped_mm(c.self, c.mat2)),
    "affine_grid_generator": lambda c: 2 * c.theta.shape[-1] * c.made,  # homogeneous coordinates times theta
    **dict.fromkeys([f"_scaled_dot_product_{name}" for name in _ATTENTION], lambda c: _attention(c.query, c.key, c.value)),
    **dict.fromkeys([f"_scaled_dot_product_{name}_backward" for name in _ATTENTION], lambda c: _attention_backward(c.query, c.key, c.value)),
    # Recurrent layers.
    "_cudnn_rnn": lambda c: _rnn(c, c.weight),
    "_cudnn_rnn_backward": lambda c: _rnn_backward(c, c.weight, c.output_mask[3]),
    "mkldnn_rnn_layer": lambda c: _rnn(c, _mkldnn_weights(c)),
    "mkldnn_rnn_layer_backward": lambda c: _rnn_backward(c, _mkldnn_weights(c)),
    "_thnn_fused_lstm_cell": lambda c: _cell(c, 2),
    "_thnn_fused_gru_cell": lambda c: _cell(c, 3),
    "_thnn_fused_lstm_cell_backward_impl": lambda c: 23 * c.cx.numel() + 4 * c.cx.numel() * c.has_bias,
    "_thnn_fused_gru_cell_backward": lambda c: 16 * c.read + 6 * c.read * c.has_bias,
    # Normalisation.
    **dict.fromkeys(["native_layer_norm", "native_group_norm"], lambda c: _normalize(c.made, c.result[1].numel(), c.weight, c.bias)),
    **dict.fromkeys(
        ["native_layer_norm_backward", "native_group_norm_backward"], lambda c: _normalize_backward(c.read, c.mean.numel(), c.weight, c.output_mask)
    ),
    "_fused_rms_norm": lambda c: _rms_norm(c.made, c.result[1].numel(), c.weight),
    "_fused_rms_norm_backward": lambda c: _rms_norm_backward(c.read, c.rstd.numel(), c.weight, c.output_mask),
    **dict.fromkeys(_names("native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"), _batch_norm),
    "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm_backward": lambda c: _normalize_backward(c.read, c.input.shape[1], c.weight),
    "_weight_norm_interface": lambda c: 3 * c.v.numel() + 2 * c.g.numel(),  # v (g / |v|)
    "_weight_norm_interface_backward": lambda c: 5 * c.saved_v.numel() + 3 * c.saved_g.numel(),  # dg = sum(dw v) / |v|, (g / |v|) (dw - v (dg / |v|))
    # Pooling: an operation per place of the window, one more for an average.
    "max_pool2d_with_indices": lambda c: c.made * _kernel(2, c.kernel_size),
    "max_pool3d_with_indices": lambda c: c.made * _kernel(3, c.kernel_size),
    "avg_pool2d": lambda c: c.made * (_kernel(2, c.kernel_size) + 1),
    "avg_pool3d": lambda c: c.made * (_kernel(3, c.kernel_size) + 1),
    "avg_pool2d_backward": lambda c: c.read * (_kernel(2, c.kernel_size) + 1),
    "avg_pool3d_backward": lambda c: c.read * (_kernel(3, c.kernel_size) + 1),
    **dict.fromkeys(["adaptive_max_pool2d", "adaptive_max_pool3d"], lambda c: _window_elements(c.self.shape, c.result[0].shape)),
    **dict.fromkeys(["_adaptive_avg_pool2d", "_adaptive_avg_pool3d"], lambda c: _window_elements(c.self.shape, c.result.shape) + c.made),
    **dict.fromkeys(["_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"], lambda c: _window_elements(c.self.shape, c.grad_output.shape) + c.read),
    # Losses.
    "mse_loss": lambda c: _loss(c, 2),  # (x - t)^2
    "huber_loss": lambda c: _loss(c, 4),  # z = |x - t|, then z z / 2 or delta (z - delta / 2)
    "smooth_l1_loss": lambda c: _loss(c, 5),  # z = |x - t|, then z z / 2 / beta or z - beta / 2
    "binary_cross_entropy": lambda c: _loss(c, 8 + (c.weight is not None)),  # -(t log(x) + (1 - t) log(1 - x))
    "binary_cross_entropy_backward": lambda c: c.made * (6 + (c.weight is not None) + (c.reduction == 1)),  # dy (x - t) / max((1 - x) x, eps)
    # (1 - t) x - log_sigmoid(x), the second term times 1 + (pos_weight - 1) t
    "binary_cross_entropy_with_logits": lambda c: _loss(c, 9 + 4 * (c.pos_weight is not None) + (c.weight is not None)),
    **dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward"], _nll),
    # -dy at each target, times weight, over the total weight for a mean; the rest is zeros
    **dict.fromkeys(["nll_loss_backward", "nll_loss2d_backward"], lambda c: c.target.numel() * (1 + (c.weight is not None) + (c.reduction == 1))),
    # Reductions that take an argument.
    "_log_softmax": lambda c: 5 * c.read + c.read // max(1, c.self.shape[c.dim] if c.self.dim() else 1),  # x - max - log(sum(exp(x - max)))
    "linalg_vector_norm": lambda c: _norm(c.read, c.made, c.ord),
    "norm": lambda c: _norm(c.read, c.made, c.p if hasattr(c, "p") else c.ord),
    "dist": _dist,
    "trace": lambda c: min(c.self.shape),
    # Sums by index.
    **dict.fromkeys(["index_put", "_index_put_impl", "_unsafe_index_put"], lambda c: _index_put(c.self, c.indices, c.values, c.accumulate)),
    "index_add": lambda c: c.source.numel() * (1 + _factors(c)),
    "scatter": lambda c: c.index.numel() * hasattr(c, "reduce"),
    "scatter_add": lambda c: c.index.numel(),
    "scatter_reduce": lambda c: c.index.numel() + c.made * (c.reduce == "mean"),
    "_embedding_bag": lambda c: _bag(c, c.weight.shape[1]) + c.made * (c.mode == 1),
    **dict.fromkeys(
        ["_embedding_bag_backward", "_embedding_bag_dense_backward"],
        lambda c: c.read if c.mode == 2 else _bag(c, c.grad.shape[1]) + c.read * (c.mode == 1),  # mode 2: the largest row has all of it
    ),
    # Element by element, depending on an argument.
    **dict.fromkeys(["add", "sub", "rsub"], lambda c: c.made * (1 + _factors(c))),
    **dict.fromkeys(["addcmul", "addcdiv", "addr"], lambda c: c.made * (2 + _factors(c))),
    "clamp": lambda c: c.made * ((c.min is not None) + (c.max is not None)),
    "div": lambda c: c.made * (1 + (getattr(c, "rounding_mode", None) is not None)),
    "native_dropout": lambda c: 0 if c.train is False else 2 * c.made,  # x mask / (1 - p)
    "gelu": lambda c: c.made * (9 if c.approximate == "tanh" else 5),  # x / 2 (1 + tanh(b (x + k x x x))), x / 2 (1 + erf(x / sqrt(2)))
    "gelu_backward": _gelu_backward,
    "elu_backward": lambda c: c.made * (3 if c.is_result else 4),  # dy b (y + a), dy a exp(b x)
    "glu_backward": lambda c: 9 * c.read,  # s = sigmoid(b), da = dy s, db = (1 - s) s dy a
    # Optimizers' fused steps: the arithmetic of their foreach forms.
    "_fused_adam": lambda c: _fused_adam(c, decay=2),
    "_fused_adamw": lambda c: _fused_adam(c, decay=1),
    "_fused_sgd": _fused_sgd,
    "_fused_adagrad": lambda c: _fused(c, 7, decay=2),  # s + g g, p - (lr g) / (sqrt(s) + eps)
}

_COMPLEX = {"add": 2, "sub": 2, "rsub": 2, "neg": 2, "sum": 2, "mul": 6, "polar": 1, "sgn": 3}
"""Real operations in one complex operation."""

UNCOUNTED: Mapping[str, str] = {
    **dict.fromkeys(_names("_fft_c2c _fft_c2r _fft_r2c"), "depends on how the library factors the length"),
    **dict.fromkeys(
        _names(
            "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig linalg_inv_ex linalg_lstsq",
            "linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular",
        ),
        "depends on the solver",
    ),
    **dict.fromkeys(_names("grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward"), "points outside the input are skipped"),
    **dict.fromkeys(_names("_cdist_forward _cdist_backward"), "depends on the norm and on whether a matrix product is used"),
    **dict.fromkeys(_names("_ctc_loss _ctc_loss_backward"), "depends on the lengths of the targets"),
    **dict.fromkeys(_names("_trilinear multi_margin_loss multi_margin_loss_backward"), "rare in models"),
    "embedding_renorm": "depends on how many rows exceed the norm",
}
"""Ops left out on purpose, by name without `aten::` and a trailing underscore, and why."""
