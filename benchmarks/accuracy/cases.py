"""The steps that are measured on a card and predicted without one: which they are, and how each is built.

A case is plain data and travels in the JSON beside what was measured, so that a prediction made years later is of the
same step. Families: `torchvision`, `timm` and `hf` are models; `ops` are single operators, whose logs show every buffer
a kernel takes; `context` is what a process takes of the card beside the allocator's segments.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import fxmem
from benchmarks.accuracy.planned import PLANNED, of_any_size, plan_of
from fxmem.cli.specs import build_model
from fxmem.simulation.step.step import OptimizerSpec

__all__ = ["Built", "Case", "build", "every_case", "kernel_settings", "plan_for"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One step and the settings it runs under."""

    family: Literal["torchvision", "timm", "hf", "ops", "context"]
    model: str
    """Name within its family."""
    inputs: Mapping[str, tuple[Shape, int | None]] = field(default_factory=dict)
    """By argument: the shape, and for integers the number below which they lie; None for floating-point numbers."""
    kw: Mapping[str, Any] = field(default_factory=dict)
    """What the factory is called with, or the config's fields."""
    mode: Literal["train", "infer"] = "train"
    optimizer: str = "adamw"
    """`adamw`, `adam`, `sgd`, `sgd-momentum`, `adamw-fused`, `adamw-forloop`."""
    precision: Literal["bf16"] | None = None
    """Autocast."""
    weights: Literal["bf16"] | None = None
    """dtype the model is cast to."""
    channels_last: bool = False
    tf32: bool = True
    """For convolutions, as `torch.backends.cudnn.allow_tf32`."""
    deterministic: bool = False
    """As `torch.backends.cudnn.deterministic`."""
    grad_checkpointing: bool = False
    """The model's own checkpointing of blocks."""
    plan: str = ""
    """Name of a plan in benchmarks/accuracy/plans whose checkpoints it has; none if empty."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Case:
        """A case from its JSON. Raises TypeError for a field this version does not know: it would be another step."""
        inputs = {name: (tuple(shape), high) for name, (shape, high) in fields.get("inputs", {}).items()}
        return cls(**{**fields, "inputs": inputs})

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, what is at its default left out."""
        always = ("family", "model", "inputs", "kw")
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name in always or getattr(self, f.name) != f.default
        }

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer as fxmem takes it."""
        return {"adamw-fused": "adamw:fused", "adamw-forloop": "adamw:forloop"}.get(self.optimizer, self.optimizer)

    @property
    def is_model(self) -> bool:
        """Whether it is the training or inference step of a model."""
        return self.family in ("torchvision", "timm", "hf")


# --- which ------------------------------------------------------------------------------------------------------------


def _images(batch: int, size: int = 224) -> dict[str, tuple[Shape, int | None]]:
    return {"x": ((batch, 3, size, size), None)}


def _tokens(batch: int, length: int) -> dict[str, tuple[Shape, int | None]]:
    return {"input_ids": ((batch, length), 1000), "labels": ((batch, length), 1000)}


_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_MIXTRAL = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8}
_GEMMA = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_SPEECH: dict[str, tuple[Shape, int | None]] = {
    "input_features": ((4, 80, 3000), None),
    "decoder_input_ids": ((4, 64), 1000),
    "labels": ((4, 64), 1000),
}
_T5 = {"decoder_start_token_id": 0, "pad_token_id": 0}

_TRANSFORMERS: dict[str, Case] = {
    "gpt2": Case("hf", "GPT2LMHeadModel", _tokens(8, 512)),
    "bert": Case("hf", "BertForMaskedLM", _tokens(16, 256)),
    "t5": Case("hf", "T5ForConditionalGeneration", _tokens(8, 256), _T5),
    "opt": Case("hf", "OPTForCausalLM", _tokens(4, 512)),
    "llama-8b-2layers": Case("hf", "LlamaForCausalLM", _tokens(2, 2048), {**_LLAMA, "num_hidden_layers": 2}),
    "qwen3-8layers": Case("hf", "Qwen3ForCausalLM", _tokens(4, 1024), {**_QWEN, "num_hidden_layers": 8}),
    "mixtral-2layers": Case("hf", "MixtralForCausalLM", _tokens(4, 512), {**_MIXTRAL, "num_hidden_layers": 2}),
    "gemma2-4layers": Case("hf", "Gemma2ForCausalLM", _tokens(4, 512), {**_GEMMA, "num_hidden_layers": 4}),
    "whisper": Case("hf", "WhisperForConditionalGeneration", _SPEECH),
}
_AT_INFERENCE = ("gpt2", "bert", "t5", "opt", "llama-8b-2layers", "qwen3-8layers")

_VISION = (
    *(
        "resnet18",
        "resnet50",
        "resnet152",
        "vgg16",
        "densenet121",
        "mobilenet_v3_large",
        "efficientnet_b0",
        "convnext_tiny",
    ),
    *("googlenet", "vit_b_16", "swin_t", "regnet_y_8gf", "maxvit_t"),
)
_TIMM = (
    *("vit_base_patch16_224", "swin_base_patch4_window7_224", "convnext_base", "mixer_b16_224", "coatnet_0_rw_224"),
    *("deit3_small_patch16_224", "eva02_tiny_patch14_224", "efficientvit_b1", "tf_efficientnetv2_s"),
)
_OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw-fused", "adamw-forloop")

_CONVOLUTIONS = (
    *((3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (256, 128, 1, 1, 56), (128, 128, 3, 2, 56)),
    *((512, 512, 3, 1, 14), (512, 2048, 1, 1, 7), (64, 64, 3, 1, 224), (128, 128, 3, 1, 112), (512, 512, 3, 1, 28)),
)
"""Channels in and out, kernel, stride and image size: layers of ResNet-50 and VGG-16."""


def every_case() -> dict[str, Case]:
    """All cases by name, `family/model/what is special`."""
    unplanned = {
        "context": Case("context", "context"),
        **dict(_ops()),
        **dict(_vision()),
        **dict(_timm()),
        **dict(_transformers()),
    }
    with_plans = {
        f"{each.case}-plan-{each.application.value}": dataclasses.replace(unplanned[each.case], plan=each.name)
        for each in PLANNED
    }
    return unplanned | with_plans


def _vision() -> Iterator[tuple[str, Case]]:
    def case(model: str, batch: int = 32, **settings: Any) -> Case:
        return Case("torchvision", model, _images(batch), **settings)

    for model in _VISION:
        yield f"tv/{model}/train", case(model)
    yield "tv/inception_v3/train", Case("torchvision", "inception_v3", _images(32, 299))
    yield (
        "tv/deeplabv3_resnet50/train",
        Case("torchvision", "deeplabv3_resnet50", _images(4, 320), {"weights_backbone": None}),
    )
    yield "tv/r3d_18/train", Case("torchvision", "r3d_18", {"x": ((4, 3, 16, 112, 112), None)})
    for model in ("resnet50", "vgg16", "densenet121", "vit_b_16", "swin_t", "convnext_tiny"):
        yield f"tv/{model}/infer", case(model, mode="infer")
        yield f"tv/{model}/train-bf16-autocast", case(model, precision="bf16")
    for model in ("resnet50", "vgg16", "mobilenet_v3_large", "convnext_tiny"):
        yield f"tv/{model}/train-channels_last", case(model, channels_last=True)
        yield f"tv/{model}/train-bf16-channels_last", case(model, channels_last=True, precision="bf16")
    for model in ("resnet50", "vgg16"):
        yield f"tv/{model}/train-notf32", case(model, tf32=False)
        yield f"tv/{model}/train-deterministic", case(model, deterministic=True)
        yield f"tv/{model}/train-b8", case(model, 8)
        yield f"tv/{model}/train-b64", case(model, 64)
    for name in _OPTIMIZERS:
        yield f"tv/resnet50/train-{name}", case("resnet50", optimizer=name)
        yield f"tv/vit_b_16/train-{name}", case("vit_b_16", 16, optimizer=name)


def _timm() -> Iterator[tuple[str, Case]]:
    for model in _TIMM:
        yield f"timm/{model}/train", Case("timm", model, _images(16))
    yield f"timm/{_TIMM[0]}/train-checkpointed", Case("timm", _TIMM[0], _images(16), grad_checkpointing=True)


def _transformers() -> Iterator[tuple[str, Case]]:
    for name, case in _TRANSFORMERS.items():
        yield f"hf/{name}/train-fp32", case
        yield f"hf/{name}/train-bf16-weights", dataclasses.replace(case, weights="bf16")
        yield f"hf/{name}/train-bf16-autocast", dataclasses.replace(case, precision="bf16")
    for name in _AT_INFERENCE:
        yield f"hf/{name}/infer-bf16-weights", dataclasses.replace(_TRANSFORMERS[name], weights="bf16", mode="infer")
    for name in ("gpt2", "llama-8b-2layers"):
        case = dataclasses.replace(_TRANSFORMERS[name], weights="bf16")
        yield (
            f"hf/{name}/train-bf16-eager-attention",
            dataclasses.replace(case, kw={**case.kw, "attn_implementation": "eager"}),
        )
        yield f"hf/{name}/train-bf16-checkpointed", dataclasses.replace(case, grad_checkpointing=True)


def _ops() -> Iterator[tuple[str, Case]]:
    for dtype in ("fp32", "fp32-notf32", "bf16", "fp16"):
        for channels_last in (False, True):
            kw = {"layers": _CONVOLUTIONS, "dtype": dtype.partition("-")[0]}
            layout = "nhwc" if channels_last else "nchw"
            yield (
                f"ops/conv-{dtype}-{layout}",
                Case("ops", "convs", kw=kw, tf32=dtype != "fp32-notf32", channels_last=channels_last),
            )
    for dtype in ("fp32", "bf16"):
        yield f"ops/misc-{dtype}", Case("ops", "misc", kw={"dtype": dtype})


# --- how --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A model and the arguments of its step."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build(case: Case, device: Literal["meta", "cpu"], *, tiny: bool = False, unplanned: bool = False) -> Built:
    """The model of a case in its mode and the arguments of its step.

    Args:
        case: of a model's family. device: `meta` for a prediction, `cpu` for values. tiny: a batch of two, short texts,
        one layer where the config has `num_hidden_layers`; the same code in seconds on a CPU. A plan is made for it
        anew. unplanned: without its plan, if it has one.
    """
    module = build_model(
        f"{case.family}:{case.model}",
        _settings(case, tiny),
        mode=case.mode,
        weights_dtype=case.weights,
        channels_last=case.channels_last,
        device=device,
    ).module
    kind: Any = module
    if case.family == "hf":
        kind.config.use_cache = False
        for key in _SET_LATER & case.kw.keys():
            setattr(kind.config, key, case.kw[key])
    if case.grad_checkpointing and case.family == "timm":
        kind.set_grad_checkpointing(True)
    elif case.grad_checkpointing:
        kind.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = {name: _input(case, shape, high, device, tiny) for name, (shape, high) in case.inputs.items()}
    args, kwargs = ((), inputs) if case.family == "hf" else (tuple(inputs.values()), {})
    built = Built(module, args, kwargs)
    if case.plan and not unplanned:
        fxmem.checkpoint(module, plan_for(case, built, tiny=tiny))
    return built


def plan_for(case: Case, built: Built, *, tiny: bool = False) -> fxmem.Plan:
    """The plan of a case; of one that is tiny, whose modules and calls are others, a plan made anew, of the same
    application."""
    kept = plan_of(case.plan)
    return of_any_size(built.module, built.args, built.kwargs, kept.application) if tiny else kept


# What transformers' models read from their config although the config class does not declare it, so that it is no
# setting.
_SET_LATER = frozenset({"decoder_start_token_id"})


def _settings(case: Case, tiny: bool) -> dict[str, Any]:
    # fxmem itself builds without weights and refuses a setting about them.
    settings = {key: value for key, value in case.kw.items() if key not in {"weights", "weights_backbone", *_SET_LATER}}
    if tiny and case.family == "hf":
        smaller = {"num_hidden_layers": 1, "vocab_size": 2000}
        settings |= {key: value for key, value in smaller.items() if key in settings}
    return settings


def _input(case: Case, shape: Shape, high: int | None, device: str, tiny: bool) -> torch.Tensor:
    if tiny:
        shape = (2, min(shape[1], 32)) if len(shape) == 2 else (2, *shape[1:])
    if high is not None:
        return torch.randint(high, shape, device=device)
    value = torch.randn(shape, device=device, dtype=torch.bfloat16 if case.weights == "bf16" else torch.float32)
    return value.to(memory_format=torch.channels_last) if case.channels_last and value.dim() == 4 else value


@contextlib.contextmanager
def kernel_settings(case: Case) -> Iterator[None]:
    """The global settings a case runs under, put back at the end."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = case.tf32, case.deterministic
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before
