from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fxmem.simulation.recording.flops import op_flops, torch_formulas

aten = torch.ops.aten
MEAN, SUM, NONE = 1, 2, 0
ALL = [True, True, True]


def is_counted_by_torch(func: Any) -> bool:
    """Whether `FlopCounterMode` counts this op; the sum over such ops is the figure it reports."""
    return func.overloadpacket in torch_formulas()


class Counter(TorchDispatchMode):
    """Counts every call: in all, those FlopCounterMode counts, and the names of those without a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.as_torch, self.corrected, self.uncounted = 0, 0, 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counted = op_flops(func, args, kwargs or {}, out)
        if counted is None:
            self.uncounted.add(str(func))
        self.total += counted or 0
        self.as_torch += (counted or 0) * is_counted_by_torch(func)
        if func is aten.convolution_backward.default and args[9] > 1:
            self.corrected += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out) - (counted or 0)
        return out


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def i(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.int64)


def flops_of(func: Any, *args: Any, **kwargs: Any) -> int | None:
    return op_flops(func, args, kwargs, func(*args, **kwargs))


# --- by hand ----------------------------------------------------------------------------------------------------------

BY_HAND: list[tuple[Any, tuple[Any, ...], dict[str, Any], int | None]] = [
    # Element by element: one per element of the result, broadcasting included.
    (aten.mul.Tensor, (t(3, 1), t(5)), {}, 15),
    (aten.exp.default, (t(3, 5),), {}, 15),
    (aten.relu_.default, (t(3, 5),), {}, 15),
    (aten.add.Tensor, (t(3, 5), t(3, 5)), {}, 15),
    (aten.add.Tensor, (t(3, 5), t(3, 5)), {"alpha": 2}, 2 * 15),
    (aten.add_.Scalar, (t(3, 5), 7), {}, 15),
    (aten.rsub.Scalar, (t(3, 5), 1, 2), {}, 2 * 15),
    (aten.addcmul.default, (t(7), t(7), t(7)), {}, 2 * 7),
    (aten.addcmul.default, (t(7), t(7), t(7)), {"value": 0.5}, 3 * 7),
    (aten.addr.default, (t(3, 5), t(3), t(5)), {"beta": 2}, 3 * 15),
    (aten.div.Tensor, (t(7), t(7)), {}, 7),
    (aten.div.Tensor_mode, (t(7), t(7)), {"rounding_mode": "floor"}, 2 * 7),
    (aten.floor_divide.default, (t(7), t(7)), {}, 2 * 7),
    (aten.floor_divide.default, (i(7), i(7)), {}, 0),
    (aten.clamp.default, (t(7), 0), {}, 7),
    (aten.clamp.default, (t(7), 0, 6), {}, 2 * 7),
    (aten.clamp.default, (t(7), None, 6), {}, 7),
    (aten.native_dropout.default, (t(7), 0.5, True), {}, 2 * 7),
    (aten.native_dropout.default, (t(7), 0.5, False), {}, 0),
    # Lists of tensors, in place or not.
    (aten._foreach_add_.Scalar, ([t(3), t(5)], 1), {}, 8),
    (aten._foreach_add.List, ([t(3), t(5)], [t(3), t(5)]), {"alpha": 2}, 2 * 8),
    (aten._foreach_addcdiv_.Scalar, ([t(3), t(5)], [t(3), t(5)], [t(3), t(5)]), {}, 2 * 8),
    (aten._foreach_addcdiv_.ScalarList, ([t(3), t(5)], [t(3), t(5)], [t(3), t(5)], [1.0, 1.0]), {}, 3 * 8),
    (aten._foreach_lerp_.Scalar, ([t(3), t(5)], [t(3), t(5)], 0.1), {}, 3 * 8),
    (aten._foreach_norm.Scalar, ([t(3), t(5)], 2), {}, 2 * 8 + 2),
    (aten._foreach_copy_.default, ([t(3)], [t(3)]), {}, 0),
    # Reductions: what they read, and what they make.
    (aten.sum.default, (t(3, 5),), {}, 15),
    (aten.sum.dim_IntList, (t(3, 5), [1]), {}, 15),
    (aten.mean.dim, (t(3, 5), [1]), {}, 15 + 3),
    (aten.amax.default, (t(3, 5), [1]), {}, 15),
    (aten.max.dim, (t(3, 5), 1), {}, 15),
    (aten.linalg_vector_norm.default, (t(3, 5), 1, [1]), {}, 2 * 15),
    (aten.linalg_vector_norm.default, (t(3, 5), float("inf")), {}, 2 * 15),
    (aten.linalg_vector_norm.default, (t(3, 5), 3, [1]), {}, 3 * 15 + 3),
    (aten.norm.ScalarOpt_dim, (t(3, 5), None, [1]), {}, 2 * 15 + 3),
    (aten.aminmax.default, (t(3, 5),), {}, 2 * 15),
    (aten.var_mean.correction, (t(3, 5), [1]), {}, 4 * 15 + 2 * 3),
    (aten.cumsum.default, (t(3, 5), 1), {}, 15),
    (aten.trace.default, (t(3, 5),), {}, 3),
    # Products, the bias free of charge.
    (aten.mm.default, (t(3, 5), t(5, 7)), {}, 2 * 3 * 5 * 7),
    (aten.addmm.default, (t(7), t(3, 5), t(5, 7)), {}, 2 * 3 * 5 * 7),
    (aten.bmm.dtype, (t(2, 3, 5), t(2, 5, 7), torch.float32), {}, 2 * 2 * 3 * 5 * 7),
    (aten.addbmm.default, (t(3, 7), t(2, 3, 5), t(2, 5, 7)), {}, 2 * 2 * 3 * 5 * 7),
    (aten.mv.default, (t(3, 5), t(5)), {}, 2 * 3 * 5),
    (aten.addmv.default, (t(3), t(3, 5), t(5)), {}, 2 * 3 * 5),
    (aten.dot.default, (t(5), t(5)), {}, 2 * 5),
    (
        aten.convolution.default,
        (t(2, 3, 8, 8), t(5, 3, 3, 3), t(5), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
        2 * 2 * 5 * 64 * 3 * 9,
    ),
    # Backward of a convolution: a gradient of 4 x 6 x 6 results, each of 4 / groups channels of 3 x 3 places, for the
    # input and for the weight. Dense, in 2 groups, one for each channel; transposed.
    *(
        (
            aten.convolution_backward.default,
            (
                *(t(2, 4, 6, 6), t(2, 4, 8, 8), t(4, 4 // groups, 3, 3), [4]),
                *([1, 1], [0, 0], [1, 1], False, [0, 0], groups, mask),
            ),
            {},
            sum(mask[:2]) * 2 * (2 * 4 * 36 * (4 // groups) * 9),
        )
        for groups in (1, 2, 4)
        for mask in (ALL, [True, False, False], [False, True, True])
    ),
    (
        aten.convolution_backward.default,
        (
            *(t(2, 4, 8, 8), t(2, 4, 6, 6), t(4, 2, 3, 3), [4]),
            *([1, 1], [0, 0], [1, 1], True, [0, 0], 2, ALL),
        ),
        {},
        2 * 2 * (2 * 4 * 36 * 2 * 9),
    ),
    (aten.affine_grid_generator.default, (t(2, 2, 3), [2, 1, 5, 7], False), {}, 2 * 3 * (2 * 5 * 7 * 2)),
    # Pooling: 3 x 2 windows; 7 elements in 3 windows are [0, 3), [2, 5), [4, 7), 5 in 2 are [0, 3), [2, 5).
    (aten.max_pool2d_with_indices.default, (t(2, 3, 6, 6), [3, 2], [3, 2]), {}, (2 * 3 * 2 * 3) * 6),
    (aten.avg_pool2d.default, (t(2, 3, 6, 6), [3, 2], [3, 2]), {}, (2 * 3 * 2 * 3) * (6 + 1)),
    (
        aten.avg_pool2d_backward.default,
        (t(2, 3, 2, 3), t(2, 3, 6, 6), [3, 2], [3, 2], [0, 0], False, True, None),
        {},
        (2 * 3 * 2 * 3) * (6 + 1),
    ),
    (aten.max_pool3d_with_indices.default, (t(1, 3, 4, 4, 4), [2]), {}, (3 * 2 * 2 * 2) * 8),
    (aten._adaptive_avg_pool2d.default, (t(2, 3, 7, 5), [3, 2]), {}, (2 * 3) * (9 * 6 + 3 * 2)),
    (aten._adaptive_avg_pool2d_backward.default, (t(2, 3, 3, 2), t(2, 3, 7, 5)), {}, (2 * 3) * (9 * 6 + 3 * 2)),
    (aten.adaptive_max_pool2d.default, (t(2, 3, 7, 5), [3, 2]), {}, (2 * 3) * (9 * 6)),
    (
        aten.max_pool2d_with_indices_backward.default,
        (t(2, 3, 2, 2), t(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, i(2, 3, 2, 2)),
        {},
        24,
    ),
    # Interpolation: what each new point, or each gradient, is made of.
    (aten.upsample_nearest2d.default, (t(1, 2, 3, 3), [6, 6]), {}, 0),
    (aten.upsample_bilinear2d.default, (t(1, 2, 3, 3), [6, 6], False), {}, 72 * (4 + 2 + 2 + 1)),
    (aten.upsample_bilinear2d_backward.default, (t(1, 2, 6, 6), [6, 6], [1, 2, 3, 3], False), {}, 72 * 4 * (2 + 1)),
    (aten.upsample_bicubic2d.default, (t(1, 2, 3, 3), [6, 6], False), {}, 72 * 5 * (4 + 3)),
    (aten.upsample_bicubic2d_backward.default, (t(1, 2, 6, 6), [6, 6], [1, 2, 3, 3], False), {}, 72 * 16 * (2 + 1)),
    (aten.upsample_trilinear3d.default, (t(1, 1, 3, 3, 3), [6, 6, 6], False), {}, 216 * 7 * (2 + 1)),
    (
        aten.upsample_trilinear3d_backward.default,
        (t(1, 1, 6, 6, 6), [6, 6, 6], [1, 1, 3, 3, 3], False),
        {},
        216 * 8 * (3 + 1),
    ),
    (aten.reflection_pad2d_backward.default, (t(1, 2, 5, 5), t(1, 2, 3, 3), [1, 1, 1, 1]), {}, 50),
    (aten.col2im.default, (t(1, 18, 4), [4, 4], [3, 3], [1, 1], [0, 0], [1, 1]), {}, 72),
    # Normalisation that is not training.
    (aten.native_batch_norm.default, (t(2, 3, 5), t(3), t(3), t(3), t(3), False, 0.1, 1e-5), {}, 4 * 30 + 2 * 3),
    (aten.native_batch_norm.default, (t(2, 3, 5), None, None, t(3), t(3), False, 0.1, 1e-5), {}, 2 * 30 + 2 * 3),
    # Losses, and the gradients that only touch targets.
    (aten.mse_loss.default, (t(3, 5), t(3, 5), NONE), {}, 2 * 15),
    (aten.mse_loss.default, (t(3, 5), t(3, 5), SUM), {}, 2 * 15 + 15),
    (aten.mse_loss.default, (t(3, 5), t(3, 5)), {}, 2 * 15 + 15 + 1),
    (aten.nll_loss_forward.default, (t(3, 5), i(3), None, MEAN, -100), {}, 3 + 3 + 1),
    (aten.nll_loss_forward.default, (t(3, 5), i(3), t(5), MEAN, -100), {}, 6 + 3 + 1 + 3),
    (aten.nll_loss_backward.default, (t(), t(3, 5), i(3), None, MEAN, -100, t()), {}, 3 + 3),
    # Sums by index.
    (aten.embedding_dense_backward.default, (t(2, 5, 3), i(2, 5), 11, -1, False), {}, 30),
    (aten.index_add.default, (t(7, 3), 0, i(5), t(5, 3)), {"alpha": 2}, 2 * 15),
    (aten.scatter_add.default, (t(7, 3), 0, i(5, 3), t(5, 3)), {}, 15),
    (aten.scatter.src, (t(7, 3), 0, i(5, 3), t(5, 3)), {}, 0),
    (aten.scatter.reduce, (t(7, 3), 0, i(5, 3), t(5, 3)), {"reduce": "add"}, 15),
    (aten.scatter_reduce.two, (t(7, 3), 0, i(5, 3), t(5, 3), "mean"), {}, 15 + 21),
    (aten.index_put.default, (t(7, 3), [i(5)], t(5, 3)), {}, 0),
    (aten.index_put.default, (t(7, 3), [i(5)], t(3), True), {}, 15),
    (aten.index_put.default, (t(7, 11, 3), [None, i(5, 1), i(2)], t(), True), {}, 7 * 5 * 2),
    (aten.index_put.default, (t(7, 3), [i(0)], t(0, 3), True), {}, 0),
    (aten._embedding_bag.default, (t(11, 3), i(10), i(2)), {}, 30),
    (aten._embedding_bag.default, (t(11, 3), i(10), i(2), False, 1), {}, 30 + 6),
    (aten._embedding_bag.default, (t(11, 3), i(10), i(2), False, 0, False, t(10)), {}, 2 * 30),
    (aten._embedding_bag_dense_backward.default, (t(2, 3), i(10), i(10), i(2), i(2), 11, False, 0, None), {}, 30),
    (aten._embedding_bag_dense_backward.default, (t(2, 3), i(10), i(10), i(2), i(2), 11, False, 1, None), {}, 30 + 6),
    (aten._embedding_bag_dense_backward.default, (t(2, 3), i(10), i(10), i(2), i(2), 11, False, 2, None), {}, 6),
    # What moves, creates, selects, orders or compares.
    (aten.cat.default, ([t(3), t(5)],), {}, 0),
    (aten.clone.default, (t(3),), {}, 0),
    (aten._to_copy.default, (t(3),), {"dtype": torch.bfloat16}, 0),
    (aten.where.self, (t(3, dtype=torch.bool), t(3), t(3)), {}, 0),
    (aten.gt.Scalar, (t(3), 0), {}, 0),
    (aten.argmax.default, (t(3),), {}, 0),
    (aten.sort.default, (t(3),), {}, 0),
    (aten.rand_like.default, (t(3),), {}, 0),
    # Integers and booleans are no floating point; complex numbers are two.
    (aten.add.Tensor, (i(3), i(3)), {}, 0),
    (aten.mul.Tensor, (i(3), t(3)), {}, 3),
    (aten.div.Tensor, (i(3), i(3)), {}, 3),
    (aten.sum.default, (t(3, dtype=torch.bool),), {}, 0),
    (aten.sum.default, (i(3),), {"dtype": torch.float32}, 3),
    (aten.mul.Tensor, (t(3, dtype=torch.complex64), t(3, dtype=torch.complex64)), {}, 6 * 3),
    (aten.add.Tensor, (t(3, dtype=torch.complex64), t(3, dtype=torch.complex64)), {}, 2 * 3),
    (aten.exp.default, (t(3, dtype=torch.complex64),), {}, None),
    # Nothing there, nothing done.
    (aten.mul.Tensor, (t(0, 5), t(5)), {}, 0),
    (aten._log_softmax.default, (t(3, 0), 1, False), {}, 0),
    # Known, and left out on purpose.
    (aten._linalg_svd.default, (t(3, 5),), {}, None),
    (aten._fft_c2c.default, (t(4, dtype=torch.complex64), [0], 0, True), {}, None),
]


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"), [pytest.param(*case, id=f"{n}-{case[0]}") for n, case in enumerate(BY_HAND)]
)
def test_count_is_the_one_done_by_hand(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: int | None
) -> None:
    assert flops_of(func, *args, **kwargs) == expected


def test_arguments_may_be_given_by_name() -> None:
    out = t(3, 5)
    assert op_flops(aten.add.Tensor, (), {"self": t(3, 5), "other": t(3, 5), "alpha": 2}, out) == 30


# --- a fused op counts what its definition counts, written in elementary ops ------------------------------------------

X, Y, Z = t(3, 5), t(3, 5), t(3, 5)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> None:
    mean = x.mean(-1, keepdim=True)
    d = x - mean
    rstd = ((d * d).mean(-1, keepdim=True) + 1e-5).rsqrt()
    (x - mean) * rstd * w + b


def layer_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> None:
    hat, g = (x - mean) * rstd, dy * w
    rstd * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))
    (dy * hat).sum(0)
    dy.sum(0)


def batch_norm(x: Tensor, running_mean: Tensor, running_var: Tensor, w: Tensor, b: Tensor) -> None:
    mean = x.mean((0, 2), keepdim=True)
    d = x - mean
    var = (d * d).mean((0, 2), keepdim=True)
    running_mean.lerp(mean, 0.1)
    running_var.lerp(var, 0.1)
    (x - mean) * (var + 1e-5).rsqrt() * w + b


def batch_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> None:
    hat, g = (x - mean) * rstd, dy * w
    rstd * (g - g.mean((0, 2), keepdim=True) - hat * (g * hat).mean((0, 2), keepdim=True))
    (dy * hat).sum((0, 2))
    dy.sum((0, 2))


def batch_norm_backward_of_eval(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, w: Tensor) -> None:
    rstd = (var + 1e-5).rsqrt()
    dy * (w * rstd)
    (dy * ((x - mean) * rstd)).sum((0, 2))
    dy.sum((0, 2))


def rms_norm(x: Tensor, w: Tensor) -> None:
    x * ((x * x).mean(-1, keepdim=True) + 1e-5).rsqrt() * w


def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> None:
    hat, g = x * rstd, dy * w
    rstd * (g - hat * (g * hat).mean(-1, keepdim=True))
    (dy * hat).sum(0)


def softmax(x: Tensor) -> None:
    e = (x - x.amax(1, True)).exp()
    e / e.sum(1, True)


def log_softmax(x: Tensor) -> None:
    s = x - x.amax(1, True)
    s - s.exp().sum(1, True).log()


def logsumexp(x: Tensor) -> None:
    largest = x.amax(1, True)
    largest + (x - largest).exp().sum(1, True).log()


def var(x: Tensor) -> Tensor:
    d = x - x.mean(1, True)
    return (d * d).sum(1) / 4


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor) -> None:
    dg = (dw * v).sum(1, True) / norm
    (g / norm) * (dw - v * (dg / norm))


def gelu_tanh_backward(dy: Tensor, x: Tensor) -> None:
    square = x * x
    s = torch.tanh(0.8 * (x + 0.04 * (square * x)))
    dy * (0.5 * (1 + s) + 0.5 * x * (1 - s * s) * (0.8 * (1 + 0.12 * square)))


def lstm_cell(x_gates: Tensor, h_gates: Tensor, c: Tensor, b1: Tensor, b2: Tensor) -> None:
    i, f, g, o = (x_gates + h_gates + b1 + b2).chunk(4, 1)
    o.sigmoid() * (f.sigmoid() * c + i.sigmoid() * g.tanh()).tanh()


def lstm_cell_backward(dh: Tensor, dc: Tensor, c: Tensor, i: Tensor, f: Tensor, g: Tensor, o: Tensor) -> None:
    tanh = c.tanh()
    dc = dc + dh * o * (1 - tanh * tanh)
    dc * f
    for d, gate in ((dc * g, i), (dc * c, f), (dh * tanh, o)):
        d * ((1 - gate) * gate)
    (dc * i) * (1 - g * g)


def gru_cell(x_gates: Tensor, h_gates: Tensor, h: Tensor, b1: Tensor, b2: Tensor) -> None:
    (xr, xz, xn), (hr, hz, hn) = (x_gates + b1).chunk(3, 1), (h_gates + b2).chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    (1 - z) * (xn + r * hn).tanh() + z * h


def gru_cell_backward(dh: Tensor, h: Tensor, r: Tensor, z: Tensor, n: Tensor, hn: Tensor) -> None:
    dn = dh * (1 - z) * (1 - n * n)
    dh * z
    dn * r
    for d, gate in ((dn * hn, r), (dh * (h - n), z)):
        d * ((1 - gate) * gate)


H, G3, G4 = t(2, 7), t(2, 21), t(2, 28)  # two sequences, seven hidden elements, three or four gates
N, C = t(2, 3, 5), t(1, 3, 1)

BY_DEFINITION: dict[str, tuple[Callable[[], int | None], Callable[[], object]]] = {
    "sigmoid": (lambda: flops_of(aten.sigmoid.default, X), lambda: (X.neg().exp() + 1).reciprocal()),
    "silu": (lambda: flops_of(aten.silu.default, X), lambda: X / (X.neg().exp() + 1)),
    "gelu": (lambda: flops_of(aten.gelu.default, X), lambda: 0.5 * X * (1 + torch.erf(X * 0.7))),
    "gelu tanh": (
        lambda: flops_of(aten.gelu.default, X, approximate="tanh"),
        lambda: 0.5 * X * (1 + torch.tanh(0.8 * (X + 0.04 * (X * X * X)))),
    ),
    "mish": (lambda: flops_of(aten.mish.default, X), lambda: X * X.exp().log1p().tanh()),
    "softplus": (lambda: flops_of(aten.softplus.default, X), lambda: (X * 2).exp().log1p() / 2),
    "hardswish": (lambda: flops_of(aten.hardswish.default, X), lambda: X * (X + 3).clamp(0, 6) / 6),
    "hardsigmoid": (lambda: flops_of(aten.hardsigmoid.default, X), lambda: (X + 3).clamp(0, 6) / 6),
    "hardtanh": (lambda: flops_of(aten.hardtanh.default, X), lambda: X.clamp(-1, 1)),
    "elu": (lambda: flops_of(aten.elu.default, X), lambda: (X * 1.5).expm1() * 1.5),
    "log_sigmoid": (
        lambda: flops_of(aten.log_sigmoid_forward.default, X),
        lambda: X.clamp(max=0) - X.abs().neg().exp().log1p(),
    ),
    "glu": (lambda: flops_of(aten.glu.default, t(3, 10), 1), lambda: X * Y.sigmoid()),
    "lerp": (lambda: flops_of(aten.lerp.Scalar, X, Y, 0.5), lambda: X + 0.5 * (Y - X)),
    "logaddexp": (lambda: flops_of(aten.logaddexp.default, X, Y), lambda: (X.exp() + Y.exp()).log()),
    "logit": (lambda: flops_of(aten.logit.default, X), lambda: (X / (1 - X)).log()),
    "xlogy": (lambda: flops_of(aten.xlogy.Tensor, X, Y), lambda: X * Y.log()),
    "frac": (lambda: flops_of(aten.frac.default, X), lambda: X - X.trunc()),
    "cross": (lambda: flops_of(aten.linalg_cross.default, N.mT, N.mT), lambda: N * N - N * N),
    "polar": (lambda: flops_of(aten.polar.default, X, Y), lambda: (X * Y.cos(), X * Y.sin())),
    "complex product": (
        lambda: flops_of(aten.mul.Tensor, X.to(torch.complex64), Y.to(torch.complex64)),
        lambda: (X * Y - X * Y, X * Y + X * Y),
    ),
    "native_dropout": (lambda: flops_of(aten.native_dropout.default, X, 0.5, True), lambda: X * Y * 2),
    "native_dropout'": (lambda: flops_of(aten.native_dropout_backward.default, X, Y, 2.0), lambda: X * Y * 2),
    "sigmoid'": (lambda: flops_of(aten.sigmoid_backward.default, X, Y), lambda: X * (1 - Y) * Y),
    "tanh'": (lambda: flops_of(aten.tanh_backward.default, X, Y), lambda: X * (1 - Y * Y)),
    "silu'": (lambda: flops_of(aten.silu_backward.default, X, Y), lambda: X * Y.sigmoid() * (1 + Y * (1 - Y))),
    "gelu'": (
        lambda: flops_of(aten.gelu_backward.default, X, Y),
        lambda: X * (0.5 * (1 + torch.erf(Y * 0.7)) + Y * (0.4 * (Y * Y * -0.5).exp())),
    ),
    "gelu tanh'": (
        lambda: flops_of(aten.gelu_backward.default, X, Y, approximate="tanh"),
        lambda: gelu_tanh_backward(X, Y),
    ),
    "mish'": (
        lambda: flops_of(aten.mish_backward.default, X, Y),
        lambda: X * (Y.exp().log1p().tanh() + Y * Y.sigmoid() * (1 - Z * Z)),
    ),
    "softplus'": (lambda: flops_of(aten.softplus_backward.default, X, Y, 2, 20), lambda: X * (Y * 2).exp() / (Z + 1)),
    "log_sigmoid'": (
        lambda: flops_of(aten.log_sigmoid_backward.default, X, Y, Z),
        lambda: X * (Z - Z * Y.abs().neg().exp() / (1 + Z)),
    ),
    "hardswish'": (lambda: flops_of(aten.hardswish_backward.default, X, Y), lambda: X * (Y / 3 + 0.5)),
    "elu'": (lambda: flops_of(aten.elu_backward.default, X, 2, 2, 2, False, Y), lambda: X * 2 * (Y * 2).exp()),
    "elu' of the result": (lambda: flops_of(aten.elu_backward.default, X, 2, 2, 2, True, Y), lambda: X * 2 * (Y + 2)),
    "glu'": (
        lambda: flops_of(aten.glu_backward.default, X, t(3, 10), 1),
        lambda: (X * Y.sigmoid(), (1 - Y) * Y * X * Z),
    ),
    "logit'": (lambda: flops_of(aten.logit_backward.default, X, Y), lambda: X / (Y * (1 - Y))),
    "prelu'": (lambda: flops_of(aten._prelu_kernel_backward.default, X, Y, Z), lambda: (X * Z, X * Y)),
    "softmax": (lambda: flops_of(aten._softmax.default, X, 1, False), lambda: softmax(X)),
    "log_softmax": (lambda: flops_of(aten._log_softmax.default, X, 1, False), lambda: log_softmax(X)),
    "softmax'": (
        lambda: flops_of(aten._softmax_backward_data.default, X, Y, 1, X.dtype),
        lambda: (X - (X * Y).sum(1, True)) * Y,
    ),
    "log_softmax'": (
        lambda: flops_of(aten._log_softmax_backward_data.default, X, Y, 1, X.dtype),
        lambda: X - Y.exp() * X.sum(1, True),
    ),
    "logsumexp": (lambda: flops_of(aten.logsumexp.default, X, [1]), lambda: logsumexp(X)),
    "var": (lambda: flops_of(aten.var.correction, X, [1]), lambda: var(X)),
    "std_mean": (lambda: flops_of(aten.std_mean.correction, X, [1]), lambda: var(X).sqrt()),
    "vector_norm 2": (lambda: flops_of(aten.linalg_vector_norm.default, X, 2, [1]), lambda: (X * X).sum(1).sqrt()),
    "dist": (lambda: flops_of(aten.dist.default, t(3, 1), t(5)), lambda: ((t(3, 1) - t(5)).square()).sum().sqrt()),
    "weight_norm": (
        lambda: flops_of(aten._weight_norm_interface.default, X, t(3, 1), 0),
        lambda: X * (t(3, 1) / (X * X).sum(1, True).sqrt()),
    ),
    "weight_norm'": (
        lambda: flops_of(aten._weight_norm_interface_backward.default, X, Y, t(3, 1), t(3, 1), 0),
        lambda: weight_norm_backward(X, Y, t(3, 1), t(3, 1)),
    ),
    "layer_norm": (
        lambda: flops_of(aten.native_layer_norm.default, X, [5], t(5), t(5), 1e-5),
        lambda: layer_norm(X, t(5), t(5)),
    ),
    "layer_norm'": (
        lambda: flops_of(aten.native_layer_norm_backward.default, X, Y, [5], t(3, 1), t(3, 1), t(5), t(5), ALL),
        lambda: layer_norm_backward(X, Y, t(3, 1), t(3, 1), t(5)),
    ),
    "group_norm": (
        lambda: flops_of(aten.native_group_norm.default, t(3, 5, 7), t(5), t(5), 3, 5, 7, 1, 1e-5),
        lambda: layer_norm(t(3, 35), t(35), t(35)),
    ),
    "group_norm'": (
        lambda: flops_of(
            aten.native_group_norm_backward.default, t(3, 5, 7), t(3, 5, 7), t(3, 1), t(3, 1), t(5), 3, 5, 7, 1, ALL
        ),
        lambda: layer_norm_backward(t(3, 35), t(3, 35), t(3, 1), t(3, 1), t(35)),
    ),
    "rms_norm": (lambda: flops_of(aten._fused_rms_norm.default, X, [5], t(5), 1e-5), lambda: rms_norm(X, t(5))),
    "rms_norm'": (
        lambda: flops_of(aten._fused_rms_norm_backward.default, X, Y, [5], t(3, 1), t(5), [True, True]),
        lambda: rms_norm_backward(X, Y, t(3, 1), t(5)),
    ),
    "batch_norm": (
        lambda: flops_of(aten.native_batch_norm.default, N, t(3), t(3), t(3), t(3), True, 0.1, 1e-5),
        lambda: batch_norm(N, C, C, C, C),
    ),
    "batch_norm of cuDNN": (
        lambda: flops_of(aten.cudnn_batch_norm.default, N, t(3), t(3), t(3), t(3), True, 0.1, 1e-5),
        lambda: batch_norm(N, C, C, C, C),
    ),
    "batch_norm'": (
        lambda: flops_of(aten.native_batch_norm_backward.default, N, N, t(3), t(3), t(3), t(3), t(3), True, 1e-5, ALL),
        lambda: batch_norm_backward(N, N, C, C, C),
    ),
    "batch_norm' of cuDNN": (
        lambda: op_flops(
            aten.cudnn_batch_norm_backward.default,
            (N, N, t(3), t(3), t(3), t(3), t(3), 1e-5, t(0)),
            {},
            (N, t(3), t(3)),
        ),
        lambda: batch_norm_backward(N, N, C, C, C),
    ),
    "batch_norm' of eval": (
        lambda: flops_of(aten.native_batch_norm_backward.default, N, N, t(3), t(3), t(3), None, None, False, 1e-5, ALL),
        lambda: batch_norm_backward_of_eval(N, N, C, C, C),
    ),
    "mse_loss": (lambda: flops_of(aten.mse_loss.default, X, Y), lambda: (X - Y).square().mean()),
    "mse_loss'": (lambda: flops_of(aten.mse_loss_backward.default, t(), X, Y, MEAN), lambda: 0.1 * (X - Y) * t()),
    "huber_loss": (lambda: flops_of(aten.huber_loss.default, X, Y, SUM), lambda: (0.5 * Z.mul((X - Y).abs())).sum()),
    "huber_loss'": (
        lambda: flops_of(aten.huber_loss_backward.default, t(), X, Y, MEAN, 1.0),
        lambda: 0.1 * (X - Y) * t(),
    ),
    "smooth_l1_loss": (
        lambda: flops_of(aten.smooth_l1_loss.default, X, Y),
        lambda: (0.5 * Z.mul((X - Y).abs()) / 2).mean(),
    ),
    "smooth_l1_loss'": (
        lambda: flops_of(aten.smooth_l1_loss_backward.default, t(), X, Y, MEAN, 2.0),
        lambda: 0.1 * (X - Y) * t() / 2,
    ),
    "bce": (
        lambda: flops_of(aten.binary_cross_entropy.default, X, Y),
        lambda: (Y * X.log() + (1 - Y) * (1 - X).log()).neg().mean(),
    ),
    "bce, weighted": (
        lambda: flops_of(aten.binary_cross_entropy.default, X, Y, Z),
        lambda: ((Y * X.log() + (1 - Y) * (1 - X).log()).neg() * Z).mean(),
    ),
    "bce'": (
        lambda: flops_of(aten.binary_cross_entropy_backward.default, t(), X, Y, None, MEAN),
        lambda: t() * (X - Y) / ((1 - X) * X).clamp_min(1e-12) / 15,
    ),
    "bce of logits": (
        lambda: flops_of(aten.binary_cross_entropy_with_logits.default, X, Y),
        lambda: ((1 - Y) * X - (X.clamp(max=0) - X.abs().neg().exp().log1p())).mean(),
    ),
    "bce of logits, weighted": (
        lambda: flops_of(aten.binary_cross_entropy_with_logits.default, X, Y, Z, Z),
        lambda: (((1 - Y) * X - (1 + (Z - 1) * Y) * (X.clamp(max=0) - X.abs().neg().exp().log1p())) * Z).mean(),
    ),
    "lstm_cell": (
        lambda: op_flops(aten._thnn_fused_lstm_cell.default, (G4, G4, H, t(28), t(28)), {}, (H, H, G4)),
        lambda: lstm_cell(G4, G4, H, t(28), t(28)),
    ),
    "lstm_cell'": (
        lambda: op_flops(aten._thnn_fused_lstm_cell_backward_impl.default, (H, H, H, H, G4, True), {}, (G4, H, t(28))),
        lambda: (lstm_cell_backward(H, H, H, H, H, H, H), G4.sum(0)),
    ),
    "gru_cell": (
        lambda: op_flops(aten._thnn_fused_gru_cell.default, (G3, G3, H, t(21), t(21)), {}, (H, t(2, 35))),
        lambda: gru_cell(G3, G3, H, t(21), t(21)),
    ),
    "gru_cell'": (
        lambda: op_flops(
            aten._thnn_fused_gru_cell_backward.default, (H, t(2, 35), True), {}, (G3, G3, H, t(21), t(21))
        ),
        lambda: (gru_cell_backward(H, H, H, H, H, H), G3.sum(0), G3.sum(0)),
    ),
}


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_fused_op_counts_what_its_definition_counts(name: str) -> None:
    fused, definition = BY_DEFINITION[name]
    with torch.no_grad(), Counter() as counter:
        definition()
    assert not counter.uncounted
    assert fused() == counter.total


@pytest.mark.parametrize(
    "mask", [[True, False, False], [False, True, False], [False, False, True], [False, False, False]]
)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_nobody_asks_for_are_not_counted(mask: list[bool], training: bool) -> None:
    n, c = 30, 3
    dx, dw, db = (10 * n + 2 * c, 4 * n, n) if training else (n + 3 * c, 4 * n + 2 * c, n)
    args = (N, N, t(3), t(3), t(3), t(3), t(3), training, 1e-5, mask)
    assert flops_of(aten.native_batch_norm_backward.default, *args) == dx * mask[0] + dw * mask[1] + db * mask[2]


# --- recurrent layers -------------------------------------------------------------------------------------------------


def recurrent_weights(
    gates: int, layers: int, directions: int, inputs: int, hidden: int, biases: bool, projection: int = 0
) -> list[Tensor]:
    weights = []
    for layer in range(layers):
        for _ in range(directions):
            read = directions * (projection or hidden) if layer else inputs
            weights += [t(gates * hidden, read), t(gates * hidden, projection or hidden)]
            weights += [t(gates * hidden), t(gates * hidden)] if biases else []
            weights += [t(projection, hidden)] if projection else []
    return weights


@pytest.mark.parametrize(
    ("mode", "gates", "cell", "cell_backward"), [(0, 1, 1, 2), (1, 1, 1, 4), (2, 4, 18, 24), (3, 3, 14, 17)]
)
def test_recurrent_layers(mode: int, gates: int, cell: int, cell_backward: int) -> None:
    """Two layers of two directions, 11 inputs, 7 hidden elements, 5 steps of 3 sequences."""
    weights = recurrent_weights(gates, 2, 2, 11, 7, biases=True)
    steps, rows = 5 * 3, gates * 7
    products = 2 * rows * (2 * 11 + 2 * 7 + 2 * 14 + 2 * 7)
    biases, sums, cells = 4 * 2 * rows, 4 * rows, 4 * 7
    args = (t(5, 3, 11), weights, 4, None, t(4, 3, 7), t(4, 3, 7), mode, 7, 0, 2, False, 0.0, True, True, [], None)
    out = (t(5, 3, 14), t(4, 3, 7), t(4, 3, 7), t(1), t(1))
    assert op_flops(aten._cudnn_rnn.default, args, {}, out) == steps * (products + biases + sums + cells * cell)

    def backward(*mask: bool) -> int | None:
        grads = (t(5, 3, 14), t(5, 3, 14), None, None)
        args = (
            t(5, 3, 11),
            weights,
            4,
            t(1),
            t(4, 3, 7),
            t(4, 3, 7),
            *grads,
            mode,
            7,
            0,
            2,
            False,
            0.0,
            True,
            True,
            [],
            None,
            t(1),
            list(mask),
        )
        return op_flops(aten._cudnn_rnn_backward.default, args, {}, (t(5, 3, 11), t(4, 3, 7), t(4, 3, 7), weights))

    assert backward(True, True, True, True) == steps * (2 * products + biases + cells * cell_backward)
    assert backward(True, True, True, False) == steps * (products + cells * cell_backward)


def test_recurrent_layer_of_packed_sequences_with_a_projection_and_no_bias() -> None:
    weights = recurrent_weights(4, 1, 1, 11, 7, biases=False, projection=2)
    args = (
        t(13, 11),
        weights,
        3,
        None,
        t(1, 3, 2),
        t(1, 3, 7),
        2,
        7,
        2,
        1,
        False,
        0.0,
        True,
        False,
        [3] * 4 + [1],
        None,
    )
    products = 2 * (28 * 11 + 28 * 2 + 2 * 7)
    assert op_flops(aten._cudnn_rnn.default, args, {}, (t(13, 2), t(1), t(1), t(1), t(1))) == 13 * (
        products + 28 + 7 * 18
    )


def test_lstm_layer_on_the_cpu_counts_as_on_the_gpu() -> None:
    layer = nn.LSTM(11, 7)
    with FakeTensorMode(allow_non_fake_inputs=True), Counter() as counter:
        out, _ = layer(torch.empty(5, 3, 11))
    assert not counter.uncounted
    cuda = (
        t(5, 3, 11),
        recurrent_weights(4, 1, 1, 11, 7, biases=True),
        4,
        None,
        t(1, 3, 7),
        t(1, 3, 7),
        2,
        7,
        0,
        1,
        False,
        0.0,
        True,
        False,
        [],
        None,
    )
    assert counter.total == op_flops(aten._cudnn_rnn.default, cuda, {}, (t(*out.shape), t(1), t(1), t(1), t(1)))


def test_lstm_layer_backward_on_the_cpu_counts_as_on_the_gpu() -> None:
    weights, x, h, y = recurrent_weights(4, 1, 1, 11, 7, biases=True), t(5, 3, 11), t(3, 7), t(5, 3, 7)
    cpu = (x, *weights, h, h, y, h, h, y, h, h, False, 2, 7, 1, True, True, False, [], False, t(1))
    cuda = (x, weights, 4, t(1), h, h, y, y, h, h, 2, 7, 0, 1, False, 0.0, True, False, [], None, t(1), [True] * 4)
    assert op_flops(aten.mkldnn_rnn_layer_backward.default, cpu, {}, (x, *weights, h, h)) == 15 * (
        2 * 2 * 28 * 18 + 2 * 28 + 7 * 24
    )
    assert op_flops(aten._cudnn_rnn_backward.default, cuda, {}, (x, h, h, weights)) == 15 * (
        2 * 2 * 28 * 18 + 2 * 28 + 7 * 24
    )


# --- attention and grouped products -----------------------------------------------------------------------------------

Q, K, V = t(2, 3, 5, 8), t(2, 3, 7, 8), t(2, 3, 7, 8)
FORWARD, BACKWARD = 2 * 2 * 3 * 5 * 7 * (8 + 8), 2 * 2 * 3 * 5 * 7 * (3 * 8 + 2 * 8)


@pytest.mark.parametrize(
    "kernel",
    [
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    ],
)
def test_attention_counts_two_products_and_five_in_backward(kernel: str) -> None:
    forward = getattr(aten, f"_scaled_dot_product_{kernel}").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_backward").default
    assert op_flops(forward, (Q, K, V), {}, (Q, t(2, 3, 5))) == FORWARD
    assert op_flops(backward, (Q, Q, K, V), {}, (Q, K, V)) == BACKWARD


@pytest.mark.parametrize("kernel", ["efficient_attention", "flash_attention_for_cpu"])
def test_values_may_have_heads_of_another_size(kernel: str) -> None:
    """Three of backward's five products are over the queries' size, 8, and two over the values', 16."""
    v, out = t(2, 3, 7, 16), t(2, 3, 5, 16)
    forward = getattr(aten, f"_scaled_dot_product_{kernel}").default
    assert op_flops(forward, (Q, K, v), {}, (out, t(2, 3, 5))) == 2 * 2 * 3 * 5 * 7 * (8 + 16)
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_backward").default
    assert op_flops(backward, (out, Q, K, v), {}, (Q, K, v)) == 2 * 2 * 3 * 5 * 7 * (3 * 8 + 2 * 16)


