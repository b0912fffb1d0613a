"""Private names of `torch.utils.checkpoint`, each with why and since when.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from fxmem._torch.common import patch


def _with_one_object_each(function: Callable[..., Any], given: tuple[Any, ...]) -> Callable[..., Any]:
    """Return `function` for calls with the last of these arguments; what was one tensor is one tensor again.

    Without hooks for saved tensors C++ gives the same object back; with hooks, which an analysis has, a new one each
    time.
    """
    # torch 2.15 hands the function's own arguments over as a tuple and a dict, before what checkpointing itself takes.
    values = given[0] if len(given) > 1 and isinstance(given[0], tuple) and isinstance(given[1], dict) else given
    tensors = [id(value) if isinstance(value, torch.Tensor) else None for value in values]

    def call_with_one_object_each(*args: Any, **kwargs: Any) -> Any:
        first: dict[int, Any] = {}
        if len(args) > len(tensors):
            return function(*args, **kwargs)
        keys = tensors[len(tensors) - len(args) :]
        return function(
            *(value if key is None else first.setdefault(key, value) for key, value in zip(keys, args, strict=True)),
            **kwargs,
        )

    return call_with_one_object_each


@contextlib.contextmanager
def checkpoint_regions(
    region: Callable[[], tuple[Callable[[Callable[..., Any]], Callable[..., Any]], Callable[[], None]]],
    own_work: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Tell where `torch.utils.checkpoint` regions begin and end, and when they are run again.

    `region()` is called when a checkpointed function is about to run forward and returns a wrapper for the function
    that recomputes it, and what to call when the function has run; what checkpointing does for itself happens within
    `own_work()`. Non-reentrant checkpointing recomputes the `fn` it gave to `_checkpoint_without_reentrant_generator`
    (since 2.1; `…_impl` in 2.15), reentrant the `run_function` of `CheckpointFunction`.
    """
    me = threading.get_ident()

    def generator(original: Any) -> Any:
        def generate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            if threading.get_ident() != me:
                yield from original(fn, *args, **kwargs)
                return
            wrap, ended = region()
            steps = original(wrap(_with_one_object_each(fn, args)), *args, **kwargs)
            del fn, args, kwargs  # kept by the region itself, and no longer than it needs them
            with own_work():
                next(steps)
            try:
                yield
            except BaseException as error:
                steps.throw(error)
                raise
            ended()
            with own_work():
                next(steps, None)

        return generate

    def forward(original: Any) -> Any:
        def run_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            if threading.get_ident() != me:
                return original(ctx, run_function, *args)
            wrap, ended = region()
            again = wrap(run_function)
            outputs = original(ctx, run_function, *args)
            ended()
            ctx.run_function = again
            return outputs

        return staticmethod(run_forward)

    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name
    with patch(module, name, generator), patch(module.CheckpointFunction, "forward", forward):
        yield


@contextlib.contextmanager
def observe_checkpoints(on_region: Callable[[Any], None]) -> Iterator[None]:
    """Call `on_region(function)` before each function that this thread runs under `torch.utils.checkpoint`.

    Names as in `checkpoint_regions`.
    """
    me = threading.get_ident()

    def first(position: int) -> Callable[[Any], Callable[..., Any]]:
        def make(original: Any) -> Callable[..., Any]:
            def call_observed(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == me:
                    on_region(args[position])
                return original(*args, **kwargs)

            return call_observed

        return make

    module = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(module, f"{name}_impl") else name
    with (
        patch(module, name, first(0)),
        patch(module.CheckpointFunction, "forward", lambda original: staticmethod(first(1)(original))),
    ):
        yield
