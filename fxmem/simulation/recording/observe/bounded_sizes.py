"""Sizes that depend on data, at the largest they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common


class BoundedSizes:
    """Sizes that depend on data, and what follows from them.

    Args:
        is_bounded: whether a tensor's storage has such a size.
    """

    def __init__(self, is_bounded: Callable[[torch.Tensor], bool]) -> None:
        self._is_bounded = is_bounded
        self.sizes: set[int] = set()
        self.is_making = False
        """Whether the operator that runs makes such sizes, or follows from them."""

    def note(self, result: Any) -> None:
        """Note that what is made now has such shapes."""
        self.is_making = True
        self.sizes.update(size for tensor in torch_common.iterate_tensors(result) for size in tensor.shape if size > 1)

    def begin_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run: it may read a tensor of such a size, or be told to make one."""
        self.is_making = bool(self.sizes) and (
            any(map(self._is_bounded, torch_common.iterate_tensors((args, kwargs))))
            or any(
                size in self.sizes
                for each in (*args, *kwargs.values())
                for size in (each if type(each) in (list, tuple) else (each,))
                if type(size) is int
            )
        )
