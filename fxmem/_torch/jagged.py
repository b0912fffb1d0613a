"""Private names of torch for jagged tensors, with why and since when.

The length of a jagged dimension is a *nested int*, one for each tensor of offsets (`torch.nested._internal`, 2.1).
FakeTensorMode makes them of symbols, and without a `ShapeEnv` it has none. Here a fake has a nested int as a real
tensor has, in the same registry, so that they stay equal where a tensor goes to the card and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nested._internal import nested_tensor, sdpa

from fxmem._torch.common import FakeTensor, no_modes, wrap

ATTENTION: Final = sdpa
"""Where attention of jagged tensors chooses its kernel (since 2.2)."""


@contextlib.contextmanager
def fakes_have_nested_ints() -> Iterator[None]:
    """Let jagged tensors be made of FakeTensors, and moved (`FakeTensor.get_nested_int` and `nested_int_memo`, 2.4)."""
    registry: Any = nested_tensor._tensor_symint_registry

    def get_nested_int(original: Callable[..., Any], offsets: Any, *, coeff: Any = 1) -> Any:
        if offsets.fake_mode.shape_env is None:
            if offsets.nested_int_memo is None:
                offsets.nested_int_memo = registry.get(offsets) or _make_nested_int()
            registry[offsets] = offsets.nested_int_memo
        return original(offsets, coeff=coeff)

    host: Any = torch.Tensor
    host.nested_int_memo = property(registry.get)  # read where a tensor of the host moves
    try:
        with wrap(FakeTensor, "get_nested_int", get_nested_int):
            yield
    finally:
        del host.nested_int_memo


def known_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a jagged one that of all its rows, one after another."""
    values: Any = tensor
    return tuple((values._values if isinstance(tensor, nested_tensor.NestedTensor) else tensor).shape)


def pad(tensor: torch.Tensor) -> torch.Tensor:
    """A jagged tensor on meta with each sequence as long as the longest (`NestedTensor._max_seqlen`); another as is."""
    if not isinstance(tensor, nested_tensor.NestedTensor):
        return tensor
    jagged: Any = tensor
    longest = jagged._get_max_seqlen()
    shape = [longest if isinstance(size, torch.SymInt) else size for size in tensor.shape]
    with no_modes():
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def _make_nested_int() -> Any:
    made = torch._C._get_nested_int(nested_tensor._tensor_id_counter, 1)
    nested_tensor._tensor_id_counter += 1
    return made
