"""From a model spec on a command line to a `torch.nn.Module`, its weights never allocated.

    torchvision:NAME          a torchvision model
    timm:NAME                 a timm model
    hf:CLASS                  a transformers model class with its config's defaults
    hf:path/to/config.json    the class a config names in `architectures`
    pkg.mod:NAME, file.py:NAME    your own nn.Module class, function that returns a module, or module

Models are built under `torch.device("meta")`. A constructor that reads values (`.item()`, `.tolist()`, NumPy) cannot run
there; it runs on the CPU without its initialisers (see `usercode.construct`). Weights are never loaded, and nothing is
downloaded for the three collections.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import json
import os
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from fxmem import documents
from fxmem.errors import EnvironmentLacksError, FxmemError, UsageError
from fxmem.usercode import (
    chain,
    closest,
    construct,
    construct_with_values,
    failure,
    importable,
    is_reference,
    load,
    one_line,
    process_unchanged,
    without_network,
)

__all__ = ["SPEC_FORMS", "BuiltModel", "build_model", "parse_settings"]

SPEC_FORMS = "torchvision:NAME, timm:NAME, hf:CLASS, hf:path/to/config.json, pkg.mod:factory or file.py:factory"
"""The forms of a model spec, for messages and help."""

_WEIGHTS_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WEIGHT_SETTINGS = {
    "torchvision": {"weights", "weights_backbone", "pretrained", "pretrained_backbone"},
    "timm": {"pretrained", "checkpoint_path", "cache_dir"},
}


@dataclass(frozen=True)
class BuiltModel:
    """A module made from a spec, and how it was made.

    Its parameters and buffers are on meta, unless the spec named a module that existed already.
    """

    module: torch.nn.Module
    spec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mode: Literal["train", "infer"] = "train"
    built_on: Literal["meta", "cpu"] = "meta"
    """Where its constructor ran; a note says why if that was the CPU."""
    channels_last: bool = False
    notes: tuple[str, ...] = ()
    """What the reader of a result should know about how the model was built."""

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """dtype of the first floating-point parameter; None without one."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)


