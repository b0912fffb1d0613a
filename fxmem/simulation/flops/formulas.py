"""How many floating-point operations an operator's definition takes, by the arguments of a call; what is counted is
said in `fxmem.simulation.flops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import inf, prod
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = Callable[[SimpleNamespace], int]
"""A formula: reads a call's arguments by name."""


def tensors_among(value: Any) -> list[Tensor]:
    """The tensors of a call's argument or result: itself, or those in its tuple or list."""
    return [t for t in (value if isinstance(value, list | tuple) else (value,)) if isinstance(t, Tensor)]


def count_elements(value: Any) -> int:
    """Elements of a tensor, of a tuple's first tensor, or of a list's floating-point tensors. A tuple's first is the
    main result; a list comes from a foreach operator."""
    tensors = tensors_among(value)
    return (
        sum(t.numel() for t in tensors if t.is_floating_point())
        if isinstance(value, list)
        else tensors[0].numel()
        if tensors
        else 0
    )


# --- Matrix products and attention that torch's registry lacks or refuses ---------------------------------------------


def product(a: Tensor, b: Tensor) -> int:
    """A multiply-add for each element of `a` and column of `b`."""
    return 2 * a.numel() * b.shape[-1]


def grouped_mm(a: Tensor, b: Tensor) -> int:
    """Groups add up to one product, unless both operands are 3-d: that is a batch. They split the rows (2d x 3d), the
    columns (3d x 2d) or the contraction (2d x 2d)."""
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


def attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """q k', then scores v: as torch counts them, with the key and value heads repeated to the query's."""
    return 2 * prod(q.shape[:3]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def attention_backward(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The scores again, their gradient, and those of v, q and k: three products over q's head size, two over v's."""
    return 2 * prod(q.shape[:3]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def convolution_backward(c: SimpleNamespace) -> int:
    """Each of the gradients of input and weight costs the forward's multiply-adds. There is one for each number of the
    weight at each place that it is put; torch's formula takes the weight's for that of one group, and multiplies by
    their number."""
    narrow: Tensor = c.input if c.transposed else c.grad_output
    forward: int = 2 * c.weight.numel() * narrow.shape[0] * prod(narrow.shape[2:])
    return forward * sum(map(bool, c.output_mask[:2]))


# --- Recurrent layers -------------------------------------------------------------------------------------------------

_CELLS = {0: (1, 1, 2), 1: (1, 1, 4), 2: (4, 18, 24), 3: (3, 14, 17)}
"""By cuDNN's mode (relu, tanh, LSTM, GRU): gates, then operations per hidden element beyond the gates' sums, forward
and backward.

LSTM: three sigmoids (4 each), tanh, c = f c + i g (3), h = o tanh(c) (2). GRU: two sigmoids, r (U h), tanh, h = (1 - z)
n + z h (4). Backward, both: the two gradients that meet in h (1). LSTM: tanh(c), do = dh tanh(c) (1), dc += dh o (1 -
tanh(c) tanh(c)) (5), di, df, dg and the next dc (4), four gates' derivatives (3 each). GRU: dn, dz (2 each), the next
dh (1), tanh' (3), dr, d(U h) (1 each), two sigmoids' (3 each).
"""


def rnn(c: SimpleNamespace, weights: Sequence[Tensor]) -> int:
    """Per step: the products, the biases, the sum of a gate's two products, and the cell."""
    gates, pointwise, _ = _CELLS[c.mode]
    products, biases = _products_and_biases(weights)
    return _steps(c) * (products + biases + _hidden_elements(c, weights) * (gates + pointwise))


def rnn_backward(c: SimpleNamespace, weights: Sequence[Tensor], weights_too: bool = True) -> int:
    """Every product once for its input and once for its weight, every bias summed."""
    _, _, pointwise = _CELLS[c.mode]
    products, biases = _products_and_biases(weights)
    return _steps(c) * (products + (products + biases) * weights_too + _hidden_elements(c, weights) * pointwise)


def cell(c: SimpleNamespace, mode: int) -> int:
    """A cell by itself takes the gates' two products and sums them with the biases."""
    gates, pointwise, _ = _CELLS[mode]
    n: int = c.input_gates.numel()
    return n * (1 + len(tensors_among((c.input_bias, c.hidden_bias)))) + n // gates * pointwise


def _products_and_biases(weights: Sequence[Tensor]) -> tuple[int, int]:
    return 2 * sum(w.numel() for w in weights if w.dim() == 2), sum(w.numel() for w in weights if w.dim() == 1)


def _steps(c: SimpleNamespace) -> int:
    """Time steps times batch, packed sequences included."""
    return prod(c.input.shape[:-1])


def _hidden_elements(c: SimpleNamespace, weights: Sequence[Tensor]) -> int:
    """Hidden elements of all layers and directions: each has two matrices with a row per gate and element (a projection
    has fewer)."""
    rows: int = _CELLS[c.mode][0] * c.hidden_size
    return sum(w.dim() == 2 and w.shape[0] == rows for w in weights) // 2 * (rows // _CELLS[c.mode][0])


def mkldnn_weights(c: SimpleNamespace) -> list[Tensor]:
    """Two matrices and two biases. They are numbered from 0 in the forward op and from 1 in the backward one."""
    weights = tensors_among([getattr(c, f"weight{i}", None) for i in range(5)])
    return weights if c.has_biases else weights[:2]


# --- Normalisation: n elements, g groups that are normalised together -------------------------------------------------


def normalize(n: int, g: int, weight: Tensor | None, bias: Tensor | None) -> int:
    """Mean (n + g), variance (3n + g), 1 / sqrt(variance + eps) (2g), (x - mean) rstd (2n), times weight (n), plus bias
    (n)."""
    return 6 * n + 4 * g + n * len(tensors_among((weight, bias)))


def normalize_backward(n: int, g: int, weight: Tensor | None, mask: Sequence[bool] = (True, True, True)) -> int:
    """x^ = (x - mean) rstd (2n); dx = rstd (w dy - mean(w dy) - x^ mean(w dy x^)) (7n + 2g, and n for w); dw = sum(dy
    x^) (2n); db = sum(dy) (n)."""
    return (
        2 * n * (mask[0] or mask[1])
        + (7 * n + 2 * g + n * (weight is not None)) * mask[0]
        + 2 * n * mask[1]
        + n * mask[2]
    )


def rms_norm(n: int, g: int, weight: Tensor | None) -> int:
    """Mean of squares (2n + g), 1 / sqrt(it + eps) (2g), x rstd (n), times weight (n)."""
    return 3 * n + 3 * g + n * (weight is not None)


def rms_norm_backward(n: int, g: int, weight: Tensor | None, mask: Sequence[bool]) -> int:
    """x^ = x rstd (n); dx = rstd (w dy - x^ mean(w dy x^)) (5n + g, and n for w); dw = sum(dy x^) (2n)."""
    return n * (mask[0] or mask[1]) + (5 * n + g + n * (weight is not None)) * mask[0] + 2 * n * mask[1]


def batch_norm(c: SimpleNamespace) -> int:
    """Training: a group per channel, and a moving average (3) for each running statistic. Else 1 / sqrt(running_var +
    eps) is all of the statistics."""
    x: Tensor = c.input
    n, channels = x.numel(), x.shape[1]
    if getattr(c, "training", False):
        running = tensors_among((getattr(c, "running_mean", None), getattr(c, "running_var", None)))
        return normalize(n, channels, c.weight, c.bias) + 3 * len(running) * channels
    affine = len(tensors_among((c.weight, c.bias)))
    return (2 + affine) * n + 2 * channels


def batch_norm_backward(c: SimpleNamespace) -> int:
    """Not training, the statistics are constants: rstd (2 per channel), dx = dy (w rstd) (n, and 1 per channel), x^
    (2n), dw (2n), db (n)."""
    x: Tensor = c.input
    n, channels, (dx, dw, db) = x.numel(), x.shape[1], map(bool, c.output_mask)
    if c.train:
        return normalize_backward(n, channels, c.weight, c.output_mask)
    return 2 * channels * (dx or dw) + (n + channels * (c.weight is not None)) * dx + 4 * n * dw + n * db


# --- Pooling, losses, norms, sums by index ----------------------------------------------------------------------------


def window(dims: int, size: Sequence[int]) -> int:
    """Places in a pooling window; one size stands for all dimensions."""
    return int(prod(size) ** (dims if len(size) == 1 else 1))


def window_elements(whole: Sequence[int], windows: Sequence[int]) -> int:
    """Elements in all windows of adaptive pooling: the i-th of o over s elements is [floor(i s / o), ceil((i + 1) s /
    o))."""
    return prod(sum(-(-(i + 1) * s // o) - i * s // o for i in range(o)) for s, o in zip(whole, windows, strict=True))


def loss(c: SimpleNamespace, per_element: int) -> int:
    """`reduction` is 0 for none, 1 for the mean, 2 for the sum."""
    n: int = c.self.numel()
    return per_element * n + (0, n + 1, n)[c.reduction]


def nll(c: SimpleNamespace) -> int:
    """-x[t], times weight; a weighted mean also sums the weights. Targets to be ignored cannot be told from shapes, and
    count."""
    n: int = c.target.numel()
    weighted = c.weight is not None
    return (1 + weighted) * n + (0, n + 1, n)[c.reduction] + n * (weighted and c.reduction == 1)


def norm(read: int, made: int, order: float | None) -> int:
    """2: squares, sum, root. 1 and infinity: absolute values, their sum or the largest. 0: a count. Any p: absolute
    values, powers, sum, root."""
    fixed = {2.0: (2, 1), 1.0: (2, 0), inf: (2, 0), -inf: (2, 0), 0.0: (1, 0)}
    per_element, per_result = fixed.get(2.0 if order is None else float(order), (3, 1))
    return per_element * read + per_result * made


def dist(c: SimpleNamespace) -> int:
    """The norm of the difference."""
    n = _broadcast_numel(c.self.shape, c.other.shape)
    return n + norm(n, 1, c.p)


def _broadcast_numel(*shapes: Sequence[int]) -> int:
    return prod(
        0 if 0 in sizes else max(sizes) for sizes in zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    )


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> int:
    """One addition per element written, if it accumulates. `values` may be broadcast to them; with masks its own size
    is all that is known."""
    given = tensors_among(indices)
    if not accumulate or any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return values.numel() if accumulate else 0
    kept = [size for d, size in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    return _broadcast_numel(*(i.shape for i in given)) * prod(kept)


def bag(c: SimpleNamespace, width: int) -> int:
    """Rows looked up times their width; weighted rows are multiplied too."""
    rows: int = c.indices.numel()
    return rows * width * (1 + (c.per_sample_weights is not None))


# --- Element by element, and optimizers -------------------------------------------------------------------------------


def each(flops: int) -> Rule:
    """So many per element of the result."""
    return lambda c: flops * c.made


def read_and_made(read: int, made: int) -> Rule:
    """So many per element of the first argument, and per element of the result."""
    return lambda c: read * c.read + made * c.made


def factors(c: SimpleNamespace) -> int:
    """How many scalar factors are there and not 1: foreach ops call `value` also `scalars`, and either may be a list or
    tensor."""
    given = [getattr(c, name) for name in ("alpha", "beta", "value", "scalars") if hasattr(c, name)]
    return sum(not (isinstance(factor, int | float) and factor == 1) for factor in given)


def gelu_backward(c: SimpleNamespace) -> int:
    """dy (cdf + x pdf), cdf = (1 + erf(x / sqrt(2))) / 2 (4), pdf = c exp(-x x / 2) (4).

    With tanh: t = tanh(b (x + k x x x)) (6), i = b (1 + 3 k x x) (3: x x is there), dy ((1 + t) / 2 + x / 2 (1 - t t)
    i) (9).
    """
    return each(18 if c.approximate == "tanh" else 11)(c)


def fused_adam(c: SimpleNamespace, decay: int) -> int:
    """Per element, Adam's 13 operations, and 1 more for AMSGrad. m = lerp(m, g, 1 - b1) (3), v = b2 v + (1 - b2) g g
    (4), p - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps) (6), for AMSGrad max(v, v^) (1)."""
    return count_fused(c, 13 + c.amsgrad, decay)


def fused_sgd(c: SimpleNamespace) -> int:
    """p - lr g (2); with momentum b = mu b + (1 - damping) g (2, damped 3; the first step copies g), for Nesterov g +
    mu b (2)."""
    buffer = (0 if c.is_first_step else 2 + (c.dampening != 0)) + 2 * c.nesterov
    return count_fused(c, 2 + buffer * (c.momentum != 0), decay=2)


def count_fused(c: SimpleNamespace, flops: int, decay: int) -> int:
    """Per element, `flops`, weight decay, `maximize` (-g) and the gradient scaler's division. Decay is g + wd p (2) or
    p (1 - lr wd) (1)."""
    return each(flops + decay * (c.weight_decay != 0) + c.maximize + (c.grad_scale is not None))(c)
