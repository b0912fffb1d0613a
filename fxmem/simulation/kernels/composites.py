"""Operators that run as others: their kernels call these, and allocate nothing else.

The recorder sees the inner operators one by one, as those of what the dispatcher itself takes apart. Where a kernel
hangs on values, these have to be known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common

aten = torch.ops.aten
Kernel = Callable[..., Any]
Answer = Callable[[Any, tuple[Any, ...]], Any]
"""What an operator that hangs on values is answered, with these arguments."""

COMPOSITES: Final[dict[Any, Kernel]] = {}
"""By operator: `kernel(answer, operator, *args, **kwargs)`, which leaves a call to others by NotImplemented."""
IN_PYTHON: Final[set[str]] = {"xformers_flash"}
"""Namespaces of operators whose kernels on a card are in Python: a package defines them so, and calls others."""


def find_kernel(func: Any) -> Kernel | None:
    """The kernel of an operator that runs as others."""
    if (kernel := COMPOSITES.get(func)) is not None or getattr(func, "namespace", "") not in IN_PYTHON:
        return kernel
    run = torch_common.python_kernel(func)
    return None if run is None else functools.partial(_run_on_card, run)


def _run_on_card(run: Kernel, _: Answer, __: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = torch_common.iterate_tensors((args, kwargs))
    return run(*args, **kwargs) if any(each.is_cuda for each in tensors) else NotImplemented


def composes(names: str) -> Callable[[Kernel], Kernel]:
    """Register a kernel for these operators of ATen, each with its overload, where that is not the default one."""

    def register(kernel: Kernel) -> Kernel:
        for name in names.split():
            packet, _, overload = name.partition(".")
            COMPOSITES[getattr(getattr(aten, packet), overload or "default")] = kernel
        return kernel

    return register


@composes("_pack_padded_sequence")
def _pack(_: Answer, func: Any, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """`_pack_padded_sequence` (PackedSequence.cpp) reads the lengths, and copies what is there of each step."""
    kernel = torch_common.explicit_kernel(func, "cpu")
    if kernel is None or isinstance(lengths, torch_common.FakeTensor):
        return NotImplemented
    return kernel(padded, lengths, batch_first)


@composes("_new_zeros_with_same_feature_meta")
def _zeros_like_tangent(
    _: Answer, func: Any, tangent: torch.Tensor, primal: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """`_new_zeros_with_same_feature_meta` (AutogradComposite.cpp): a storage like that of what it is the tangent of,
    for each of the batch. FakeTensorMode's cache forgets where in it the tensor begins (as of 2.11)."""
    batch, each = tangent.shape[:self_num_batch_dims], primal.untyped_storage().nbytes() // primal.element_size()
    strides = [each * math.prod(batch[place + 1 :]) for place in range(len(batch))]
    made = tangent.new_zeros(math.prod(batch) * each)
    return made.as_strided((*batch, *primal.shape), (*strides, *primal.stride()), primal.storage_offset())


@composes("_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine")
def _quantize_learnable(
    _: Answer, func: Any, source: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """`_fake_quantize_learnable_per_tensor_affine` (quantized/FakeQuantPerTensorAffine.cpp): the values, and a mask
    that is dropped; of channels, their zero points as whole numbers."""
    rounded = _round_zeros(func, zero)
    made, mask = torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)
    del mask, rounded
    return made


@composes("_fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_learnable_per_channel_affine_backward")
def _quantize_learnable_backward(
    _: Answer,
    func: Any,
    gradient: torch.Tensor,
    source: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of scale and zero point are computed for each value, then summed, along a channel where there are
    several (in the same files, and FakeQuantPerChannelAffine.cpp)."""
    rounded = _round_zeros(func, zero)
    made, of_scale, of_zero = (torch.empty_like(source) for _ in range(3))
    if rounded is None:
        return made, of_scale.sum().unsqueeze(0), of_zero.sum().unsqueeze(0)
    others = [each for each in range(source.dim()) if each != rest[0]]
    return made, of_scale.sum(others), of_zero.sum(others)


def _round_zeros(func: Any, zero: torch.Tensor) -> torch.Tensor | None:
    return torch.empty_like(zero, dtype=torch.int32) if "channel" in func.name() else None