@dataclass(frozen=True)
class _Recipe:
    """A spec understood: `make` takes no arguments and makes the module; everything it needs is imported already."""

    make: Callable[[], object]
    known_settings: Callable[[], Sequence[str]]
    """Names a setting may have, for a message."""
    notes: tuple[str, ...] = ()


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """`["a=1", "b=true", "c=[1,2]", "d.e=text"]` to a dict: values are JSON if they parse, else Python literals, else text.

    Raises:
        UsageError: no `=`, a key that is no (dotted) name, or a key given twice.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise UsageError(f"expected KEY=VALUE with KEY a name like width or text_config.hidden_size, got {text!r}")
        if key in settings:
            raise UsageError(f"setting {key!r} is given twice")
        settings[key] = _parse_value(value)
    return settings


def build_model(
    spec: str,
    settings: Mapping[str, Any] | None = None,
    *,
    mode: Literal["train", "infer"] = "train",
    weights_dtype: Literal["bf16", "fp16"] | None = None,
    channels_last: bool = False,
    device: Literal["meta", "cpu"] = "meta",
) -> BuiltModel:
    """Build the model that `spec` names without allocating its weights.

    Args:
        spec: One of `SPEC_FORMS`.
        settings: Keyword arguments of the factory; for `hf:` fields of the config, dotted for those of a sub-config.
        mode: Sets the training flags. In `train`, `use_cache` of a transformers config is switched off: a key-value
            cache serves generation only.
        weights_dtype: Casts floating-point parameters and buffers, as `module.to(dtype)` does. None keeps the dtype the
            constructor chose; a `dtype` in a transformers config counts.
        channels_last: Lays 4-D parameters and buffers out as `torch.channels_last`, 5-D ones as `torch.channels_last_3d`.
        device: "meta", or "cpu" to build it for real, initialised.

    Tied parameters stay tied. Random states, default dtype and device, grad mode and `sys.path` are left as they were.
    A module that already exists (`pkg.mod:instance`) is changed in place.

    Raises:
        UsageError: a spec, model, file, name or setting that cannot be understood.
        EnvironmentLacksError: a library is not installed.
        AnalysisError: the model's own code raised.
    """
    settings = dict(settings or {})
    with process_unchanged():
        if spec.startswith("hf:"):
            module, built_on, notes = _build_from_collection(functools.partial(_transformers, spec[3:]), spec, settings, device)
            if mode == "train":
                _switch_cache_off(module)
        elif spec.startswith("torchvision:"):
            module, built_on, notes = _build_from_collection(functools.partial(_torchvision, spec[12:]), spec, settings, device)
        elif spec.startswith("timm:"):
            module, built_on, notes = _build_from_collection(functools.partial(_timm, spec[5:]), spec, settings, device)
        elif is_reference(spec):
            with importable(spec):
                module, built_on, notes = _build(_own(spec, settings), spec, settings, device)
        else:
            raise UsageError(f"expected a model as {SPEC_FORMS}; got {spec!r}{_where_it_might_be(spec)}")
        module.train(mode == "train")
        if weights_dtype is not None:
            module.to(_WEIGHTS_DTYPES[weights_dtype])
        if channels_last:
            _lay_channels_last(module)
    return BuiltModel(module, spec, settings, mode, built_on, channels_last, notes)


# --- making the module ------------------------------------------------------------------------------------------------------


def _build_from_collection(
    recipe: Callable[[Mapping[str, Any]], _Recipe], spec: str, settings: Mapping[str, Any], device: Literal["meta", "cpu"]
) -> tuple[torch.nn.Module, Literal["meta", "cpu"], tuple[str, ...]]:
    with without_network(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a collection's warnings about initial weights do not concern a model without any
        return _build(recipe(settings), spec, settings, device)


def _build(
    recipe: _Recipe, spec: str, settings: Mapping[str, Any], device: Literal["meta", "cpu"]
) -> tuple[torch.nn.Module, Literal["meta", "cpu"], tuple[str, ...]]:
    module: object
    built_on: Literal["meta", "cpu"]
    notes: tuple[str, ...]
    try:
        if device == "cpu":
            module, built_on, notes = construct_with_values(recipe.make), device, ()
        else:
            module, built_on, notes = construct(recipe.make)
    except FxmemError:
        raise
    except (Exception, SystemExit) as error:
        raise _construction_error(error, recipe, spec, settings) from error
    if not isinstance(module, torch.nn.Module):
        first = " whose first item is one: return the module alone" if isinstance(module, tuple | list) and _has_module_first(module) else ""
        raise UsageError(f"{spec} returned {_described(module)}{first}; expected a torch.nn.Module")
    return module, built_on, recipe.notes + notes


def _construction_error(error: BaseException, recipe: _Recipe, spec: str, settings: Mapping[str, Any]) -> FxmemError:
    if any(isinstance(link, ConnectionError) for link in chain(error)):
        return UsageError(f"{spec} wanted to download something ({one_line(error)}); fxmem builds models from their configuration alone")
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    if unexpected is not None and unexpected[1] in settings:
        return _unknown_setting(spec, unexpected[1], recipe.known_settings())
    return failure(error, spec)


# --- the sources ------------------------------------------------------------------------------------------------------------


def _torchvision(name: str, settings: Mapping[str, Any]) -> _Recipe:
    models = _library("torchvision", "torchvision.models")
    names = models.list_models()
    if name not in names:
        raise UsageError(f"torchvision has no model {name!r}{closest(name, names, otherwise='; see torchvision.models.list_models()')}")
    _refuse_weights("torchvision", settings)
    builder = models.get_model_builder(name)
    nothing = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    return _Recipe(functools.partial(builder, **nothing, **settings), functools.partial(_keywords, builder))


def _timm(name: str, settings: Mapping[str, Any]) -> _Recipe:
    timm = _library("timm")
    if ":" in name or not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}{closest(name, timm.list_models(), otherwise='; see timm.list_models()')}")
    architecture, _, tag = name.partition(".")
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tagged:
        raise UsageError(f"timm has no {name!r}{closest(name, tagged, otherwise='; weights are not loaded, so the part after the dot can go')}")
    _refuse_weights("timm", settings)
    return _Recipe(functools.partial(timm.create_model, name, pretrained=False, **settings), functools.partial(_keywords, timm.model_entrypoint(name)))


def _transformers(name: str, settings: Mapping[str, Any]) -> _Recipe:
    transformers = _library("transformers")
    values: dict[str, Any] = {}
    if name.endswith(".json") or os.path.isfile(os.path.join(name, "config.json")):
        name, values = _read_config(Path(name))
    model_class = _transformers_class(transformers, name)
    config_class = model_class.config_class
    notes = []
    if values.pop("quantization_config", None) is not None:
        notes.append("quantization_config is left out: the weights are those of training, not quantized")
    try:
        defaults = config_class.from_dict(copy.deepcopy(values))
    except Exception as error:
        raise UsageError(f"{config_class.__name__} takes no such configuration: {one_line(error)}") from error
    for key, value in settings.items():
        _set_field(values, defaults, key.split("."), value, f"hf:{name}")
    try:
        config = config_class.from_dict(copy.deepcopy(values))
    except Exception as error:
        raise UsageError(f"{config_class.__name__} takes no such settings: {one_line(error)}") from error
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if dtype != torch.float32:
        notes.append(f"weights in {str(dtype).removeprefix('torch.')}, as the config says")
    return _Recipe(functools.partial(_with_default_dtype, dtype, model_class, config), functools.partial(_fields, config), tuple(notes))


def _own(spec: str, settings: Mapping[str, Any]) -> _Recipe:
    factory = load(spec)
    if isinstance(factory, torch.nn.Module):
        if settings:
            raise UsageError(f"{spec} is a module already, it takes no settings; name a class or a function")
        return _Recipe(lambda: factory, tuple)
    if not callable(factory):
        raise UsageError(f"{spec} is {_described(factory)}; expected an nn.Module class, a function that returns a module, or a module")
    _check_keywords(factory, spec, settings)
    return _Recipe(functools.partial(factory, **settings), functools.partial(_keywords, factory))


def _library(package: str, module: str | None = None) -> Any:
    try:
        found = importlib.import_module(package)
        return importlib.import_module(module) if module else found
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = f"{package} is not installed" if missing else f"{package} cannot be imported ({one_line(error)})"
        raise EnvironmentLacksError(f'{what}; pip install "fxmem[zoo]"') from error


def _refuse_weights(collection: str, settings: Mapping[str, Any]) -> None:
    for key in sorted(_WEIGHT_SETTINGS[collection] & settings.keys()):
        raise UsageError(f"setting {key!r} is about weights; fxmem never loads any, leave it out")


def _where_it_might_be(name: str) -> str:
    if re.fullmatch(r"\w+Model|\w+For\w+", name):
        return f"; did you mean hf:{name}?"
    if name.endswith(".py"):
        return f"; name the function or class in it that makes the model: {name}:NAME"
    if not re.fullmatch(r"[\w.]+", name):
        return ""
    for package, module in (("torchvision", "torchvision.models"), ("timm", "timm")):
        with contextlib.suppress(EnvironmentLacksError):
            if name.partition(".")[0] in _library(package, module).list_models():
                return f"; did you mean {package}:{name}?"
    return ""


# --- transformers -----------------------------------------------------------------------------------------------------------


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The class a `config.json` names and its fields."""
    path = path / "config.json" if os.path.isdir(path) else path
    expected = "expected a local config.json (fxmem downloads none)"
    values = documents.parsed(documents.read(path, expected), path, expected)
    architectures = values.get("architectures") if isinstance(values, dict) else None
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise UsageError(f'{path} names no model class; add one, e.g. "architectures": ["LlamaForCausalLM"]')
    return architectures[0], values


