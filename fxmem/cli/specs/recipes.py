"""Model specs of torchvision, timm and the user's own code, and their models' factories."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxmem.cli.spec_names import model_error
from fxmem.cli.specs import configs
from fxmem.cli.specs.references import load
from fxmem.errors import EnvironmentLacksError, UsageError, closest, one_line
from fxmem.records.pause_gc import pause_gc

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
