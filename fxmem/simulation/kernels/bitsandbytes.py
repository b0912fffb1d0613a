"""What bitsandbytes asks of a card beside torch: its own kernels, and managed memory for paged optimizers.

Managed memory is the host's, which a card reaches. torch's allocator knows nothing of it, on a card as here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common

_KERNELS: Final = "bitsandbytes.backends.cuda.ops"
_UNPACKS: Final = "_dequant_linear_fallback"


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


def register_kernels(_: Any) -> torch_common.Patches:
    """Import the kernels of the card, as the library does itself unless it was imported where there was none."""
    with contextlib.suppress(ImportError):
        kernels = importlib.import_module(_KERNELS)
        for name in ("_gpu_dispatch_props", "_gemm_4bit_use_custom_cuda"):
            getattr(kernels, name, functools.cache(int)).cache_clear()  # what another card answered
    return iter(())


def find_kernel(func: Any) -> Callable[..., Any] | None:
    """The kernel of an operator that calls others; None where it calls none, or for another library's."""
    has_own = str(func) == "bitsandbytes.gemm_4bit.default" and hasattr(sys.modules.get(_KERNELS), _UNPACKS)
    return _multiply if has_own else None


def _multiply(x: Any, packed: Any, shape: Any, absmax: Any, blocksize: int, *args: Any, **kwargs: Any) -> Any:
    """`gemm_4bit` of bitsandbytes/backends/cuda/ops.py: with many rows the weights are unpacked first."""
    kernels: Any = sys.modules[_KERNELS]
    width = x.shape[-1]
    rows = x.numel() // width
    is_fused = rows <= kernels._gemm_4bit_custom_max_m and width % blocksize == 0
    if is_fused and kernels._gemm_4bit_use_custom_fn(0, x.dtype, rows, shape[0], width):
        return x.new_empty(*x.shape[:-1], shape[0])
    nothing = [(kernels, f"_dequantize_{each}_impl", lambda *_, **__: None) for each in ("blockwise", "4bit")]
    with torch_common.replace_all(nothing):  # they write to what is there
        return getattr(kernels, _UNPACKS)(x, packed, shape, absmax, blocksize, *args, **kwargs)