@pytest.mark.parametrize("kernel", ["flash_attention", "cudnn_attention"])
def test_grouped_query_heads_count_as_if_repeated(kernel: str) -> None:
    """As torch 2.15 counts them; 2.11's formula refuses them."""
    few = t(2, 1, 7, 8)
    assert (
        op_flops(getattr(aten, f"_scaled_dot_product_{kernel}").default, (Q, few, few), {}, (Q, t(2, 3, 5))) == FORWARD
    )
    assert (
        op_flops(getattr(aten, f"_scaled_dot_product_{kernel}_backward").default, (Q, Q, few, few), {}, (Q, few, few))
        == BACKWARD
    )


def test_attention_by_rows_takes_those_for_rows() -> None:
    """And of packed sequences the largest number of keys for each query."""
    packed = t(10, 3, 8), t(14, 3, 8), t(14, 3, 8)
    whole = [each.transpose(1, 2) for each in (Q, K, K)]
    for kernel in ("flash", "efficient"):
        forward = getattr(aten, f"_{kernel}_attention_forward").default
        bias = (None,) if kernel == "efficient" else ()
        for args, ends in ((packed, i(3)), (whole, None)):
            call = *args, *bias, ends, ends, 5, 7, 0.0, 0, False
            assert op_flops(forward, call, {}, (args[0],)) == FORWARD
    backward = aten._flash_attention_backward.default
    for args, ends in ((packed, i(3)), (whole, None)):
        call = args[0], *args, args[0], args[0], ends, ends, 5, 7, 0.0, False, None, None
        assert op_flops(backward, call, {}, args) == BACKWARD


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((11, 5), (3, 5, 7), 2 * 11 * 5 * 7),  # groups split the rows
        ((3, 11, 5), (5, 7), 2 * 11 * 5 * 7),  # the columns
        ((11, 5), (5, 7), 2 * 11 * 5 * 7),  # the contraction
        ((3, 11, 5), (3, 5, 7), 3 * 2 * 11 * 5 * 7),  # a batch
    ],
)
def test_grouped_product(a: tuple[int, ...], b: tuple[int, ...], expected: int) -> None:
    assert op_flops(aten._grouped_mm.default, (t(*a), t(*b)), {}, t(11, 7)) == expected


