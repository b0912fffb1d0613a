"""A model, built from its spec."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from fxmem.cli.spec_names import form_error, is_reference
from fxmem.cli.specs.configs import unknown_setting_error
from fxmem.cli.specs.construction import construct, construct_with_values
from fxmem.cli.specs.hf_config import from_transformers
from fxmem.cli.specs.recipes import Recipe, describe, from_own_code, from_timm, from_torchvision
from fxmem.cli.specs.references import importable
from fxmem.errors import FxmemError, UsageError, linked_errors, one_line
from fxmem.records.units import format_bytes
from fxmem.simulation.processes.process_guard import process_unchanged, without_network
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.given import PackedWeights, pack_weights

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
