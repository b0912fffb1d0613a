"""xformers: its attention is torch's own operators, in Python, which its library in C++ only says it was built for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common


def say_built(module: Any) -> torch_common.Patches:
    """The library counts as built for CUDA, which cannot be loaded without it."""
    yield torch_common.replace(module, "_built_with_cuda", True)


def dispatch_on_card(dispatch: Any) -> torch_common.Patches:
    """A kernel is chosen as with a torch that is built for CUDA."""

    def choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch_common.replace(torch.version, "cuda", torch.version.cuda or "13.0"):
            return original(*args, **kwargs)

    for name in ("_dispatch_fw_priority_list", "_dispatch_bw"):
        yield torch_common.wrap(dispatch, name, choose, here=True)
