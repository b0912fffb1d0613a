"""Short causal convolutions over channels by themselves, as causal-conv1d has them for Mamba.

Read in csrc/causal_conv1d.cpp of causal-conv1d 1.7.0, whose Python allocates the results.
"""

from __future__ import annotations

from typing import Any

import torch

from fxmem.simulation.kernels.packages import Call, Package

PACKAGE = Package(
    module="causal_conv1d_cuda",
    release="causal-conv1d 1.7.0",
    python="causal_conv1d",
    operators="DaoAILab",
    install="CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE "
    "pip install --no-build-isolation causal-conv1d",
)
kernel = PACKAGE.kernel
_SOURCE = "causal_conv1d.cpp"


@kernel(_SOURCE, flops=lambda x, weight, *_: 2 * x.numel() * weight.shape[-1])
def causal_conv1d_fwd(*_: Any) -> None:
    """The result is written to what is given."""


@kernel(_SOURCE, flops=lambda x, state, weight, *_: 2 * x.numel() * weight.shape[-1])
def causal_conv1d_update(*_: Any) -> None:
    """The result and the state are written to what is given."""


_BACKWARD = "x weight bias dout seq_idx initial_states dfinal_states dx dweight dbias"


@kernel(_SOURCE, flops=lambda call: 4 * call.x.numel() * call.weight.shape[-1], takes=_BACKWARD)
def causal_conv1d_bwd(call: Call) -> None:
    """Gradients are written to what is given; the result's is copied where it lies otherwise than `x`. Deterministic
    algorithms sum those of the weights for each sequence, or each chunk of it, first."""
    x, dout = call.x, call.dout
    batch, channels, tokens = x.shape
    is_last = x.stride(1) == 1 and x.stride(2) > 1
    if not is_last and dout.stride(2) != 1:
        dout = dout.contiguous()
    elif is_last and dout.stride(1) != 1:
        dout = dout.transpose(-1, -2).contiguous()
    if not torch.are_deterministic_algorithms_enabled():
        return
    rows = (batch, -(-tokens // (64 if tokens <= 128 else 128))) if is_last else (batch,)
    for target, sizes in ((call.dweight, call.weight.shape), (call.dbias, (channels,))):
        if target is not None:
            sums = x.new_zeros((*rows, *sizes), dtype=torch.float32)
            target.add_(sums.sum(tuple(range(len(rows)))))
