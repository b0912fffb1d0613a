"""Patches of modules that a program may import later."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

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
