"""Apex's products that add to a weight's gradient, as Megatron-LM calls them (`--gradient-accumulation-fusion`).

Read in csrc/megatron/fused_weight_gradient_dense_cuda.cu of apex 25.09: cuBLAS by torch's own handle, nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxmem.simulation.kernels.packages import Package

PACKAGE = Package(module="fused_weight_gradient_mlp_cuda", release="apex 25.09")


def _flops(x: Tensor, gradient: Tensor, *_: Any) -> int:
    return 2 * x.numel() * gradient.shape[-1]


@PACKAGE.kernel("fused_weight_gradient_dense.cpp", "wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16", _flops)
def _accumulate(x: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """The product is added to what is there."""
