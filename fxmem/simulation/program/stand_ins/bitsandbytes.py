"""What bitsandbytes asks of a card beside torch: its own kernels, and managed memory for paged optimizers.

Managed memory is the host's, which a card reaches. torch's allocator knows nothing of it, on a card as here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.imports import patch_when_imported
from fxmem.simulation.asked.made_up import MadeUpNotes


def bitsandbytes_patches(notes: MadeUpNotes) -> torch_common.Patches:
    """Let paged tensors be made, filled and moved without a driver. Each that is made is noted."""

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
        notes.note("answered", "bitsandbytes: paged state, in memory that torch's allocator does not count")
        made: Any = torch.zeros(1, dtype=dtype).expand(shape)  # as many elements, none of which takes memory here
        made.is_paged, made.page_deviceid = True, 0
        return made

    def fill(original: Callable[..., None], A: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(A, "is_paged", False):
            original(A, *args, **kwargs)

    def patches(functional: Any) -> torch_common.Patches:
        yield torch_common.replace(functional, "get_paged", get_paged)
        yield torch_common.replace(functional, "prefetch_tensor", lambda *_, **__: None)
        yield torch_common.wrap(functional, "fill", fill)

    yield patch_when_imported({"bitsandbytes": _register_kernels, "bitsandbytes.functional": patches})


def _register_kernels(_: Any) -> torch_common.Patches:
    """Import the kernels of the card, as the library does itself unless it was imported where there was none."""
    with contextlib.suppress(ImportError):
        importlib.import_module("bitsandbytes.backends.cuda.ops")
    return iter(())
