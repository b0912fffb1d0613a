"""The ways of plain tensors in functions whose C++ goes another one for subclasses.

FakeTensors are of a subclass. `max_pool1d` (aten/src/ATen/native/MaxPooling.cpp) has a kernel of its own on the CPU;
`istft` (SpectralOps.cpp) asks whether its windows leave a gap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from fxmem._torch import common as torch_common
from fxmem._torch import kernels as torch_kernels
from fxmem.simulation.kernels.fake_kernels import answer_checks

_OTHERWISE: Final[Callable[..., Any]] = F.max_pool1d


def _max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    wants_gradient = input.requires_grad and torch.is_grad_enabled()
    is_plain = type(input) is torch_common.FakeTensor and input.device.type == "cpu"
    if return_indices or wants_gradient or not is_plain:
        return _OTHERWISE(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    sizes = map(_list, (kernel_size, stride, padding, dilation))
    with torch_kernels.below_autograd():
        return torch.ops.aten.max_pool1d.default(input, *sizes, ceil_mode)


def _list(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else [*value]


def _istft(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with answer_checks(False):
            return function(*args, **kwargs)

    return functools.update_wrapper(call, function)


_REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys((torch.max_pool1d, F.max_pool1d), _max_pool1d),
    **{function: _istft(function) for function in (torch.istft, torch.Tensor.istft, torch_kernels.ISTFT)},
}


def replacement(function: Any) -> Callable[..., Any] | None:
    """What to run instead of a torch function; None to run it as it is."""
    try:
        return _REPLACEMENTS.get(function)
    except TypeError:  # not hashable
        return None
