"""Apex's softmax of scaled and masked scores, as Megatron-LM's layers of its own call it.

Read in csrc/megatron/scaled_masked_softmax*.cu of apex 25.09.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.simulation.kernels.packages import Package

PACKAGE = Package(module="scaled_masked_softmax_cuda", release="apex 25.09")


@PACKAGE.kernel("scaled_masked_softmax_cuda.cu", "forward")
def _forward(scores: Tensor, mask: Tensor, scale: Any) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


@PACKAGE.kernel("scaled_masked_softmax_cuda.cu", "backward")
def _backward(gradient: Tensor, kept: Tensor, scale: Any) -> Tensor:
    """Not in place: the gradient of the scores is a tensor of its own."""
    return torch.empty_like(gradient.contiguous())


@PACKAGE.kernel("scaled_masked_softmax.h")
def get_batch_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """Rows of scores to a block of 128 threads."""
    return 4 if keys > 128 else 8
