"""Names of Triton that launch a kernel, each with why and since when. Triton comes with torch's CUDA wheel; nothing
here imports it.

A kernel launched from Python (`kernel[grid](...)`) writes to tensors it is given. It allocates nothing that torch's
allocator knows of, so for memory it need not run; without a GPU it could not.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fxmem._torch.common import patch


@contextlib.contextmanager
def observe_launches(on_launch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """On this thread, kernels are not launched; `on_launch(name, arguments)` is called in their place.

    `JITFunction.run` and `Autotuner.run` (since 2.0), which runs the former to time it. Where Triton has not been
    imported there are no kernels yet.
    """
    me = threading.get_ident()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me:
                return original(self, *args, **kwargs)
            on_launch(
                getattr(getattr(self, "base_fn", None) or getattr(self, "fn", self), "__name__", "kernel"),
                (*args, *kwargs.values()),
            )
            return None

        return run

    with contextlib.ExitStack() as stack:
        for where, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
            owner = getattr(sys.modules.get(where), name, None)
            if owner is not None:
                stack.enter_context(patch(owner, "run", make))
        yield