def _transformers_class(transformers: Any, name: str) -> Any:
    if name.startswith("Auto"):
        raise UsageError(f"hf:{name} picks a class from a checkpoint; name the class itself, e.g. hf:LlamaForCausalLM, or a local config.json")
    if not name.isidentifier():
        raise UsageError(f"expected hf:CLASS like hf:LlamaForCausalLM, or hf: and the path of a local config.json, got hf:{name}; fxmem downloads nothing")
    found = getattr(transformers, name, None)
    if found is None:
        names = [n for n in dir(transformers) if re.search(r"(Model|For[A-Z]\w*)$", n) and not n.startswith(("Auto", "_"))]
        raise UsageError(f"transformers has no model class {name!r}{closest(name, names, otherwise='; expected one like LlamaForCausalLM')}")
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module) and getattr(found, "config_class", None)):
        raise UsageError(f"hf:{name} is no model class with a config; expected one like LlamaForCausalLM")
    return found


def _set_field(values: dict[str, Any], config: Any, path: Sequence[str], value: Any, spec: str) -> None:
    """Write one setting into the fields a config is made of; `config` is the config made of them without it."""
    head, *rest = path
    known = _fields(config)
    if head not in known and head not in getattr(config, "attribute_map", {}):
        raise _unknown_setting(spec, head, known)
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
    """The fields in which a sub-config differs from its class's defaults: what it takes to make it again.

    Derived fields (a head size, a list of layer types) are those of the defaults and so stay out, to be derived anew.
    """
    defaults = type(config)().to_dict()
    fields = {key: value for key, value in config.to_dict().items() if key not in defaults or defaults[key] != value}
    return fields | {"model_type": config.model_type}


