"""Mamba's selective scan, as mamba-ssm has it.

Read in csrc/selective_scan/selective_scan.cpp of mamba-ssm 2.3.2. Letters: B sequences, D channels, L tokens, N states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.simulation.kernels.packages import Call, Package

PACKAGE = Package(
    module="selective_scan_cuda",
    release="mamba-ssm 2.3.2",
    python="mamba_ssm",
    install="MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-build-isolation mamba-ssm",
)
kernel = PACKAGE.kernel
_SOURCE = "selective_scan.cpp"
_CHUNK = 2048
"""Tokens after which a state is kept for backward."""


def _flops(u: Tensor, delta: Tensor, A: Tensor, B: Any, C: Any, D: Any, z: Any, *_: Any) -> int:
    """Nine for each state of each token, as its authors count (state-spaces/mamba #110), and one each for D and z."""
    return u.numel() * (9 * A.shape[1] + (D is not None) + (z is not None))


@kernel(_SOURCE, flops=_flops)
def fwd(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, z: Tensor | None, *_: Any) -> Any:
    """The result before `z`, the states `(B, D, chunks of L, 2 N)` in A's dtype, the result."""
    gated = [] if z is None else [torch.empty_like(z)]
    out = torch.empty_like(delta)
    return [out, A.new_empty((*u.shape[:2], -(-u.shape[2] // _CHUNK), 2 * A.shape[1])), *gated]


@kernel(_SOURCE, takes="u delta A B C D z delta_bias dout x out dz delta_softplus recompute_out_z")
def bwd(call: Call) -> Any:
    """Gradients, those of B and C summed in float32 where they change with the tokens."""
    z, dz, out, weights = call.z, call.dz, call.out, (call.B, call.C)
    gated = [] if z is None else [torch.empty_like(z) if dz is None else dz]
    again = [torch.empty_like(out)] if call.recompute_out_z and out is not None else []
    made = [torch.empty_like(call.u), torch.empty_like(call.delta), torch.zeros_like(call.A)]
    summed = [torch.zeros_like(each, dtype=torch.float32 if each.dim() >= 3 else each.dtype) for each in weights]
    of_weights = [None if each is None else torch.zeros_like(each) for each in (call.D, call.delta_bias)]
    turned = [each.to(like.dtype) for each, like in zip(summed, weights, strict=True)]
    return [*made, *turned, *of_weights, *gated, *again]
