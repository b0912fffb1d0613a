"""A transformers model from its configuration: the class's defaults or a local file, and settings on top."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fxmem.cli import hub_models
from fxmem.cli.spec_names import model_error
from fxmem.cli.specs.configs import unknown_setting_error
from fxmem.cli.specs.recipes import Recipe, import_library
from fxmem.errors import UsageError, one_line
from fxmem.records import json_reader


def from_transformers(name: str, settings: Mapping[str, Any]) -> Recipe:
    """Read `hf:NAME`: a model of the hub, a model class, or the `config.json` that names one.

    Raises:
        UsageError: no such model, class, file or field.
        EnvironmentLacksError: transformers is not installed.
    """
    transformers = import_library("transformers")
    values: dict[str, Any] = {}
    notes = []
    if name.endswith(".json") or os.path.isfile(os.path.join(name, "config.json")):
        values = _read_config(Path(name))
    elif (found := hub_models.find(name)) is not None:
        values = copy.deepcopy(found.values) if found.path is None else _read_config(found.path)
        notes.append(f"the configuration of {found.name} is that of {found.origin}")
    model_class = _transformers_class(transformers, values["architectures"][0] if values else name, values)
    config_class = model_class.config_class
    quantization = values.pop("quantization_config", None)
    defaults = _make_config(config_class, values, "configuration")
    for key, value in settings.items():
        _set_field(values, defaults, key.split("."), value, f"hf:{name}")
    config = _make_config(config_class, values, "settings")
    # Its own, else that of its language model.
    declared = (each.dtype for each in (config, config.get_text_config()))
    dtype = next((each for each in declared if isinstance(each, torch.dtype)), torch.float32)
    if dtype != torch.float32:
        notes.append(f"weights in {str(dtype).removeprefix('torch.')}, as the config says")
    return Recipe(
        functools.partial(_build_with_dtype, dtype, model_class, config),
        functools.partial(_fields, config),
        tuple(notes),
        quantization if isinstance(quantization, dict) else None,
    )


def _make_config(config_class: Any, values: Mapping[str, Any], what: str) -> Any:
    try:
        return config_class.from_dict(copy.deepcopy(values))
    except Exception as error:
        raise UsageError(f"{config_class.__name__} takes no such {what}: {one_line(error)}") from error


def _read_config(path: Path) -> dict[str, Any]:
    """The fields of a `config.json` that names a model class."""
    path = path / "config.json" if os.path.isdir(path) else path
    expected = "expected a local config.json"
    values: dict[str, Any] = json_reader.parse(json_reader.read(path, expected), path, expected)
    architectures = values.get("architectures") if isinstance(values, dict) else None
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise UsageError(f'{path} names no model class; add one, e.g. "architectures": ["LlamaForCausalLM"]')
    return values


def _transformers_class(transformers: Any, name: str, config: Mapping[str, Any]) -> Any:
    if name.startswith("Auto"):
        raise UsageError(
            f"hf:{name} picks a class from a checkpoint; name the class itself, e.g. hf:LlamaForCausalLM, or a local "
            "config.json"
        )
    if not config and not name.isidentifier():
        if hub_models.is_name(name):
            raise hub_models.name_error(name)
        raise UsageError(
            "expected hf:ORG/NAME, hf:CLASS like hf:LlamaForCausalLM, or hf: and the path of a local config.json, got "
            f"hf:{name}"
        )
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if found is None and "auto_map" in config:
        raise UsageError(
            f"transformers has no model class {name!r}: the configuration names code of its own (auto_map), and fxmem "
            "runs none that it has not been given; name the class in your own file: file.py:factory"
        )
    if found is None:
        known = re.compile(r"(?!Auto|_)\w*(Model|For[A-Z]\w*)")
        names = [each for each in dir(transformers) if known.fullmatch(each)]
        raise model_error("transformers", name, names)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module) and getattr(found, "config_class", None)):
        raise UsageError(f"hf:{name} is no model class with a config; expected one like LlamaForCausalLM")
    return found


def _set_field(values: dict[str, Any], config: Any, path: Sequence[str], value: Any, spec: str) -> None:
    """Write one setting into the fields a config is made of; `config` is the config made of them without it."""
    head, *rest = path
    known = _fields(config)
    if head not in known and head not in getattr(config, "attribute_map", {}):
        raise unknown_setting_error(spec, head, known)
    current = getattr(config, head, None)
    is_config = hasattr(current, "to_diff_dict")
    if not rest and not (is_config and isinstance(value, Mapping)):
        values[head] = value
        return
    written = values.get(head)
    if is_config:
        inner = values[head] = dict(written) if isinstance(written, Mapping) else _difference(current)
        for inner_path, inner_value in [(rest, value)] if rest else [([key], value[key]) for key in value]:
            _set_field(inner, current, inner_path, inner_value, f"{spec} {head}")
    elif len(rest) == 1 and (current is None or isinstance(current, Mapping)):
        values[head] = {**(written or current or {}), rest[0]: value}
    else:
        raise UsageError(f"{spec} has no setting {'.'.join(path)!r}: {head} is {current!r}")


def _difference(config: Any) -> dict[str, Any]:
    """The fields in which a sub-config differs from the defaults of its class: what rebuilds it.

    Derived fields (a head size, a list of layer types) are those of the defaults and so stay out, to be derived anew.
    """
    defaults = type(config)().to_dict()
    fields = {key: value for key, value in config.to_dict().items() if key not in defaults or defaults[key] != value}
    return fields | {"model_type": config.model_type}


def _fields(config: Any) -> list[str]:
    """Names of a config's fields."""
    names = {*config.to_dict(), *vars(config), "num_labels", "attn_implementation"}
    return sorted(name for name in names - {"model_type", "transformers_version"} if not name.startswith("_"))


def _build_with_dtype(dtype: torch.dtype, model_class: Callable[[Any], Any], config: Any) -> Any:
    torch.set_default_dtype(dtype)  # `construct` puts the default back
    return model_class(config)
