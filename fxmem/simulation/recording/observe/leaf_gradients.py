"""How a gradient arrives in a leaf's `.grad`, as `AccumulateGrad` does it.

`AccumulateGrad` takes the gradient itself when `.grad` is None, the gradient has no other owner and its strides obey
the leaf's layout; it copies the gradient otherwise, and adds in place to an existing `.grad`
(torch/csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

from typing import Any

import torch

from fxmem._torch.autograd import is_sole_owner
from fxmem._torch.common import contiguous_strides


def accumulate_gradient(leaf: torch.Tensor, received: list[Any], *, create_graph: bool) -> None:
    """Put the only gradient of `received` into `leaf.grad`; the list is to be its only owner in Python."""
    is_sparse = received[0].is_sparse
    if leaf.grad is not None:
        if create_graph:
            leaf.grad = leaf.grad + received[0]
        elif leaf.grad.is_sparse and not is_sparse:
            leaf.grad = received[0] + leaf.grad
        else:
            leaf.grad.add_(received[0])
    elif (
        not create_graph
        and (is_sparse or _obeys_layout(received[0], leaf))
        and is_sole_owner(received, 0, storage=False)
    ):
        leaf.grad = received[0].detach()
    elif is_sparse:
        leaf.grad = received[0].clone()
    else:
        strides = leaf.stride() if is_dense(leaf) else contiguous_strides(leaf.shape)
        made = torch.empty_strided(leaf.shape, strides, dtype=received[0].dtype, device=received[0].device)
        leaf.grad = made.copy_(received[0])


def is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: its elements fill one stretch of memory, in some order of the dimensions."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _obeys_layout(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """The gradient layout contract (torch/csrc/autograd/utils/grad_layout_contract.h)."""
    if not is_dense(leaf):
        return gradient.is_contiguous()
    return all(n == 1 or a == b for n, a, b in zip(leaf.shape, gradient.stride(), leaf.stride(), strict=True))
