"""Private names of `torch.utils.checkpoint`, each with why and since when.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.utils.checkpoint

from fxmem._torch.common import nested, wrap

_OWN_NAME = "_checkpoint_without_reentrant_generator"
_GENERATOR: Final = next(name for name in (f"{_OWN_NAME}_impl", _OWN_NAME) if hasattr(torch.utils.checkpoint, name))
"""What runs a region without reentrance: the wrapped one of 2.15, else the one since 2.1."""


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


def checkpoint_regions(
    region: Callable[[], tuple[Callable[[Callable[..., Any]], Callable[..., Any]], Callable[[], None]]],
    own_work: Callable[[], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Tell where `torch.utils.checkpoint` regions begin and end, and when they are run again.

    `region()` is called when a checkpointed function is about to run forward and returns a wrapper for the function
    that recomputes it, and what to call when the function has run; what checkpointing does for itself happens within
    `own_work()`. Non-reentrant checkpointing recomputes the `fn` it gave to `_checkpoint_without_reentrant_generator`
    (since 2.1; `…_impl` in 2.15), reentrant the `run_function` of `CheckpointFunction`.
    """

    def generate(original: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        recomputing, ended = region()
        steps = original(recomputing(_with_one_object_each(fn, args)), *args, **kwargs)
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

    def run_forward(original: Any, ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        recomputing, ended = region()
        again = recomputing(run_function)
        outputs = original(ctx, run_function, *args)
        ended()
        ctx.run_function = again
        return outputs

    return nested(
        wrap(torch.utils.checkpoint, _GENERATOR, generate, here=True),
        wrap(torch.utils.checkpoint.CheckpointFunction, "forward", run_forward, here=True),
    )


def observe_checkpoints(on_region: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Call `on_region(function)` before each function that this thread runs under `torch.utils.checkpoint`.

    Names as in `checkpoint_regions`.
    """

    def generate(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        on_region(function)
        return original(function, *args, **kwargs)

    def run_forward(original: Any, ctx: Any, function: Any, *args: Any) -> Any:
        on_region(function)
        return original(ctx, function, *args)

    return nested(
        wrap(torch.utils.checkpoint, _GENERATOR, generate, here=True),
        wrap(torch.utils.checkpoint.CheckpointFunction, "forward", run_forward, here=True),
    )
