"""Managed memory of bitsandbytes, for paged optimizers; its kernels are rows (`packages.libbitsandbytes_cuda`).

Managed memory is the host's, which a card reaches. torch's allocator knows nothing of it, on a card as here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common


def patch_functions(functional: Any) -> torch_common.Patches:
    """Let paged tensors be made, filled and moved without a driver, and maps of quantisation have their numbers."""

    def fill(original: Callable[..., None], A: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(A, "is_paged", False):
            original(A, *args, **kwargs)

    def make_map(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch_common.no_modes():
            return original(*args, **kwargs)

    yield torch_common.replace(functional, "get_paged", _make_paged)
    yield torch_common.replace(functional, "prefetch_tensor", lambda *_, **__: None)
    yield torch_common.wrap(functional, "fill", fill, here=True)
    yield torch_common.wrap(functional, "create_dynamic_map", make_map, here=True)


def _make_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
    """A tensor of the host of as many elements, none of which takes memory here."""
    with torch_common.no_modes():
        made: Any = torch.zeros(1, dtype=dtype).expand(shape)
    made.is_paged, made.page_deviceid = True, 0
    return made