# --- optimizers -------------------------------------------------------------------------------------------------------

FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
STEPS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int]] = {
    # Per element, and 1 more per parameter where there is a step counter.
    "AdamW": (torch.optim.AdamW, 14),
    "AdamW, no decay": (lambda p, **form: torch.optim.AdamW(p, weight_decay=0.0, **form), 13),
    "AdamW, AMSGrad": (lambda p, **form: torch.optim.AdamW(p, amsgrad=True, **form), 15),
    "Adam": (torch.optim.Adam, 13),
    "Adam, decay": (lambda p, **form: torch.optim.Adam(p, weight_decay=0.1, **form), 15),
    "Adam, maximize": (lambda p, **form: torch.optim.Adam(p, maximize=True, **form), 14),
    "SGD": (torch.optim.SGD, 2),
    "SGD, momentum": (lambda p, **form: torch.optim.SGD(p, momentum=0.9, **form), 4),
    "SGD, damped": (lambda p, **form: torch.optim.SGD(p, momentum=0.9, dampening=0.1, **form), 5),
    "SGD, Nesterov, decay": (
        lambda p, **form: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, **form),
        8,
    ),
    "Adagrad": (torch.optim.Adagrad, 7),
    "Adagrad, decay": (lambda p, **form: torch.optim.Adagrad(p, weight_decay=0.1, **form), 9),
}


