"""Element by element: arithmetic, functions, activations, comparisons and dropout.

Kernels compute in one dtype only: a card's convert number by number, the CPU's copy an operand of another dtype first.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.hardware.hidden_memory import Events, alloc, free, output
from fxmem.hardware.operators.registry import Call, Operator, count_factors, dense_gradient
from fxmem.hardware.tensor_layouts import HALF, ITEM_BYTES


def _promote(call: Call) -> Events | None:
    """Operands of another dtype than the common one are copied on the CPU.

    `TensorIteratorBase::compute_types` (aten/src/ATen/TensorIterator.cpp): before the result is allocated, and until
    the call returns. Single numbers are left out.
    """
    operands = [layout for layout in call.layouts() if layout.rank]
    if len({layout.dtype for layout in operands}) < 2:
        return None
    common = _common_dtype([layout.dtype for layout in operands])
    copies = (layout.numel * ITEM_BYTES[common] for layout in operands if layout.dtype != common)
    return *(alloc(f"operand in {common} ({number})", size) for number, size in enumerate(copies, 1)), output("result")


def _common_dtype(dtypes: Sequence[str]) -> str:
    """`torch.promote_types` of them all."""

    def rank(dtype: str) -> tuple[int, int]:
        kind = 3 if "complex" in dtype else 2 if "float" in dtype else 0 if dtype == "bool" else 1
        return kind, ITEM_BYTES[dtype]

    highest = max(dtypes, key=rank)
    return "float32" if set(HALF) <= set(dtypes) and ITEM_BYTES[highest] == 2 else highest


def _complex_to_real(call: Call) -> Events | None:
    """`unary_op_impl_with_complex_to_float` (UnaryOps.cpp): the result as complex numbers first."""
    source = call.layout()
    return (output("result"), alloc("complex result", source.nbytes)) if source.dtype.startswith("complex") else None


def _dropout_backward_on_cpu(call: Call) -> Events:
    """`native_dropout_backward` (Dropout.cpp): the mask in the gradient's dtype, the product unscaled."""
    nbytes = call.made.nbytes
    return alloc("mask", nbytes), alloc("product", nbytes), *free("mask"), output("gradient")


ROWS = {
    "UnaryOps.cpp": {
        "abs angle": Operator(1, scratch=_complex_to_real),
        """sign reciprocal clamp_min clamp_max floor ceil round trunc sqrt rsqrt exp exp2 expm1 log log2 log10
        log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma polygamma
        sinc""": Operator(1),
        "neg": Operator(1, complex=2),
        "sgn": Operator(1, complex=3),
        "frac": Operator(2),  # x - trunc(x)
        "logit": Operator(3),  # log(x / (1 - x))
        "logit_backward": Operator(3),  # dy / (x (1 - x))
        "sigmoid": Operator(4),  # 1 / (1 + exp(-x))
        "clamp": Operator(lambda c: c.made * ((c.min is not None) + (c.max is not None))),
        "nan_to_num isnan isinf signbit logical_not bitwise_not": Operator(0),
    },
    "BinaryOps.cpp, PointwiseOps.cpp, Lerp.cpp, Pow.cpp": {
        "add sub rsub": Operator(lambda c: c.made * (1 + count_factors(c)), complex=2, cpu=_promote),
        "mul": Operator(1, complex=6, cpu=_promote),
        "div": Operator(lambda c: c.made * (1 + (getattr(c, "rounding_mode", None) is not None)), cpu=_promote),
        "maximum minimum fmax fmin fmod remainder hypot atan2 pow copysign": Operator(1, cpu=_promote),
        "floor_divide": Operator(2, cpu=_promote),  # floor(x / y)
        "xlogy": Operator(2, cpu=_promote),  # x log(y)
        "lerp": Operator(3, cpu=_promote),  # x + w (y - x)
        "logaddexp": Operator(4, cpu=_promote),  # log(exp(x) + exp(y))
        "logaddexp2": Operator(4, cpu=_promote),  # log2(exp2(x) + exp2(y))
        "nextafter": Operator(cpu=_promote),
        "addcmul addcdiv": Operator(lambda c: c.made * (2 + count_factors(c)), cpu=_promote),
        "addr": Operator(lambda c: c.made * (2 + count_factors(c))),
        "polar": Operator(4, complex=1),  # r cos(a), r sin(a)
        "eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor": Operator(0, cpu=_promote),
        """equal logical_and logical_or logical_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__
        __lshift__ __rshift__ _assert_async""": Operator(0),
    },
    "Activation.cpp, cuda/Activation*.cu": {
        """relu threshold threshold_backward leaky_relu leaky_relu_backward _prelu_kernel rrelu_with_noise
        rrelu_with_noise_backward hardshrink hardshrink_backward softshrink softshrink_backward hardtanh_backward
        hardsigmoid_backward""": Operator(1),
        "_prelu_kernel_backward": Operator(2),  # dy w, dy x
        "celu elu": Operator(3),  # a expm1(x b)
        "elu_backward": Operator(lambda c: c.made * (3 if c.is_result else 4)),  # dy b (y + a), dy a exp(b x)
        # x / 2 (1 + tanh(b (x + k x x x))), x / 2 (1 + erf(x / sqrt(2)))
        "gelu": Operator(lambda c: c.made * (9 if c.approximate == "tanh" else 5)),
        # dy (cdf + x pdf), cdf = (1 + erf(x / sqrt(2))) / 2 (4), pdf = c exp(-x x / 2) (4). With tanh: t = tanh(b (x +
        # k x x x)) (6), i = b (1 + 3 k x x) (3: x x is there), dy ((1 + t) / 2 + x / 2 (1 - t t) i) (9).
        "gelu_backward": Operator(lambda c: c.made * (18 if c.approximate == "tanh" else 11), cpu=dense_gradient),
        "glu": Operator(5),  # a sigmoid(b)
        "glu_backward": Operator(lambda c: 9 * c.read),  # s = sigmoid(b), da = dy s, db = (1 - s) s dy a
        "hardsigmoid": Operator(4),  # min(max(x + 3, 0), 6) / 6
        "hardswish": Operator(5),  # x min(max(x + 3, 0), 6) / 6
        "hardswish_backward": Operator(3),  # dy (x / 3 + 1 / 2)
        "hardtanh": Operator(2),  # min(max(x, low), high)
        "log_sigmoid_forward": Operator(6),  # min(0, x) - log1p(exp(-|x|))
        "log_sigmoid_backward": Operator(8),  # dy (d - s z / (1 + z)), z = exp(-|x|)
        "mish": Operator(4),  # x tanh(log1p(exp(x)))
        "mish_backward": Operator(13),  # dy (t + x s (1 - t t)), s = sigmoid(x), t = tanh(log1p(exp(x)))
        "sigmoid_backward": Operator(3),  # dy (1 - y) y
        "silu": Operator(4),  # x / (1 + exp(-x))
        "silu_backward": Operator(9),  # dy s (1 + x (1 - s)), s = sigmoid(x)
        "softplus": Operator(4),  # log1p(exp(x b)) / b
        "softplus_backward": Operator(5),  # dy z / (z + 1), z = exp(x b)
        "tanh_backward": Operator(3),  # dy (1 - y y)
    },
    "Dropout.cpp, cuda/Dropout.cu": {
        # x mask / (1 - p); the mask is allocated first
        "native_dropout": Operator(lambda c: 0 if c.train is False else 2 * c.made, order=(1, 0)),
        "native_dropout_backward": Operator(2, cpu=_dropout_backward_on_cpu),  # dy mask / (1 - p)
    },
}
