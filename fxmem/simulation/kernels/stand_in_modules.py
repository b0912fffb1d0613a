"""Modules made of rows, in the place of other packages' extension modules (`fxmem.simulation.kernels.packages`)."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fxmem._torch import common as torch_common
from fxmem._torch.imports import patch_when_imported
from fxmem.errors import AnalysisError
from fxmem.simulation.kernels.packages import PACKAGES, Kernel, Package

Note = Callable[[str, int | None, Any], None]
"""Is told of each call of a kernel: its name, its FLOPs if they are counted, its arguments and results."""


class StandInModules:
    """The stand-ins of one program. Use `installed()` around it.

    Args:
        note: of calls.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._is_running = False
        self._packages: dict[str, Package] = {}
        self._used: dict[str, tuple[Package, set[str]]] = {}

    @contextlib.contextmanager
    def installed(self, own: Iterable[Package] = ()) -> Iterator[None]:
        """Inside, extension modules that there are rows for are made of them, if the Python around them is there.

        A real one would take no tensors without data. What was imported of such a package inside is forgotten at the
        end.

        Args:
            own: packages whose rows are this program's own.
        """
        packages = self._packages = {each.module: each for each in (*map(PACKAGES.get, PACKAGES), *own)}
        imported = set(sys.modules)
        patches = {name: patch for each in packages.values() for name, patch in each.patches.items()}
        environ = {name: value for each in packages.values() for name, value in each.environ.items()}
        finder = _Finder(packages, self._make)
        with torch_common.set_environment(environ), patch_when_imported(patches):
            sys.meta_path.insert(0, finder)
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False
                sys.meta_path.remove(finder)
                tops = {name for name in packages if name in sys.modules}
                tops |= {packages[name].python for name in tops}
                for name in set(sys.modules) - imported:
                    if name.partition(".")[0] in tops:
                        del sys.modules[name]

    def assumptions(self) -> Iterator[str]:
        """Which kernels were taken as which release has them."""
        for package, names in self._used.values():
            if names:
                yield (
                    f"kernels of {package.module} allocate as in {package.release}"
                    f"{_other_release(package)}: {', '.join(sorted(names))}"
                )

    def _make(self, module: types.ModuleType) -> None:
        package = _find(self._packages, module.__name__)
        assert package is not None
        _, names = self._used.setdefault(package.module, (package, set()))
        vars(module).update(package.values)
        for name, kernel in package.kernels.items():
            setattr(module, name, self._make_call(package, name, kernel, names))

        def unknown(name: str) -> Any:
            # Of a package without Python of its own, libraries look for such kernels, and do without them.
            if name.startswith("__" if package.python else "_"):
                raise AttributeError(name)
            return type(name, (), {"__new__": functools.partial(_refuse, package, name)})

        vars(module)["__getattr__"] = unknown

    def _make_call(self, package: Package, name: str, kernel: Kernel, names: set[str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_running:
                raise RuntimeError(
                    f"{package.module}.{name} stands for a kernel while fxmem records a program, which is over. Import "
                    f"{package.python or package.module} in another process"
                )
            names.add(name)
            flops = None if kernel.flops is None else kernel.flops(*args, **kwargs)
            result = kernel.run(*args, **kwargs)
            if not kernel.is_composed:
                self._note(f"{package.module}.{name}", flops, (args, kwargs, result))
            return result

        return functools.update_wrapper(call, kernel.run, assigned=("__doc__",))


def _find(packages: Mapping[str, Package], module: str) -> Package | None:
    """The package of a module, or of the one that it lies in, where that has no Python of its own."""
    top = packages.get(module.partition(".")[0])
    return packages.get(module) or (None if top is None or top.python or "._" in module else top)


def _refuse(package: Package, name: str, *_: Any, **__: Any) -> Any:
    """Raise an AnalysisError: the program calls a kernel that there is no row for."""
    raise AnalysisError(
        f"expected kernels that fxmem has rows for; {package.module}.{name} has none as of {package.release}. Let the "
        f"program take another way, or add a row (an entry point of the group fxmem.packages, docs/extend.md)"
    )


def _other_release(package: Package) -> str:
    name, _, release = package.release.rpartition(" ")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version(package.python or package.module)
        if installed.partition("+")[0] != release:
            return f" ({name} {installed} is installed)"
    return ""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages, if the Python around them is installed."""

    def __init__(self, packages: dict[str, Package], make: Callable[[types.ModuleType], None]) -> None:
        self._packages = packages
        self._make = make

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        package = _find(self._packages, fullname)
        if package is None or (package.python and importlib.util.find_spec(package.python) is None):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=not package.python)

    def exec_module(self, module: types.ModuleType) -> None:
        """As `importlib.abc.Loader.exec_module`."""
        self._make(module)
