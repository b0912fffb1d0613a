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

from fxmem._torch.common import add, nested, wrap


def observe_launches(
    on_launch: Callable[[str, tuple[Any, ...]], None], on_choice: Callable[[str], None]
) -> AbstractContextManager[None]:
    """On this thread, kernels are not launched; `on_launch(name, arguments)` is called in their place.

    A program may ask which configuration of a kernel is the fastest, which is timed when it is launched: it gets the
    first, after `on_choice(name)`.

    `JITFunction.run` and `Autotuner.run` (since 2.0), which runs the former to time it, `Autotuner.best_config`, which
    that sets. Where Triton has not been imported there are no kernels yet.
    """

    def run(original: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        on_launch(_name(kernel), (*args, *kwargs.values()))

    def find(kernel: Any, name: str) -> Any:
        if name != "best_config":
            raise AttributeError(name)
        on_choice(_name(kernel))
        return kernel.configs[0]

    classes = ("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")
    owners = [getattr(sys.modules.get(where), name, None) for where, name in classes]
    launches = [wrap(owner, "run", run, here=True) for owner in owners if owner is not None]
    return nested(*launches, *(add(owner, "__getattr__", find) for owner in owners[1:] if owner is not None))


def _name(kernel: Any) -> str:
    function = getattr(kernel, "base_fn", None) or getattr(kernel, "fn", kernel)
    return str(getattr(function, "__name__", "kernel"))
