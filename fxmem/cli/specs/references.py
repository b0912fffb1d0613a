"""References to the user's own code, and the code behind them.

A reference is `pkg.mod:name` or `path/to/file.py:name`; `name` may be dotted (`Outer.build`). The code behind it is
trusted, the reference is not: nothing is evaluated and no shell sees it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fxmem.cli.spec_names import file_error, is_path, split_reference
from fxmem.errors import FxmemError, UsageError, closest, one_line
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.given import ignore_moves


def load(reference: str) -> Any:
    """The object that `reference` names, its module imported if need be.

    A file is imported anew at each call, under a name private to its path; a file of a package is imported once, as a
    module of it. Call it inside `process_unchanged` and
    `importable(reference)`, which undo what an import may leave behind, and outside any device context: a
    module's global tensors keep the device they were made on.

    Raises:
        UsageError: no such file, module or name; the file is not Python.
        EnvironmentLacksError: it imports something that is not installed.
        AnalysisError: it raises while being imported.
    """
    parts = split_reference(reference)
    if parts is None:
        raise UsageError(f"expected pkg.mod:name or file.py:name, got {reference!r}")
    where, wanted = parts
    try:
        with ignore_moves():
            found: Any = _import_file(where) if is_path(where) else _import_module(where)
        for part in wanted.split("."):
            if not hasattr(found, part):
                public = [name for name in dir(found) if not name.startswith("_")]
                raise UsageError(f"{where} has no {wanted!r}{closest(part, public)}")
            found = getattr(found, part)
    except FxmemError:
        raise
    except (Exception, SystemExit) as error:
        raise user_code_error(error, f"importing {where}") from error
    return found


@contextlib.contextmanager
def importable(reference: str) -> Iterator[None]:
    """Put the directory of the referenced file first on `sys.path`; for a module, the working directory."""
    before = list(sys.path)
    where = reference.rpartition(":")[0]
    if is_path(where):
        file = _file(where)
        folders = dict.fromkeys((str(_home(file)), str(file.parent)))  # a package's own files come after it
    else:
        folders = {os.getcwd(): None}
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


def _file(where: str) -> Path:
    try:
        return Path(where).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; ~ of nobody; a null character
        raise UsageError(f"no file {where}: {one_line(error)}") from error


def _home(path: Path) -> Path:
    """The folder that a file is imported from: the parent of its outermost package, or its own."""
    folder = path.parent
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"no module {name!r} in the working directory or on sys.path") from error
        raise


def _import_file(where: str) -> ModuleType:
    path = _file(where)
    if not os.path.isfile(path):
        raise file_error(where)
    if path.suffix != ".py":
        raise UsageError(f"expected a .py file, got {where}")
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        what = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{where} is not Python: {what}") from error
    home = _home(path)
    if home != path.parent:
        return _import_from_package(path, home)
    name = f"_fxmem_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # a .py suffix always has one
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _import_from_package(path: Path, home: Path) -> ModuleType:
    """The file as a module of its package, so that its relative imports are found."""
    name = ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")
    top = name.partition(".")[0]
    known = sys.modules.get(top)
    if known is not None and all(Path(each).resolve() != home / top for each in getattr(known, "__path__", ())):
        raise UsageError(
            f"{path.name} is part of the package {top!r}, and another package of this name is imported already "
            f"({getattr(known, '__file__', None) or 'built in'}); rename the folder, or take __init__.py out of it"
        )
    return importlib.import_module(name)