def steady_step(make: Callable[..., torch.optim.Optimizer], form: dict[str, bool]) -> Counter:
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape)) for shape in ((3, 5), (7,))]
        optimizer = make(params, **form)
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
        with Counter() as counter:
            optimizer.step()
    return counter


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STEPS)
def test_optimizers_forms_count_the_same(name: str, form: str) -> None:
    make, per_element = STEPS[name]
    counter = steady_step(make, FORMS[form])
    assert not counter.uncounted
    assert counter.total == per_element * 22 + (0 if name.startswith("SGD") else 2)


@pytest.mark.parametrize("form", ["for-loop", "foreach"])
@pytest.mark.parametrize("name", ["RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop"])
def test_other_optimizers_are_counted(name: str, form: str) -> None:
    counter = steady_step(getattr(torch.optim, name), FORMS[form])
    assert not counter.uncounted
    assert counter.total > 22


def test_gradient_scaling_inside_a_fused_step_is_a_division() -> None:
    params = [t(3, 5), t(7)]
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    args = (params, params, params, params, [], [t(), t()])
    assert op_flops(aten._fused_adamw_.default, args, options, None) == 13 * 22
    assert op_flops(aten._fused_adamw_.default, args, options | {"grad_scale": t()}, None) == 14 * 22


# --- whole models -----------------------------------------------------------------------------------------------------


