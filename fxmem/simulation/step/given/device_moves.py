"""Code that moves tensors to a card, run where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxmem._torch.common import nested, replace


def ignore_moves() -> AbstractContextManager[None]:
    """Leave tensors where they are made: `.cuda()`, `.to("cuda")` and `device="cuda"` do nothing.

    A training script has such a line nearly always; the analysis puts the model and its inputs on the target itself.
    """
    return nested(replace(torch.cuda, "set_device", lambda device: None), _StayHome())


class _StayHome(TorchFunctionMode):
    """Takes a card out of the arguments of torch's functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if is_card(kwargs.get("device")):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            if func is torch.Tensor.to and len(args) == 1 and not kwargs:
                return args[0]
        if func is torch.Tensor.to and len(args) > 1 and is_card(args[1]):
            args = (args[0], args[0].device, *args[2:])
        return func(*args, **kwargs)


def is_card(device: object) -> bool:
    """Whether an argument of torch's functions names a CUDA device."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"
