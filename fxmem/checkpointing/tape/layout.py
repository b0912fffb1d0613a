"""How a tensor lies in its storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor of this geometry in the storage of `base`."""
        if base.dtype != self.dtype:
            base = whole_storage(base).view(self.dtype)
        return base.as_strided(self.size, self.stride, self.offset)


def read_layout(tensor: torch.Tensor) -> StridedLayout:
    """How `tensor` lies in its storage."""
    return StridedLayout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage of `tensor`, in a row."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((count,), (1,), 0)
