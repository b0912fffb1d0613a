"""Names of Triton that launch a kernel, each with why and since when. Triton comes with torch's CUDA wheel; nothing
here imports it.

A kernel launched from Python (`kernel[grid](...)`) writes to tensors it is given. It allocates nothing that torch's
allocator knows of, so for memory it need not run; without a GPU it could not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fxmem._torch.common import nested, wrap


def observe_launches(on_launch: Callable[[str, tuple[Any, ...]], None]) -> AbstractContextManager[None]:
    """On this thread, kernels are not launched; `on_launch(name, arguments)` is called in their place.

    `JITFunction.run` and `Autotuner.run` (since 2.0), which runs the former to time it. Where Triton has not been
    imported there are no kernels yet.
    """

    def run(original: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        function = getattr(kernel, "base_fn", None) or getattr(kernel, "fn", kernel)
        on_launch(getattr(function, "__name__", "kernel"), (*args, *kwargs.values()))

    classes = ("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")
    owners = [getattr(sys.modules.get(where), name, None) for where, name in classes]
    return nested(*(wrap(owner, "run", run, here=True) for owner in owners if owner is not None))