def _fields(config: Any) -> list[str]:
    """Names of a config's fields."""
    names = {*config.to_dict(), *vars(config), "num_labels", "attn_implementation"} - {"model_type", "transformers_version"}
    return sorted(name for name in names if not name.startswith("_"))


def _with_default_dtype(dtype: torch.dtype, model_class: Callable[[Any], Any], config: Any) -> Any:
    torch.set_default_dtype(dtype)  # `construct` puts the default back
    return model_class(config)


def _switch_cache_off(module: torch.nn.Module) -> None:
    for part in module.modules():  # decoders hold configs of their own
        if getattr(getattr(part, "config", None), "use_cache", False):
            typing.cast(Any, part.config).use_cache = False


# --- settings and messages --------------------------------------------------------------------------------------------------


def _parse_value(text: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Keyword arguments of a factory; where it passes `**kwargs` on, also those of the module class it says it returns."""
    signature = _signature(function)
    if signature is None:
        return []
    parameters = signature.parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    made = signature.return_annotation
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and isinstance(made, type) and issubclass(made, torch.nn.Module):
        names |= {p.name for p in inspect.signature(made).parameters.values() if p.default is not p.empty}  # the factory gives the others
    return sorted(names - set().union(*_WEIGHT_SETTINGS.values()))


def _check_keywords(factory: Callable[..., Any], spec: str, settings: Mapping[str, Any]) -> None:
    signature = _signature(factory)
    if signature is None:
        return
    parameters = signature.parameters.values()
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in settings:
            if key not in known:
                raise _unknown_setting(spec, key, sorted(known))
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in settings]
    if missing:
        if hasattr(factory, "config_class"):
            raise UsageError(f"{spec} is a transformers class; write hf:{factory.__name__}")
        raise UsageError(f"{spec} needs {', '.join(missing)}; say e.g. --set {missing[0]}=VALUE")


def _unknown_setting(spec: str, key: str, known: Sequence[str]) -> UsageError:
    return UsageError(f"{spec} has no setting {key!r}{closest(key, known)}; it has {', '.join(known) or 'none'}")


def _has_module_first(items: Sequence[object]) -> bool:
    return len(items) > 0 and isinstance(items[0], torch.nn.Module)


def _described(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _lay_channels_last(module: torch.nn.Module) -> None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor) and tensor.dim() in formats:
            tensor.data = tensor.data.contiguous(memory_format=formats[tensor.dim()])
