"""`flex_attention` as the kernels that inductor makes of it: where the program compiles what calls it.

Eager code computes it with whole matrices of scores (`sdpa_dense` of torch/_higher_order_ops/flex_attention.py). A
program that is analysed without its compiler still has the kernels' memory here, since few could run it otherwise.
Read in torch/_inductor/kernel/flex/flex_attention.py of 2.11. Not counted: the parts of the keys that it takes apart
for less than 128 queries (flex_decoding.py), whose number hangs on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Without gaps, the dimensions in the order in which `like` has them, the last one innermost."""
    strides, size = [0] * len(shape), 1
    for dim in (len(shape) - 1, *sorted(range(len(shape) - 1), key=like.stride)):
        strides[dim], size = size, size * shape[dim]
    return like.new_empty_strided(shape, strides)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, scale: float, options: Mapping[str, Any], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, log-sum-exps, the largest scores if they are asked for."""
    rows = query.shape[:-1]
    sums = query.new_empty(rows, dtype=torch.float32)
    largest = query.new_empty(rows if options.get("OUTPUT_MAX") else 0, dtype=torch.float32)
    return _empty(query, (*rows, value.shape[-1])), sums, largest


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, gradient: Tensor | None, *further: Any
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Gradients: of keys and values that all items of the batch share, for each item first."""
    product_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    each = [_empty(like, (query.shape[0], *like.shape[1:])) for like in (query, key, value)]
    of_keys = [
        made.sum(0, keepdim=True) if made.shape != like.shape else made
        for made, like in zip(each[1:], (key, value), strict=True)
    ]
    buffers = further[-2]
    captured = (torch.zeros_like(it) if isinstance(it, Tensor) and it.requires_grad else None for it in buffers)
    del product_sums
    return each[0], of_keys[0], of_keys[1], tuple(captured)


FUSED: Final[Mapping[str, Callable[..., Any]]] = {"flex_attention": _forward, "flex_attention_backward": _backward}
"""By the name of the operator; called with its arguments, and makes its results as the kernel allocates them."""
