"""Data loaders, and what torch traces, of a program that runs on a pretended card."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.program.border import Border, has_fake_inside


def loader_patches(border: Border, *, on_card: bool) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Data loaders work on the host. Where the host is the target, their batches enter as its inputs."""
    yield torch_programs.loaders_at_home(workers=on_card)
    if on_card:
        return

    def run_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        border.loading += 1
        try:
            with torch_common.no_modes(), torch_common.pause_observers():
                return original(*args, **kwargs)
        finally:
            border.loading -= 1

    def next_batch(original: Callable[..., Any], loader: Any) -> Any:
        return torch_common.tree_map_only(torch.Tensor, _entering, run_on_host(original, loader))

    yield torch_common.patch_call(torch_programs.LOADER_ITERATOR, "__init__", run_on_host)
    yield torch_common.patch_call(torch_programs.LOADER_ITERATOR, "__next__", next_batch)


def _entering(tensor: torch.Tensor) -> torch.Tensor:
    """A batch's tensor on the target: integers keep their values."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def trace_patches(notes: MadeUpNotes) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Let `torch.jit.trace` of a model on the card return what runs it as written."""

    def trace(original: Callable[..., Any], func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not has_fake_inside((func, example_inputs)):
            return original(func, example_inputs, *args, **kwargs)
        notes.note("answered", "torch.jit.trace: the code as it was written")
        func(*(example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)))
        return _Untraced(func)

    yield torch_common.patch_call(torch.jit, "trace", trace)


class _Untraced:
    """A model in the place of its trace, whose graph is empty."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.graph = torch_programs.empty_graph()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