def vision(name: str, size: int = 64) -> Callable[[], Callable[[], Tensor]]:
    def build() -> Callable[[], Tensor]:
        model = torchvision.models.get_model(name, weights=None)
        return lambda: model(t(2, 3, size, size)).sum()

    return build


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def language(name: str, **options: Any) -> Callable[[], Callable[[], Tensor]]:
    def build() -> Callable[[], Tensor]:
        config = getattr(transformers, f"{name}Config")(**{**TINY, **options})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return lambda: model(input_ids=i(2, 16), labels=i(2, 16)).loss

    return build


MODELS: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "resnet18": vision("resnet18"),
    "mobilenet_v3_small": vision("mobilenet_v3_small"),
    "convnext_tiny": vision("convnext_tiny"),
    "vit_b_16": vision("vit_b_16", size=224),
    "llama": language("Llama", num_key_value_heads=2),
    "mixtral": language("Mixtral", num_local_experts=4, num_key_value_heads=2),
}


@pytest.fixture(scope="module", params=MODELS)
def counted(request: pytest.FixtureRequest) -> tuple[Counter, FlopCounterMode]:
    """A training step's forward and backward, counted by both."""
    with torch.device("meta"):
        loss = MODELS[request.param]()
        with FlopCounterMode(display=False) as by_torch, Counter() as counter:
            loss().backward()
    return counter, by_torch


