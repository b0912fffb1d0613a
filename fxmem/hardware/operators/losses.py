"""Losses. One that is reduced has the losses of all elements first."""

from __future__ import annotations

from itertools import zip_longest
from math import prod

from fxmem.hardware.hidden_memory import Events, alloc, output
from fxmem.hardware.operators.registry import Call, FlopRule, NamedCall, Operator
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout

_MEAN = 1
"""Of `reduction`: 0 for none, 1 for the mean, 2 for the sum."""


def _flops(per_element: int, *factors: str) -> FlopRule:
    """So many per element, one more for each factor, and the mean or sum."""

    def rule(c: NamedCall) -> int:
        n: int = c.self.numel
        weighted = sum(getattr(c, name) is not None for name in factors)
        return (per_element + weighted) * n + (0, n + 1, n)[c.reduction]

    return rule


def _nll(c: NamedCall) -> int:
    """-x[t], times weight; a weighted mean also sums the weights. Targets to be ignored cannot be told from shapes, and
    count."""
    n: int = c.target.numel
    weighted = c.weight is not None
    return (1 + weighted) * n + (0, n + 1, n)[c.reduction] + n * (weighted and c.reduction == _MEAN)


def _elementwise_then_reduced(call: Call) -> Events | None:
    """`mse_loss_out`, `smooth_l1_loss_out`: the loss of each element beside a result that is as large."""
    return (output("loss"), *losses) if (losses := _losses(call)) else None


def _huber(call: Call) -> Events | None:
    """`huber_loss`: the loss of each element, then its mean or sum."""
    return (*losses, output("loss")) if (losses := _losses(call)) else None


def _losses(call: Call) -> Events:
    """The loss of each element of two arguments, if it is reduced."""
    if call.argument(2, _MEAN) == 0:
        return ()
    first, second = call.layout(0), call.layout(1)
    sizes = zip_longest(reversed(first.shape), reversed(second.shape), fillvalue=1)
    item = max(ITEM_BYTES[first.dtype], ITEM_BYTES[second.dtype])
    return (alloc("loss of each element", prod(a if b == 1 else b for a, b in sizes) * item),)


def _ctc_backward(call: Call) -> Events:
    """`ctc_loss_backward_gpu_template` (LossCTC.cu): log_beta, of log_alpha's size, lives beside the gradient."""
    log_alpha: TensorLayout = call.layouts()[-1]
    return alloc("log_beta", log_alpha.nbytes), output("grad")


ROWS = {
    "Loss.cpp, cuda/Loss.cu": {
        "mse_loss": Operator(_flops(2), scratch=_elementwise_then_reduced),  # (x - t)^2
        "mse_loss_backward": Operator(3),  # c (x - t) dy
        # z = |x - t|, then z z / 2 / beta or z - beta / 2
        "smooth_l1_loss": Operator(_flops(5), scratch=_elementwise_then_reduced),
        "smooth_l1_loss_backward": Operator(4),  # c (x - t) dy / beta
        "huber_loss": Operator(_flops(4), scratch=_huber),  # z = |x - t|, then z z / 2 or delta (z - delta / 2)
        "huber_loss_backward": Operator(3),  # c (x - t) dy
        "binary_cross_entropy": Operator(_flops(8, "weight")),  # -(t log(x) + (1 - t) log(1 - x))
        "binary_cross_entropy_backward": Operator(  # dy (x - t) / max((1 - x) x, eps)
            lambda c: c.made * (6 + (c.weight is not None) + (c.reduction == _MEAN))
        ),
        # (1 - t) x - log_sigmoid(x), the second term times 1 + (pos_weight - 1) t.
        "binary_cross_entropy_with_logits": Operator(lambda c: _flops(9 + 4 * (c.pos_weight is not None), "weight")(c)),
        "multi_margin_loss multi_margin_loss_backward": Operator(uncounted="rare in models"),
    },
    "LossNLL.cpp, LossNLL2d.cpp, cuda/Loss.cu, cuda/NLLLoss2d.cu": {
        "nll_loss_forward nll_loss2d_forward": Operator(_nll),
        # -dy at each target, times weight, over the total weight for a mean; the rest is zeros
        "nll_loss_backward nll_loss2d_backward": Operator(
            lambda c: c.target.numel * (1 + (c.weight is not None) + (c.reduction == _MEAN))
        ),
    },
    "LossCTC.cpp, cuda/LossCTC.cu": {
        "_ctc_loss": Operator(uncounted="depends on the lengths of the targets"),
        "_ctc_loss_backward": Operator(
            uncounted="depends on the lengths of the targets", cuda=_ctc_backward, cpu=_ctc_backward
        ),
    },
    "cudnn/LossCTC.cpp": {
        "_cudnn_ctc_loss": Operator(
            uncounted="depends on the lengths of the targets",
            cuda=lambda call: (output("losses"), output("gradient"), alloc("cuDNN CTC workspace", None)),
        ),
    },
}
