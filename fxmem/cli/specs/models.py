"""A model, built from its spec."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import json
import os
import re
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fxmem.cli.spec_names import form_error, is_reference, model_error
from fxmem.cli.specs.configs import unknown_setting_error
from fxmem.cli.specs.recipes import (
    Recipe,
    describe,
    from_own_code,
    from_timm,
    from_torchvision,
    import_library,
    importable,
)
from fxmem.errors import FxmemError, UsageError, linked_errors, one_line
from fxmem.records import json_reader
from fxmem.records.units import format_bytes
from fxmem.simulation.processes.process_guard import process_unchanged, without_network
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.stand_ins import hub_models
from fxmem.simulation.step.given import PackedWeights, ignore_moves, pack_weights

# --- running the constructor of a model, or a function that makes a batch, without weights ----------------------------


def construct(make: Callable[[], object]) -> tuple[object, Literal["meta", "cpu"], tuple[str, ...]]:
    """Call `make` under meta, or on the CPU if it reads values; return what it made, where, and notes.

    On the CPU in-place initialisers are left out, so that parameters stay as `torch.empty` made them and the operating
    system never backs them with memory; then the module's parameters and buffers move to meta too.

    What `make` raises for reasons of its own goes through. The process is unchanged, as by `process_unchanged`.
    """
    try:
        with process_unchanged(), _DeviceMode("meta"), _register_on_meta(), ignore_moves():
            made = make()
    except Exception as error:
        # Torch names the device in every message of a constructor that failed for being on meta.
        if not any("meta" in str(link).lower() for link in linked_errors(error)):
            raise
        reason = one_line(error)
    else:
        if isinstance(made, torch.nn.Module) and any(not p.is_meta for p in made.parameters()):
            return made, "cpu", ("its parameters were allocated before fxmem saw the module",)
        return made, "meta", ()
    with process_unchanged(), _DeviceMode("cpu"), _SkipInitialisers(), ignore_moves():
        made = make()
    if isinstance(made, torch.nn.Module):
        _move_to_meta(made)
    return made, "cpu", (f"built on the CPU and moved to meta, because its constructor reads values ({reason})",)


def construct_with_values(make: Callable[[], object]) -> object:
    """Call `make` on the CPU, values and all. The process is unchanged, as by `process_unchanged`."""
    with process_unchanged(), _DeviceMode("cpu"), ignore_moves():
        return make()


class _DeviceMode(TorchFunctionMode):
    """`torch.device(device)`, which holds also where the code inside sets another default device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.device:
            return func(*args, **(kwargs or {}))


