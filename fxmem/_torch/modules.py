"""Private names of `torch.nn.Module`, each with why and since when.

`named_parameters` and its like leave out what is None and what came before, and assignment goes through the module's
own checks; what is wanted here is what a module itself holds, by name, to read and to write. The tables are the
module's own.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

import torch


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters a module itself holds (`Module._parameters`, since 0.1)."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers a module itself holds (`Module._buffers`, since 0.1)."""
    return module._buffers


def derived_buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Its buffers that no checkpoint has, and those of the modules within (`Module._non_persistent_buffers_set`, since
    1.5)."""
    for each in module.modules():
        for name in each._non_persistent_buffers_set:
            if (tensor := each._buffers.get(name)) is not None:
                yield tensor


def all_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a module, whose class may have attributes of these names (Megatron-LM's wrapper
    has a list `buffers`)."""
    yield from torch.nn.Module.parameters(module)
    yield from torch.nn.Module.buffers(module)


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The modules a module itself holds (`Module._modules`, since 0.1)."""
    return module._modules


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Its parameters and buffers, those that are there."""
    for tensors in (own_parameters(module), own_buffers(module)):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def forward_hooks(module: torch.nn.Module) -> tuple[Callable[..., object], ...]:
    """What runs around its forward (`Module._forward_hooks`, since 0.1, and `_forward_pre_hooks`, since 0.2)."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of it runs hooks of its own.

    `Module._forward_hooks` and `_backward_hooks` (since 0.1), `_forward_pre_hooks` (since 0.2), `_backward_pre_hooks`
    (since 2.0).
    """
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called (`Module._compiled_call_impl`, since 2.2)."""
    return getattr(module, "_compiled_call_impl", None) is not None


# --- patches of modules that a program may import later ---------------------------------------------------------------


PatchesOf = Callable[[Any], Iterable[contextlib.AbstractContextManager[Any]]]
"""The patches of a module."""


@contextlib.contextmanager
def patch_when_imported(libraries: Mapping[str, PatchesOf]) -> Iterator[None]:
    """Patch modules that are there already, and others right after their import."""
    with contextlib.ExitStack() as stack:

        def patch(module: types.ModuleType) -> None:
            for each in libraries[module.__name__](module):
                stack.enter_context(each)

        for name in libraries:
            if name in sys.modules:
                patch(sys.modules[name])
        finder = _Finder(libraries, patch)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as others do; calls a function after the import of some."""

    def __init__(self, names: Mapping[str, Any], imported: Callable[[types.ModuleType], None]) -> None:
        self._names = names
        self._imported = imported
        self._asking: set[str] = set()
        """What it asks others for, among whom may be one like it, which asks it in turn."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if fullname not in self._names or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            found = (each.find_spec(fullname, path, target) for each in sys.meta_path)
            spec = next((each for each in found if each is not None), None)
        finally:
            self._asking.remove(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._imported(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec
