"""Shapes, strides and memory formats of tensors, as torch's C++ reasons about them, without torch.

Sources: `c10/core/MemoryFormat.h` (`is_channels_last_strides_2d_s4`, `…_3d_s5`), `c10/core/Contiguity.h`,
`ATen/native/CanUse32BitIndexMath.cpp` and `ATen/cudnn/Descriptors.h` (`fixSizeOneDimStride`), torch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, zip_longest
from math import prod
from operator import mul
from typing import Any, Protocol

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "complex32": 4, "bcomplex32": 4, "int64": 8, "uint64": 8,
    "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element, by torch's name of the dtype."""

HALF = ("float16", "bfloat16")

_INT_MAX = 2**31 - 1


class MemoryFormat(StrEnum):
    """What `Tensor.suggest_memory_format()` answers; `channels_last` stands for the 2-d and the 3-d form, by rank."""

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"


class TensorLike(Protocol):
    """As much of a torch tensor (real, meta or fake) as its layout needs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def dtype(self) -> object:
        """Prints as torch's dtypes do."""

    def stride(self) -> tuple[int, ...]:
        """Elements."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor's geometry: what a kernel choice depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements."""
    dtype: str
    """torch's name without the module, e.g. `float32`."""

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense copy."""
        return self.numel * ITEM_BYTES[self.dtype]

    def is_contiguous(self, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS) -> bool:
        """`Tensor.is_contiguous(memory_format)`."""
        if memory_format is MemoryFormat.CHANNELS_LAST and self.rank not in (4, 5):
            return False
        expected = dense_strides(self.shape, memory_format)
        return self.numel == 0 or all(
            size == 1 or have == want for size, have, want in zip(self.shape, self.stride, expected, strict=True)
        )

    def memory_format(self) -> MemoryFormat:
        """`Tensor.suggest_memory_format()`."""
        return MemoryFormat.CHANNELS_LAST if self._strides_like_channels_last() else MemoryFormat.CONTIGUOUS

    def contiguous(self, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS) -> TensorLayout:
        """`Tensor.contiguous(memory_format)`: itself when it already is, else the layout of the copy torch makes."""
        return self if self.is_contiguous(memory_format) else self.dense(memory_format)

    def dense(self, memory_format: MemoryFormat) -> TensorLayout:
        """The layout of `torch.empty(shape, memory_format=…)`."""
        return replace(self, stride=dense_strides(self.shape, memory_format))

    def unsqueeze(self, dim: int) -> TensorLayout:
        """`Tensor.unsqueeze(dim)` for a dimension that is not the last."""
        stride = self.stride[dim] * self.shape[dim]
        shape, step = (*self.shape[:dim], 1, *self.shape[dim:]), (*self.stride[:dim], stride, *self.stride[dim:])
        return replace(self, shape=shape, stride=step)

    def is_blas_matrix(self) -> bool:
        """Whether BLAS reads the last two dimensions as they lie: one has stride 1, the other is as long as a row."""
        (rows, columns), (down, right) = self.shape[-2:], self.stride[-2:]
        return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))

    def fits_32bit_index(self) -> bool:
        """`at::native::canUse32BitIndexMath`: every element's offset is below 2**31 - 1."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.numel == 0 or (self.numel < _INT_MAX and last < _INT_MAX)

    def _strides_like_channels_last(self) -> bool:
        if self.rank not in (4, 5) or self.stride[1] == 0:
            return False
        smallest = 0
        for dim in (1, *range(self.rank - 1, 1, -1), 0):
            size, stride = self.shape[dim], self.stride[dim]
            # N111 tensors look alike in both formats; torch takes them for contiguous.
            if size == 0 or stride < smallest or (dim == 0 and smallest == self.stride[1]):
                return False
            smallest = stride * max(size, 1)
        return True


def is_tensor(value: Any) -> bool:
    """Whether a value has what a tensor's layout is read from."""
    return hasattr(value, "stride") and hasattr(value, "dtype")


def read_layout(tensor: TensorLike | TensorLayout) -> TensorLayout:
    """The layout of a torch tensor; a layout is returned as it is."""
    if isinstance(tensor, TensorLayout):
        return tensor
    return TensorLayout(
        shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=str(tensor.dtype).removeprefix("torch.")
    )


def dense_strides(shape: tuple[int, ...], memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS) -> tuple[int, ...]:
    """Strides of a freshly allocated tensor."""
    rank = len(shape)
    order = _inner_to_outer(rank, memory_format)
    # An empty dimension counts as 1 in the strides of the dimensions outside it.
    steps = accumulate((max(shape[dim], 1) for dim in order[:-1]), mul, initial=1)
    by_dim = dict(zip(order, steps, strict=True)) if rank else {}
    return tuple(by_dim[dim] for dim in range(rank))


def _inner_to_outer(rank: int, memory_format: MemoryFormat) -> tuple[int, ...]:
    """The dimensions of a dense tensor, the one of the smallest stride first."""
    is_channels_last = memory_format is MemoryFormat.CHANNELS_LAST
    return (1, *range(rank - 1, 1, -1), 0) if is_channels_last else tuple(range(rank - 1, -1, -1))


def fix_size_one_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], memory_format: MemoryFormat
) -> tuple[int, ...]:
    """`fixSizeOneDimStride`: the strides torch hands to cuDNN, where a dimension of size 1 gets the stride a dense
    tensor would have."""
    fixed, step = list(stride), 1
    for dim in _inner_to_outer(len(shape), memory_format):
        if shape[dim] == 1:
            fixed[dim] = step
        else:
            step *= shape[dim]
    return tuple(fixed)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """What these shapes are broadcast to."""
    last_first = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    return tuple(0 if 0 in sizes else max(sizes) for sizes in last_first)[::-1]
