"""Apex's layer norm and RMS norm (`apex.normalization`).

Read in csrc/layer_norm_cuda.cpp and layer_norm_cuda_kernel.cu of apex 25.09.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxmem.simulation.kernels.packages import APEX, Package

PACKAGE = Package(module="fused_layer_norm_cuda", release="apex 25.09", python="apex", install=APEX)
kernel = PACKAGE.kernel
_SOURCE = "layer_norm_cuda.cpp"
_PARTS = 16
"""Rows of partial sums for each gradient of weights (`part_size`)."""


def _float(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _forward(x: Tensor, shape: Any, dtype: torch.dtype, statistics: int) -> list[Tensor]:
    """The result, and mean and inverse deviation of each row, or that alone."""
    rows = x.numel() // math.prod(shape)
    return [torch.empty_like(x, dtype=dtype), *(x.new_empty(rows, dtype=_float(x)) for _ in range(statistics))]


@kernel(_SOURCE, "forward forward_affine")
def _layer_norm(x: Tensor, shape: Any, *_: Any) -> Any:
    return _forward(x, shape, x.dtype, 2)


@kernel(_SOURCE, "forward_affine_mixed_dtypes")
def _mixed_layer_norm(x: Tensor, shape: Any, weight: Tensor, *_: Any) -> Any:
    return _forward(x, shape, weight.dtype, 2)


@kernel(_SOURCE, "rms_forward rms_forward_affine")
def _rms_norm(x: Tensor, shape: Any, *_: Any) -> Any:
    return _forward(x, shape, x.dtype, 1)


@kernel(_SOURCE, "rms_forward_affine_mixed_dtypes")
def _mixed_rms_norm(x: Tensor, shape: Any, weight: Tensor, *_: Any) -> Any:
    return _forward(x, shape, weight.dtype, 1)


def _backward(x: Tensor, *weights: Tensor, parts: int) -> list[Tensor]:
    made = [torch.empty_like(x), *(torch.empty_like(each) for each in weights)]
    scratch = [x.new_empty((_PARTS, weights[0].numel()), dtype=_float(x)) for _ in range(parts)]
    del scratch
    return made


@kernel(_SOURCE, "backward")
def _layer_norm_backward(gradient: Tensor, mean: Any, deviation: Any, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@kernel(_SOURCE, "rms_backward")
def _rms_norm_backward(gradient: Tensor, deviation: Any, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@kernel(_SOURCE, "backward_affine")
def _weighted_layer_norm_backward(
    gradient: Tensor, mean: Any, deviation: Any, x: Tensor, shape: Any, weight: Tensor, bias: Tensor, *_: Any
) -> Any:
    return _backward(x, weight, bias, parts=2)


@kernel(_SOURCE, "rms_backward_affine")
def _weighted_rms_norm_backward(
    gradient: Tensor, deviation: Any, x: Tensor, shape: Any, weight: Tensor, *_: Any
) -> Any:
    return _backward(x, weight, parts=1)
