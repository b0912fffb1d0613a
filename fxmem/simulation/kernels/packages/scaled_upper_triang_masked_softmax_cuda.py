"""Apex's softmax of scaled and causally masked scores, as Megatron-LM's layers of its own call it.

Read in csrc/megatron/scaled_upper_triang_masked_softmax*.cu of apex 25.09.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.simulation.kernels.packages import Package

PACKAGE = Package(module="scaled_upper_triang_masked_softmax_cuda", release="apex 25.09")


@PACKAGE.kernel("scaled_upper_triang_masked_softmax_cuda.cu", "forward")
def _forward(scores: Tensor, scale: Any) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@PACKAGE.kernel("scaled_upper_triang_masked_softmax_cuda.cu", "backward")
def _backward(gradient: Tensor, kept: Tensor, scale: Any) -> Tensor:
    """In place: written over the gradient of the result."""
    return gradient.contiguous()