@pytest.mark.truth
def test_what_torch_counts_is_counted_as_torch_does(counted: tuple[Counter, FlopCounterMode]) -> None:
    counter, by_torch = counted
    assert counter.as_torch + counter.corrected == by_torch.get_total_flops() > 0


def test_models_have_nothing_uncounted(counted: tuple[Counter, FlopCounterMode]) -> None:
    counter, _ = counted
    assert counter.uncounted == set()
    assert counter.total > counter.as_torch


# --- what is unknown, and how to make it known ------------------------------------------------------------------------


@torch.library.custom_op("fxmem_test_flops::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


TWICE = torch.ops.fxmem_test_flops.twice


def test_op_nobody_knows_is_unknown() -> None:
    assert op_flops(TWICE.default, (X,), {}, Y) is None


def test_higher_order_operator_is_unknown() -> None:
    assert op_flops(torch.ops.higher_order.cond, (t(1), None, None, (X,)), {}, (X,)) is None


def test_composite_op_is_unknown() -> None:
    assert op_flops(aten.linear.default, (t(3, 5), t(7, 5)), {}, t(3, 7)) is None


def test_extra_formula_sees_the_call_and_its_result_and_goes_first() -> None:
    seen: dict[str, Any] = {}

    def formula(*args: Any, out_val: Any, **kwargs: Any) -> int:
        seen.update(args=args, out=out_val, kwargs=kwargs)
        return 11

    assert op_flops(TWICE.default, (X,), {"k": 1}, Y, extra={TWICE: formula}) == 11
    assert seen == {"args": (X,), "out": Y, "kwargs": {"k": 1}}
    assert op_flops(aten.mm.default, (t(3, 5), t(5, 7)), {}, t(3, 7), extra={aten.mm: formula}) == 11
    assert op_flops(aten.relu.default, (X,), {}, Y, extra={TWICE: formula}) == 15
    assert op_flops(aten.relu.default, (X,), {}, Y, extra={aten.relu: lambda *_, **__: None}) is None


def test_error_of_an_extra_formula_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        op_flops(aten.mm.default, (t(3, 5), t(5, 7)), {}, t(3, 7), extra={aten.mm: lambda *_, **__: 1 // 0})


def test_formula_registered_with_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, TWICE, lambda x, out_val: x.numel())
    assert is_counted_by_torch(TWICE.default)
    assert op_flops(TWICE.default, (X,), {}, Y) == 15
