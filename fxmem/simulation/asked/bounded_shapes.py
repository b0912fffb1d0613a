"""Upper bounds of results whose shapes depend on data: every element is picked, no two are equal.

A FakeTensor has no values to pick by. What a program allocates for such results is then at most what is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.asked import legal_values

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def picks_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is `x[mask]`, whose result follows from no metadata."""
    return func is aten.index.Tensor and any(index is not None and index.dtype in _MASKS for index in args[1])


def bound_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, distinct: bool) -> tuple[Any, str] | None:
    """The largest result that an operator can have, and what is taken for granted; None for every other operator.

    `distinct`: also of `unique`, as if no two elements were equal; models loop over the classes that it finds.
    """
    bound = _BOUNDS.get(str(func)) or (_DISTINCT.get(str(func)) if distinct else None)
    return None if bound is None else bound(*args, **kwargs)


def _nonzero(tensor: torch.Tensor) -> tuple[Any, str]:
    places = torch.empty(tensor.dim(), tensor.numel(), dtype=torch.int64, device=tensor.device)
    return places.t(), "nonzero: every place"


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> tuple[Any, str]:
    count = torch.broadcast_tensors(tensor, mask)[0].numel()  # type: ignore[no-untyped-call]
    return tensor.new_empty(count), "masked_select: every element"


def _index(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> tuple[Any, str]:
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            places.append(index)
            continue
        places += torch.empty(index.dim(), index.numel(), dtype=torch.int64, device=index.device).t().unbind(1)
    return aten.index.Tensor(tensor, places), "x[mask]: every element"


def _unique(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, str]:
    classes = legal_values.find_bound(tensor)
    count, device = min(tensor.numel(), classes or tensor.numel()), tensor.device
    # On a card the result is as large as the input before it shrinks, and a storage does not shrink.
    values = torch.empty(tensor.numel() if device.type == "cuda" else count, dtype=tensor.dtype, device=device)
    values = values.resize_(count)
    inverse = torch.empty(tensor.shape, dtype=torch.int64, device=device)
    return (values, inverse, torch.empty(count, dtype=torch.int64, device=device)), "unique: no two elements equal"


def _unique_of_index(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, str]:
    values, no_inverse = torch.empty_like(tensor), torch.empty(0, dtype=torch.int64, device=tensor.device)
    return (values, no_inverse), "index_fill's gradient: no two indices equal"


def _unique_dim(tensor: torch.Tensor, dim: int, *_: Any, **__: Any) -> tuple[Any, str]:
    rows = torch.empty(tensor.shape[dim], dtype=torch.int64, device=tensor.device)
    return (torch.empty_like(tensor), rows, torch.empty_like(rows)), "unique: no two rows equal"


def _whether_nested(*_: Any) -> tuple[Any, str]:
    return False, "nested tensors of an encoder: every token, padding too"


def _nms(boxes: torch.Tensor, *_: Any) -> tuple[Any, str]:
    return torch.empty(boxes.shape[0], dtype=torch.int64, device=boxes.device), "nms: every box"


def _repeat_interleave(repeats: torch.Tensor, output_size: int | None = None) -> tuple[Any, str]:
    return torch.empty(repeats.numel(), dtype=repeats.dtype, device=repeats.device), "repeat_interleave: each once"


def _bincount(tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> tuple[Any, str]:
    count = max(legal_values.find_bound(tensor) or 1, minlength)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty(count, dtype=dtype, device=tensor.device), f"bincount: {count} bins"


def _coalesce(tensor: torch.Tensor) -> tuple[Any, str]:
    return torch_wrappers.sparse_parts(tensor)[0].shape[1], "coalesce: no two places equal"


_BOUNDS: Final[dict[str, Callable[..., tuple[Any, str]]]] = {
    "aten.nonzero.default": _nonzero,
    "aten.masked_select.default": _masked_select,
    "aten.index.Tensor": _index,
    "torchvision.nms.default": _nms,
    "aten.bincount.default": _bincount,
    "aten.repeat_interleave.Tensor": _repeat_interleave,
    "aten._unique.default": _unique_of_index,
    "aten._coalesce.default": _coalesce,
    "aten._nested_tensor_from_mask_left_aligned.default": _whether_nested,
}
_DISTINCT: Final[dict[str, Callable[..., tuple[Any, str]]]] = {
    **dict.fromkeys(("aten._unique2.default", "aten.unique_consecutive.default"), _unique),
    "aten.unique_dim.default": _unique_dim,
}
