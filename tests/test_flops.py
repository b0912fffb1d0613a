from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fxmem import flops
from fxmem.flops import UNCOUNTED, is_counted_by_torch, op_flops

aten = torch.ops.aten
MEAN, SUM, NONE = 1, 2, 0
ALL = [True, True, True]


class Counter(TorchDispatchMode):
    """Counts every call: in all, those FlopCounterMode counts, and the names of those without a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.as_torch, self.uncounted = 0, 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counted = op_flops(func, args, kwargs or {}, out)
        if counted is None:
            self.uncounted.add(str(func))
        self.total += counted or 0
        self.as_torch += (counted or 0) * is_counted_by_torch(func)
        return out


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def i(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.int64)


def flops_of(func: Any, *args: Any, **kwargs: Any) -> int | None:
    return op_flops(func, args, kwargs, func(*args, **kwargs))


def total(run: Callable[..., object], *tensors: Tensor) -> int:
    """FLOPs of all that `run` does, on tensors without data."""
    with torch.no_grad(), Counter() as counter:
        run(*tensors)
    assert not counter.uncounted
    return counter.total


# --- by hand ----------------------------------------------------------------------------------------------------------------------------

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
    (aten.convolution.default, (t(2, 3, 8, 8), t(5, 3, 3, 3), t(5), [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}, 2 * 2 * 5 * 64 * 3 * 9),
    (aten.affine_grid_generator.default, (t(2, 2, 3), [2, 1, 5, 7], False), {}, 2 * 3 * (2 * 5 * 7 * 2)),
    # Pooling: 3 x 2 windows; 7 elements in 3 windows are [0, 3), [2, 5), [4, 7), 5 in 2 are [0, 3), [2, 5).
    (aten.max_pool2d_with_indices.default, (t(2, 3, 6, 6), [3, 2], [3, 2]), {}, (2 * 3 * 2 * 3) * 6),
    (aten.avg_pool2d.default, (t(2, 3, 6, 6), [3, 2], [3, 2]), {}, (2 * 3 * 2 * 3) * (6 + 1)),
    (aten.avg_pool2d_backward.default, (t(2, 3, 2, 3), t(2, 3, 6, 6), [3, 2], [3, 2], [0, 0], False, True, None), {}, (2 * 3 * 2 * 3) * (6 + 1)),
    (aten.max_pool3d_with_indices.default, (t(1, 3, 4, 4, 4), [2]), {}, (3 * 2 * 2 * 2) * 8),
    (aten._adaptive_avg_pool2d.default, (t(2, 3, 7, 5), [3, 2]), {}, (2 * 3) * (9 * 6 + 3 * 2)),
    (aten._adaptive_avg_pool2d_backward.default, (t(2, 3, 3, 2), t(2, 3, 7, 5)), {}, (2 * 3) * (9 * 6 + 3 * 2)),
    (aten.adaptive_max_pool2d.default, (t(2, 3, 7, 5), [3, 2]), {}, (2 * 3) * (9 * 6)),
    (aten.max_pool2d_with_indices_backward.default, (t(2, 3, 2, 2), t(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, i(2, 3, 2, 2)), {}, 24),
    # Interpolation: what each new point, or each gradient, is made of.
    (aten.upsample_nearest2d.default, (t(1, 2, 3, 3), [6, 6]), {}, 0),
    (aten.upsample_bilinear2d.default, (t(1, 2, 3, 3), [6, 6], False), {}, 72 * (4 + 2 + 2 + 1)),
    (aten.upsample_bilinear2d_backward.default, (t(1, 2, 6, 6), [6, 6], [1, 2, 3, 3], False), {}, 72 * 4 * (2 + 1)),
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


@pytest.mark.parametrize(("func", "args", "kwargs", "expected"), [pytest.param(*case, id=f"{n}-{case[0]}") for n, case in enumerate(BY_HAND)])
def test_count_is_the_one_done_by_hand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: int | None) -> None:
    assert flops_of(func, *args, **kwargs) == expected


def test_arguments_may_be_given_by_name() -> None:
    out = t(3, 5)
    assert op_flops(aten.add.Tensor, (), {"self": t(3, 5), "other": t(3, 5), "alpha": 2}, out) == 30


# --- a fused op counts what its definition counts, written in elementary ops ------------------------------------------------------------


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    rstd = (d.mul(d).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return x.sub(t(*x.shape[:-1], 1)) * rstd * w + b


def layer_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> None:
    hat, g = (x - mean) * rstd, dy * w
    rstd * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))
    (dy * hat).sum(0)
    dy.sum(0)


def batch_norm(x: Tensor, w: Tensor, b: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    mean = x.mean((0, 2), keepdim=True)
    d = x - mean
    var = d.mul(d).mean((0, 2), keepdim=True)
    running_mean.lerp(mean, 0.1)
    running_var.lerp(var, 0.1)
    return (x - mean) * (var + 1e-5).rsqrt() * w + b


def batch_norm_eval_backward(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, w: Tensor) -> None:
    rstd = (var + 1e-5).rsqrt()
    dy * (w * rstd)
    (dy * ((x - mean) * rstd)).sum((0, 2))
    dy.sum((0, 2))


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * ((x * x).mean(-1, keepdim=True) + 1e-5).rsqrt() * w


def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> None:
    hat, g = x * rstd, dy * w
    rstd * (g - hat * (g * hat).mean(-1, keepdim=True))
    (dy * hat).sum(0)


def gelu_tanh_backward(dy: Tensor, x: Tensor) -> Tensor:
    square = x * x
    s = torch.tanh(0.8 * (x + 0.04 * (square * x)))
    return dy * (0.5 * (1 + s) + 0.5 * x * (1 - s * s) * (0.8 * (1 + 0.12 * square)))


def lstm_cell(xg: Tensor, hg: Tensor, c: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    i, f, g, o = (xg + hg + b1 + b2).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh()


def gru_cell(xg: Tensor, hg: Tensor, h: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    (xr, xz, xn), (hr, hz, hn) = (xg + b1).chunk(3, 1), (hg + b2).chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    return (1 - z) * (xn + r * hn).tanh() + z * h


def lstm_cell_backward(dh: Tensor, dc: Tensor, c: Tensor, i: Tensor, f: Tensor, g: Tensor, o: Tensor) -> None:
    tanh = c.tanh()
    do = dh * tanh
    dc = dc + dh * o * (1 - tanh * tanh)
    di, df, dg, _ = dc * g, dc * c, dc * i, dc * f
    for d, gate in ((di, i), (df, f), (do, o)):
        d * ((1 - gate) * gate)
    dg * (1 - g * g)


def gru_cell_backward(dh: Tensor, h: Tensor, r: Tensor, z: Tensor, n: Tensor, hn: Tensor) -> None:
    dn, dz, _ = dh * (1 - z), dh * (h - n), dh * z
    dn = dn * (1 - n * n)
    dr, _ = dn * hn, dn * r
    for d, gate in ((dr, r), (dz, z)):
        d * ((1 - gate) * gate)


def log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - x.abs().neg().exp().log1p()


X, Y = t(3, 5), t(3, 5)
N, C, W, B = t(2, 3, 5), t(3), t(1, 3, 1), t(1, 3, 1)
BY_DEFINITION: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "sigmoid": (lambda: aten.sigmoid(X), lambda: X.neg().exp().add(1).reciprocal()),
    "silu": (lambda: aten.silu(X), lambda: X / (X.neg().exp() + 1)),
    "gelu": (lambda: aten.gelu(X), lambda: 0.5 * X * (1 + torch.erf(X * 0.7))),
    "gelu tanh": (lambda: aten.gelu(X, approximate="tanh"), lambda: 0.5 * X * (1 + torch.tanh(0.8 * (X + 0.04 * (X * X * X))))),
    "mish": (lambda: aten.mish(X), lambda: X * X.exp().log1p().tanh()),
    "softplus": (lambda: aten.softplus(X), lambda: (X * 2).exp().log1p() / 2),
    "hardswish": (lambda: aten.hardswish(X), lambda: X * (X + 3).clamp(0, 6) / 6),
    "hardsigmoid": (lambda: aten.hardsigmoid(X), lambda: (X + 3).clamp(0, 6) / 6),
    "hardtanh": (lambda: aten.hardtanh(X), lambda: X.clamp(-1, 1)),
    "elu": (lambda: aten.elu(X), lambda: (X * 1.5).expm1() * 1.5),
    "log_sigmoid": (lambda: aten.log_sigmoid_forward(X), lambda: log_sigmoid(X)),
    "glu": (lambda: aten.glu(t(3, 10), 1), lambda: X * Y.sigmoid()),
    "lerp": (lambda: aten.lerp(X, Y, 0.5), lambda: X + 0.5 * (Y - X)),
    "logaddexp": (lambda: aten.logaddexp(X, Y), lambda: (X.exp() + Y.exp()).log()),
    "logit": (lambda: aten.logit(X), lambda: (X / (1 - X)).log()),
    "polar": (lambda: aten.polar(X, Y), lambda: (X * Y.cos(), X * Y.sin())),
    "complex product": (
        lambda: t(3, 5, dtype=torch.complex64) * t(3, 5, dtype=torch.complex64),
        lambda: (X * Y - X * Y, X * Y + X * Y),
    ),
    "sigmoid'": (lambda: aten.sigmoid_backward(X, Y), lambda: X * (1 - Y) * Y),
    "tanh'": (lambda: aten.tanh_backward(X, Y), lambda: X * (1 - Y * Y)),
    "silu'": (lambda: aten.silu_backward(X, Y), lambda: X * Y.sigmoid() * (1 + Y * (1 - Y))),
    "gelu'": (lambda: aten.gelu_backward(X, Y), lambda: X * (0.5 * (1 + torch.erf(Y * 0.7)) + Y * (0.4 * (Y * Y * -0.5).exp()))),
    "gelu tanh'": (lambda: aten.gelu_backward(X, Y, approximate="tanh"), lambda: gelu_tanh_backward(X, Y)),
    "mish'": (lambda: aten.mish_backward(X, Y), lambda: X * (Y.exp().log1p().tanh() + Y * Y.sigmoid() * (1 - Y * Y))),
    "softplus'": (lambda: aten.softplus_backward(X, Y, 1, 20), lambda: X * (Y * 2).exp() / (Y + 1)),
    "log_sigmoid'": (lambda: aten.log_sigmoid_backward(X, Y, Y), lambda: X * (Y - Y * Y.abs().neg().exp() / (1 + Y))),
    "elu'": (lambda: aten.elu_backward(X, 1, 1, 1, False, Y), lambda: X * 1.5 * (Y * 1.5).exp()),
    "elu' of result": (lambda: aten.elu_backward(X, 1, 1, 1, True, Y), lambda: X * 1.5 * (Y + 1.5)),
    "glu'": (lambda: aten.glu_backward(X, t(3, 10), 1), lambda: (X * Y.sigmoid(), (1 - Y) * Y * X * Y)),
    "logit'": (lambda: aten.logit_backward(X, Y), lambda: X / (Y * (1 - Y))),
    "softmax": (lambda: aten._softmax(X, 1, False), lambda: (lambda e: e / e.sum(1, True))((X - X.amax(1, True)).exp())),
    "log_softmax": (lambda: aten._log_softmax(X, 1, False), lambda: X - X.amax(1, True) - t(3, 1).log() + 0 * (X - Y).exp().sum() * 0 if False else _lsm()),
    "softmax'": (lambda: aten._softmax_backward_data(X, Y, 1, torch.float32), lambda: (X - (X * Y).sum(1, True)) * Y),
    "log_softmax'": (lambda: aten._log_softmax_backward_data(X, Y, 1, torch.float32), lambda: X - Y.exp() * X.sum(1, True)),
}
