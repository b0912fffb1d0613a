"""Model specs of torchvision, timm and the user's own code, and their models' factories."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fxmem.cli.spec_names import file_error, is_path, model_error, split_reference
from fxmem.cli.specs import configs
from fxmem.errors import EnvironmentLacksError, FxmemError, UsageError, closest, one_line
from fxmem.records.pause_gc import pause_gc
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.given import ignore_moves

# --- references to the user's own code, and the code behind them ------------------------------------------------------
# A reference is `pkg.mod:name` or `path/to/file.py:name`; `name` may be dotted (`Outer.build`). The code behind it is
# trusted, the reference is not: nothing is evaluated and no shell sees it.


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


# --- model specs of torchvision, timm and the user's own code, and their models' factories ----------------------------


_WEIGHT_SETTINGS = {
    "torchvision": {"weights", "weights_backbone", "pretrained", "pretrained_backbone"},
    "timm": {"pretrained", "checkpoint_path", "cache_dir"},
}


@dataclass(frozen=True)
class Recipe:
    """A spec understood: `make` takes no arguments and makes the module; everything it needs is imported already."""

    make: Callable[[], object]
    known_settings: Callable[[], Sequence[str]]
    """Names a setting may have, for a message."""
    notes: tuple[str, ...] = ()
    quantization: Mapping[str, Any] | None = None
    """The `quantization_config` of the checkpoint, where it has one."""


def from_torchvision(name: str, settings: Mapping[str, Any]) -> Recipe:
    """Read `torchvision:NAME`. Raises: UsageError, EnvironmentLacksError."""
    models = import_library("torchvision", "torchvision.models")
    names = models.list_models()
    if name not in names:
        raise model_error("torchvision", name, names)
    _refuse_weights("torchvision", settings)
    builder = models.get_model_builder(name)
    nothing = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    return Recipe(functools.partial(builder, **nothing, **settings), functools.partial(_keywords, builder))


def from_timm(name: str, settings: Mapping[str, Any]) -> Recipe:
    """Read `timm:NAME`; weights after the dot are not loaded. Raises: UsageError, EnvironmentLacksError."""
    timm = import_library("timm")
    if ":" in name or not timm.is_model(name):
        raise model_error("timm", name, timm.list_models())
    architecture, _, tag = name.partition(".")
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tagged:
        near = closest(name, tagged, otherwise="; weights are not loaded, so the part after the dot can go")
        raise UsageError(f"timm has no {name!r}{near}")
    _refuse_weights("timm", settings)
    return Recipe(
        functools.partial(timm.create_model, name, pretrained=False, **settings),
        functools.partial(_keywords, timm.model_entrypoint(name)),
    )


def from_own_code(spec: str, settings: Mapping[str, Any]) -> Recipe:
    """Read `pkg.mod:NAME` or `file.py:NAME`, inside `importable(spec)`.

    Raises:
        UsageError: the name is no model, or does not have these settings.
        AnalysisError: the code itself raises.
    """
    factory = load(spec)
    if isinstance(factory, torch.nn.Module):
        if settings:
            raise UsageError(f"{spec} is a module already, it takes no settings; name a class or a function")
        return Recipe(lambda: factory, tuple)
    if not callable(factory):
        raise UsageError(
            f"{spec} is {describe(factory)}; expected an nn.Module class, a function that returns a module, or a module"
        )
    arguments, notes = configs.read_arguments(factory, spec, settings)
    _check_keywords(factory, spec, arguments)
    return Recipe(functools.partial(factory, **arguments), functools.partial(_keywords, factory), notes)


def import_library(package: str, module: str | None = None) -> Any:
    """Import a collection, or a module of it. Raises: EnvironmentLacksError."""
    try:
        with pause_gc():
            found = importlib.import_module(package)
            return importlib.import_module(module) if module else found
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = f"{package} is not installed" if missing else f"{package} cannot be imported ({one_line(error)})"
        raise EnvironmentLacksError(f'{what}; pip install "fxmem[zoo]"') from error


def describe(value: object) -> str:
    """Say in words what a spec names instead of a module."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _refuse_weights(collection: str, settings: Mapping[str, Any]) -> None:
    for key in sorted(_WEIGHT_SETTINGS[collection] & settings.keys()):
        raise UsageError(f"setting {key!r} is about weights; fxmem never loads any, leave it out")


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Keyword arguments of a factory; with `**kwargs`, also those of the module class in its annotation."""
    found = configs.signature(function)
    if found is None:
        return []
    parameters = found.parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    made = found.return_annotation
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if passes_on and isinstance(made, type) and issubclass(made, torch.nn.Module):
        # Those without a default the factory gives itself.
        names |= {p.name for p in inspect.signature(made).parameters.values() if p.default is not p.empty}
    return sorted(names - set().union(*_WEIGHT_SETTINGS.values()))


def _check_keywords(factory: Callable[..., Any], spec: str, settings: Mapping[str, Any]) -> None:
    found = configs.signature(factory)
    if found is None:
        return
    parameters = found.parameters.values()
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in settings:
            if key not in known:
                raise UsageError(
                    configs.field_hint(factory, key) or str(configs.unknown_setting_error(spec, key, sorted(known)))
                )
    missing = [name for name in configs.required_parameters(factory) if name not in settings]
    if missing and hasattr(factory, "config_class"):
        raise UsageError(f"{spec} is a transformers class; write hf:{factory.__name__}")
    if missing:
        raise UsageError(f"{spec} needs {', '.join(missing)}; say e.g. {configs.setting_line(factory, missing[0])}")
