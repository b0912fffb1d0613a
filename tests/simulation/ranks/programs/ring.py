"""Torch's own ring of keys and values, with the CPU's kernel, for which `context_parallel` has no rules."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental._attention import _templated_ring_attention, set_rotate_method

__all__ = ["Attention", "set_rotate_method"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_HEADS = 4


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        world: Any = dist.group.WORLD
        out, lse, *_ = _templated_ring_attention(world, 2, _FORWARD, query, key, value, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        home: Any = sys.modules[_templated_ring_attention.__module__]
        found = home._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            _BACKWARD,
            gradients[0],
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
            dropout_p=0.0,
        )
        return tuple(found[:3])


class Attention(nn.Module):
    """Attention of tokens that are split over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next layer's input."""
        parts = self.parts(x).view(*x.shape[:2], 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        found: torch.Tensor = _Ring.apply(*parts)
        return x + self.out(found.transpose(1, 2).flatten(2))