class _SkipInitialisers(TorchFunctionMode):
    """Leaves out in-place writes to parameters: they set values, and touching the pages is what costs memory."""

    _WRITES = re.compile(
        "(add|bernoulli|cauchy|clamp|constant|copy|div|erfinv|exponential|fill|kaiming_uniform|"
        "log_normal|mul|normal|ones|random|sub|uniform|zero|zeros)_"
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._WRITES.fullmatch(getattr(func, "__name__", "")):
            written = args[0] if args else kwargs.get("tensor")
            if isinstance(written, torch.nn.Parameter):
                return written
        return func(*args, **kwargs)


@contextlib.contextmanager
def _register_on_meta() -> Iterator[None]:
    """What a module registers goes to meta: `torch.Tensor(n)` and `torch.from_numpy` know no default device."""
    moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def move(
        module: torch.nn.Module, name: str, tensor: torch.Tensor | None
    ) -> Any:  # what it returns is registered instead
        if tensor is None or tensor.is_meta or is_lazy(tensor):
            return None
        known = moved.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        moving = tensor.detach().to("meta")
        new = torch.nn.Parameter(moving, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moving
        moved[id(tensor)] = weakref.ref(tensor), new
        return new

    with register_module_parameter_registration_hook(move), register_module_buffer_registration_hook(move):
        yield


def _move_to_meta(module: torch.nn.Module) -> None:
    """What `module.to("meta")` does, but tied parameters stay tied."""
    with _register_on_meta():
        for part in module.modules():
            own: dict[str, torch.Tensor] = dict(part.named_parameters(recurse=False, remove_duplicate=False))
            own |= part.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in own.items():
                setattr(part, name, tensor)


# --- a transformers model from its configuration: the class's defaults or a local file, and settings on top -----------


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
        raise model_error("transformers", name, [each for each in dir(transformers) if known.fullmatch(each)])
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


# --- a model, built from its spec -------------------------------------------------------------------------------------


_COLLECTIONS = {"hf": from_transformers, "torchvision": from_torchvision, "timm": from_timm}
_WEIGHTS_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    packed: PackedWeights | None = None
    """What the weights take in the checkpoint, where it is quantised; the module has them unpacked."""

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """dtype of the first floating-point parameter; None without one."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse `["a=1", "b=true", "c=[1,2]", "d.e=text"]` into a dict.

    A value is JSON if it parses as such, else a Python literal, else text.

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
        channels_last: Lays 4-D parameters and buffers out as `torch.channels_last`, 5-D ones as
            `torch.channels_last_3d`.
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
        collection, colon, name = spec.partition(":")
        if colon and collection in _COLLECTIONS:
            with without_network(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of initial weights, which do not concern a model without any
                made = _build(_COLLECTIONS[collection](name, settings), spec, settings, device)
            if collection == "hf" and mode == "train":
                for part in made.module.modules():  # decoders hold configs of their own
                    if getattr(getattr(part, "config", None), "use_cache", False):
                        typing.cast(Any, part.config).use_cache = False
        elif is_reference(spec):
            with importable(spec):
                made = _build(from_own_code(spec, settings), spec, settings, device)
        else:
            raise form_error(spec)
        module = made.module
        module.train(mode == "train")
        if weights_dtype is not None:
            module.to(_WEIGHTS_DTYPES[weights_dtype])
        if channels_last:
            _lay_channels_last(module)
    return BuiltModel(module, spec, settings, mode, made.built_on, channels_last, made.notes, made.packed)


# --- making the module ------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """What a recipe made."""

    module: torch.nn.Module
    built_on: Literal["meta", "cpu"]
    notes: tuple[str, ...]
    packed: PackedWeights | None


def _build(recipe: Recipe, spec: str, settings: Mapping[str, Any], device: Literal["meta", "cpu"]) -> _Made:
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
        is_first = isinstance(module, tuple | list) and isinstance(next(iter(module), None), torch.nn.Module)
        first = " whose first item is one: return the module alone" if is_first else ""
        raise UsageError(f"{spec} returned {describe(module)}{first}; expected a torch.nn.Module")
    packed = None if recipe.quantization is None else pack_weights(module, recipe.quantization)
    if packed is not None:
        size = "" if packed.nbytes is None else f" and take {format_bytes(packed.nbytes)}"
        notes += (f"the checkpoint's weights are packed ({packed.method}){size}; here they are unpacked",)
    return _Made(module, built_on, recipe.notes + notes, packed)


def _construction_error(error: BaseException, recipe: Recipe, spec: str, settings: Mapping[str, Any]) -> FxmemError:
    if any(isinstance(link, ConnectionError) for link in linked_errors(error)):
        alone = "fxmem builds models from their configuration alone"
        return UsageError(f"{spec} wanted to download something ({one_line(error)}); {alone}")
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    if unexpected is not None and unexpected[1] in settings:
        return unknown_setting_error(spec, unexpected[1], recipe.known_settings())
    return user_code_error(error, spec)


def _lay_channels_last(module: torch.nn.Module) -> None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor) and tensor.dim() in formats:
            tensor.data = tensor.data.contiguous(memory_format=formats[tensor.dim()])


# --- settings and messages --------------------------------------------------------------------------------------------


def _parse_value(text: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text
