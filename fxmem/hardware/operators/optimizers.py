"""Optimizers' fused steps: the arithmetic of their foreach forms. And the scaler of gradients."""

from __future__ import annotations

from fxmem.hardware.operators.registry import NamedCall, Operator


def _adam(c: NamedCall, decay: int) -> int:
    """Per element, Adam's 13 operations, and 1 more for AMSGrad. m = lerp(m, g, 1 - b1) (3), v = b2 v + (1 - b2) g g
    (4), p - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps) (6), for AMSGrad max(v, v^) (1)."""
    return _fused(c, 13 + c.amsgrad, decay)


def _sgd(c: NamedCall) -> int:
    """p - lr g (2); with momentum b = mu b + (1 - damping) g (2, damped 3; the first step copies g), for Nesterov g +
    mu b (2)."""
    buffer = (0 if c.is_first_step else 2 + (c.dampening != 0)) + 2 * c.nesterov
    return _fused(c, 2 + buffer * (c.momentum != 0), decay=2)


def _fused(c: NamedCall, flops: int, decay: int) -> int:
    """Per element, `flops`, weight decay, `maximize` (-g) and the gradient scaler's division. Decay is g + wd p (2) or
    p (1 - lr wd) (1)."""
    made: int = c.made
    each: int = flops + decay * (c.weight_decay != 0) + c.maximize + (c.grad_scale is not None)
    return made * each


ROWS = {
    "FusedAdam.cpp, FusedSGD.cpp, FusedAdagrad.cpp, cuda/FusedAdamKernel.cu, cuda/FusedSgdKernel.cu": {
        "_fused_adam": Operator(lambda c: _adam(c, decay=2)),
        "_fused_adamw": Operator(lambda c: _adam(c, decay=1)),
        "_fused_sgd": Operator(_sgd),
        "_fused_adagrad": Operator(lambda c: _fused(c, 7, decay=2)),  # s + g g, p - (lr g) / (sqrt(s) + eps)
    },
    "cuda/AmpKernels.cu, cpu/AmpGradScalerKernels.cpp": {
        "_amp_foreach_non_finite_check_and_unscale": Operator((1, 0)),
        "_amp_update_scale": Operator(1),
    },
}
