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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from fxmem._torch import common as torch_common
from fxmem._torch.imports import patch_when_imported
from fxmem.errors import AnalysisError
from fxmem.simulation.kernels.composites import IN_PYTHON
from fxmem.simulation.kernels.packages import PACKAGES, Kernel, Package

Note = Callable[[str, int | None, Any], None]
"""Is told of each call of a kernel: its name, its FLOPs if they are counted, its arguments and results."""


class StandInModules:
    """The stand-ins of one program. Use `installed()` around it.

    Args:
        note: of calls.
    """

    _running: ClassVar[StandInModules | None] = None
    """Those of the program that runs: what has imported a kernel may outlive the program that it did so in."""

    def __init__(self, note: Note) -> None:
        self.timed: set[str] = set()
        """Triton's kernels of which the program asks for the fastest configuration."""
        self._note = note
        self.own: list[Package] = []
        """Packages whose rows are this program's own."""
        self._packages: dict[str, Package] = {}
        self._used: dict[str, tuple[Package, set[str]]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, extension modules that there are rows for are made of them, if the Python around them is there.

        A real one would take no tensors without data. What was imported of such a package inside is forgotten at the
        end, so that it is imported with its own extension then.
        """
        packages = self._packages = {each.module: each for each in (*map(PACKAGES.get, PACKAGES), *self.own)}
        imported = set(sys.modules)
        patches = {name: patch for each in packages.values() for name, patch in each.patches.items()}
        environ = {name: value for each in packages.values() for name, value in each.environ.items()}
        finder = _Finder(packages, self._make)
        sys.meta_path.insert(0, finder)
        try:
            with (
                torch_common.set_environment(environ),
                torch_common.restored(IN_PYTHON),
                torch_common.replace(StandInModules, "_running", self),
                patch_when_imported(patches),
            ):
                IN_PYTHON.update(each.operators for each in packages.values())
                yield
        finally:
            sys.meta_path.remove(finder)
            used = [package for package, _ in self._used.values()]
            names = {name for each in used for name in (each.module, "" if each.patches_all else each.python)}
            tops = {name.partition(".")[0] for name in names}
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
        if self.timed:
            timed = ", ".join(sorted(self.timed))
            yield f"a card times which configuration is the fastest; the first is taken of Triton's {timed}"

    def _make(self, module: types.ModuleType) -> None:
        package = _find(self._packages, module.__name__)
        assert package is not None
        self._used.setdefault(package.module, (package, set()))
        vars(module).update(package.values)
        for name, kernel in package.kernels.items():
            setattr(module, name, _make_call(package, name, kernel))

        def unknown(name: str) -> Any:
            # Of a package without Python of its own, libraries look for such kernels, and do without them.
            if name.startswith("__" if package.python else "_"):
                raise AttributeError(name)
            return type(name, (), {"__new__": functools.partial(_refuse, package, name)})

        vars(module)["__getattr__"] = unknown

    def _call(self, package: Package, name: str, kernel: Kernel, args: Any, kwargs: Any) -> Any:
        self._used.setdefault(package.module, (package, set()))[1].add(name)
        flops = None if kernel.flops is None else kernel.flops(*args, **kwargs)
        result = kernel.run(*args, **kwargs)
        if not kernel.is_composed:
            self._note(f"{package.module}.{name}", flops, (args, kwargs, result))
        return result


def _make_call(package: Package, name: str, kernel: Kernel) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        running = StandInModules._running
        if running is None:
            raise RuntimeError(
                f"{package.module}.{name} stands for a kernel while fxmem records a program, which is over. Import "
                f"{package.python or package.module} in another process"
            )
        return running._call(package, name, kernel, args, kwargs)

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
        if installed.partition("+")[0].partition(".post")[0] != release:
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
