"""Presets that change a model before its step: low-rank adapters (peft) and quantised weights (torchao)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from fxmem._torch import common as torch_common
from fxmem.errors import EnvironmentLacksError, UsageError, closest, one_line

_LORA: Final[dict[str, Callable[[str], Any]]] = {"r": int, "alpha": float, "dropout": float, "target": str}


def add_lora(model: nn.Module, text: str) -> tuple[nn.Module, str]:
    """Freeze a model and put low-rank adapters beside its linear layers, in place; return it and a note.

    Args:
        model: on meta.
        text: `r=8`, with `alpha=16`, `dropout=0.1` and `target=q_proj+v_proj` after commas. Without a target peft
            chooses for the architectures that it knows; of others it is every linear layer but the last.

    Raises:
        UsageError: no such option, value or target.
        EnvironmentLacksError: peft is not installed.
    """
    options = _parse_lora(text)
    peft = _import("peft", "--lora")
    targets = options["target"].split("+") if "target" in options else _choose_targets(peft, model)
    settings = {"r": options.get("r", 8), "lora_dropout": options.get("dropout", 0.0), "target_modules": targets}
    if "alpha" in options:
        settings["lora_alpha"] = options["alpha"]
    try:
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            adapted = peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    except ValueError as error:
        raise UsageError(f"--lora {text}: {one_line(error)}") from error
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    layers = sum("lora_A" in name for name in trained)
    return adapted, f"LoRA of rank {settings['r']} in {layers} layers (peft); all other parameters are frozen"


def quantize_weights(model: nn.Module, kind: str) -> str:
    """Quantise and freeze the weights of a model's linear layers in place (torchao); return a note.

    Args:
        model: on meta.
        kind: `int8`, a scale for each row; `int4`, groups of 128 in the packing of tinygemm, whose kernel torch itself
            has, for inference; `nf4`, blocks of 64 whose scales are quantised in blocks of 256, and a language model's
            head is left as it is, as QLoRA does; `fp8`, e4m3 with a scale for each row, for inference.

    Raises:
        UsageError: weights that cannot be quantised so.
        EnvironmentLacksError: torchao is not installed.
    """
    quantization = _import("torchao.quantization", "--quantize")
    head = getattr(model, "get_output_embeddings", lambda: None)() if kind == "nf4" else None
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    try:
        with warnings.catch_warnings(action="ignore"):
            what = _quantize(quantization, kind, model, layers)
    except (AssertionError, ValueError) as error:
        remedy = "; --weights bf16 casts the model first" if kind == "int4" else ""
        raise UsageError(f"--quantize {kind}: {one_line(error)}{remedy}") from error
    for layer in layers:
        layer.weight.requires_grad_(False)
    extent = "but for the head" if head else "the head included"
    return f"the weights of {len(layers)} linear layers are {kind} and frozen (torchao's {what}), {extent}"


def _quantize(torchao: Any, kind: str, model: nn.Module, layers: list[nn.Linear]) -> str:
    """Quantise weights of a kind in place; return what of torchao did it.

    The plain packing of `int4` needs kernels of another package. Whether the card has tinygemm's is asked of a driver,
    which need not be here: it takes compute capability 8.0.
    """
    if kind == "nf4":
        for layer in layers:
            layer.weight = nn.Parameter(torchao.NF4Tensor.from_tensor(layer.weight, 64, 256), requires_grad=False)
        return "NF4Tensor"
    if kind == "int4":
        with torch_common.patch(torch.cuda, "get_device_capability", lambda _: lambda *_: (8, 0)):
            torchao.quantize_(model, torchao.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))
        return "Int4WeightOnlyConfig, packed in tiles"
    name = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[kind]
    torchao.quantize_(model, getattr(torchao, name)())
    return name


def library_optimizer(library: str, name: str) -> Any:
    """The optimizer class of torchao or bitsandbytes.

    Raises:
        UsageError: the library has none of this name.
        EnvironmentLacksError: it is not installed.
    """
    found = _import({"bnb": "bitsandbytes"}.get(library, library) + ".optim", f"--optimizer {library}:{name}")
    classes = {
        key.lower(): value
        for key, value in vars(found).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and not key.startswith("_")
    }
    if name.lower() not in classes:
        known = [each.__name__ for each in classes.values()]
        raise UsageError(f"{library} has no optimizer {name!r}{closest(name, known)}; it has {', '.join(known)}")
    return classes[name.lower()]


def _parse_lora(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for each in text.split(","):
        key, equals, value = (part.strip() for part in each.partition("="))
        if key not in _LORA or not equals:
            raise UsageError(f"expected --lora like r=8,alpha=16,dropout=0.1,target=q_proj+v_proj, got {text!r}")
        try:
            options[key] = _LORA[key](value)
        except ValueError as error:
            raise UsageError(f"expected a number for {key} in --lora {text!r}, got {value!r}") from error
    if options.get("r", 1) < 1:
        raise UsageError(f"expected --lora of a rank of at least 1, got {text!r}")
    return options


def _choose_targets(peft: Any, model: nn.Module) -> list[str] | None:
    known = getattr(peft.utils, "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", {})
    if getattr(getattr(model, "config", None), "model_type", None) in known:
        return None
    linear = [name for name, module in model.named_modules() if name and isinstance(module, nn.Linear)]
    if not linear:
        raise UsageError("expected a model with linear layers for --lora; name its layers with target=")
    return linear[:-1] or linear


def _import(module: str, what: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        wanted = "'fxmem[zoo]'" if package == "peft" else package
        raise EnvironmentLacksError(f"{what} needs {package}: pip install {wanted}") from error
