"""What the zoo consists of: each architecture by its model spec, made small where depth only repeats a layer, and how it is called.

torchvision: all of `list_models()`. timm: the first architecture of each module. transformers: the classes listed here, with
the widths of their configs' defaults and two layers.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxmem.inputs import TensorSpec, default_inputs, make_inputs
from fxmem.sources import BuiltModel

__all__ = ["COLLECTIONS", "QUICK", "Architecture", "every_architecture", "make_call"]

COLLECTIONS = ("torchvision", "timm", "hf")
BATCH = 8
"""Images, clips, pairs of frames or sequences in a step."""
TOKENS = 512

TWO_LAYERS: Mapping[str, Any] = {"num_hidden_layers": 2}
TWO_AND_TWO: Mapping[str, Any] = {"encoder_layers": 2, "decoder_layers": 2}

TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    # causal language models
    "GPT2LMHeadModel": TWO_LAYERS,
    "GPTJForCausalLM": TWO_LAYERS,
    "GPTNeoXForCausalLM": TWO_LAYERS,
    "OPTForCausalLM": TWO_LAYERS,
    "BloomForCausalLM": TWO_LAYERS,
    "MptForCausalLM": TWO_LAYERS,
    "FalconForCausalLM": TWO_LAYERS,
    "PhiForCausalLM": TWO_LAYERS,
    "Phi3ForCausalLM": TWO_LAYERS,
    "StableLmForCausalLM": TWO_LAYERS,
    "CohereForCausalLM": TWO_LAYERS,
    "GraniteForCausalLM": TWO_LAYERS,
    "Olmo2ForCausalLM": TWO_LAYERS,
    "LlamaForCausalLM": TWO_LAYERS,
    "MistralForCausalLM": TWO_LAYERS,
    "MixtralForCausalLM": TWO_LAYERS,
    "Qwen2ForCausalLM": TWO_LAYERS,
    "Qwen3ForCausalLM": TWO_LAYERS,
    "Qwen3MoeForCausalLM": TWO_LAYERS,
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "GptOssForCausalLM": TWO_LAYERS,
    "Gemma2ForCausalLM": TWO_LAYERS,
    "Gemma3ForCausalLM": TWO_LAYERS,
    "MambaForCausalLM": TWO_LAYERS,
    "Mamba2ForCausalLM": TWO_LAYERS,
    # masked language models
    "BertForMaskedLM": TWO_LAYERS,
    "RobertaForMaskedLM": TWO_LAYERS,
    "XLMRobertaForMaskedLM": TWO_LAYERS,
    "DistilBertForMaskedLM": TWO_LAYERS,
    "ElectraForMaskedLM": TWO_LAYERS,
    "AlbertForMaskedLM": TWO_LAYERS,
    "DebertaV2ForMaskedLM": TWO_LAYERS,
    "ModernBertForMaskedLM": TWO_LAYERS,
    "LongformerForMaskedLM": {"num_hidden_layers": 2, "attention_window": [512, 512]},
    "BigBirdForMaskedLM": TWO_LAYERS,
    # sequence to sequence
    "T5ForConditionalGeneration": {"num_layers": 2, "num_decoder_layers": 2},
    "BartForConditionalGeneration": TWO_AND_TWO,
    "MBartForConditionalGeneration": TWO_AND_TWO,
    "PegasusForConditionalGeneration": TWO_AND_TWO,
    "WhisperForConditionalGeneration": TWO_AND_TWO,
    # vision
    "ViTForImageClassification": TWO_LAYERS,
    "BeitForImageClassification": TWO_LAYERS,
    "Dinov2ForImageClassification": TWO_LAYERS,
    "SwinForImageClassification": {"depths": [2, 2], "num_heads": [3, 6]},
    "Swinv2ForImageClassification": {"depths": [2, 2], "num_heads": [3, 6]},
    "ConvNextForImageClassification": {"depths": [1, 1, 2, 1]},
    "SegformerForSemanticSegmentation": {},
    "DetrForObjectDetection": TWO_AND_TWO,
    "DPTForDepthEstimation": {},
    "ViTMAEForPreTraining": {"num_hidden_layers": 2, "decoder_num_hidden_layers": 2},
    "VideoMAEForVideoClassification": TWO_LAYERS,
    "CLIPModel": {"text_config.num_hidden_layers": 2, "vision_config.num_hidden_layers": 2},
    "SiglipModel": {"text_config.num_hidden_layers": 2, "vision_config.num_hidden_layers": 2},
    # audio
    "Wav2Vec2ForCTC": TWO_LAYERS,
    "HubertForCTC": TWO_LAYERS,
    "ASTForAudioClassification": TWO_LAYERS,
}

# What differs from the default inputs, by class. Length of a text is `TOKENS` unless said here.
_LENGTHS: Mapping[str, int] = {
    "MambaForCausalLM": 32,  # without the mamba-ssm package the recurrence is a Python loop over tokens
    "SiglipModel": 64,
    "CLIPModel": 77,
}
_IMAGE_SIZES: Mapping[str, int] = {"DetrForObjectDetection": 800, "SegformerForSemanticSegmentation": 512}
"""Of models whose config names none."""
_SECONDS_OF_SOUND = 5

QUICK = tuple(
    f"{collection}:{name}"
    for collection, names in {
        "torchvision": "resnet18 densenet121 googlenet vit_b_16 swin_t lraspp_mobilenet_v3_large r3d_18 raft_small fasterrcnn_resnet50_fpn",
        "timm": "convit_base coat_lite_medium levit_128 sequencer2d_l mambaout_base",
        "hf": "GPT2LMHeadModel LlamaForCausalLM MixtralForCausalLM BertForMaskedLM T5ForConditionalGeneration DetrForObjectDetection Wav2Vec2ForCTC",
    }.items()
    for name in names.split()
)
"""A fixed sample: one of each kind."""


@dataclass(frozen=True)
class Architecture:
    """One model: its spec, as `fxmem analyze` takes it, and the settings that make it small."""

    spec: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def every_architecture(collections: Collection[str] = COLLECTIONS) -> list[Architecture]:
    """The zoo, or those collections of it, each as its library lists it."""
    found: list[Architecture] = []
    if "torchvision" in collections:
        from torchvision.models import list_models

        found += [Architecture(f"torchvision:{name}") for name in list_models()]
    if "timm" in collections:
        import timm

        modules = [timm.list_models(module=module) for module in timm.list_modules()]
        found += [Architecture(f"timm:{name}") for name in dict.fromkeys(names[0] for names in modules if names)]
    if "hf" in collections:
        found += [Architecture(f"hf:{name}", settings) for name, settings in TRANSFORMERS.items()]
    return found


def make_call(built: BuiltModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one step, on meta: the command line's default inputs where they say enough."""
    kind = type(built.module).__name__
    if ".detection." in type(built.module).__module__ and built.spec.startswith("torchvision:"):
        return _detection(built)
    if kind in ("Wav2Vec2ForCTC", "HubertForCTC"):
        return _speech(built)
    if kind in _IMAGE_SIZES:
        return (), _images(kind, built.mode)
    specs = [_shortened(spec, _LENGTHS.get(kind, TOKENS)) for spec in default_inputs(built, BATCH)]
    return make_inputs(specs, weights_dtype=built.weights_dtype)


def _shortened(spec: TensorSpec, tokens: int) -> TensorSpec:
    is_text = spec.dtype == "int64" and len(spec.shape) == 2
    return TensorSpec((spec.shape[0], min(spec.shape[1], tokens)), spec.dtype, spec.name) if is_text else spec


def _speech(built: BuiltModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sound = torch.empty(BATCH, 16_000 * _SECONDS_OF_SOUND, device="meta")
    labels = torch.ones(BATCH, 12, dtype=torch.int64)
    return (), {"input_values": sound, **({"labels": labels} if built.mode == "train" else {})}


def _images(kind: str, mode: str) -> dict[str, Any]:
    size = _IMAGE_SIZES[kind]
    images = {"pixel_values": torch.empty(BATCH, 3, size, size, device="meta")}
    if mode == "infer":
        return images
    if kind == "DetrForObjectDetection":
        return {**images, "labels": [_boxes(number, classes=91, corners=False) for number in range(1, BATCH + 1)]}
    return {**images, "labels": torch.empty(BATCH, size, size, dtype=torch.int64, device="meta")}


def _boxes(number: int, *, classes: int, corners: bool) -> dict[str, torch.Tensor]:
    """Some objects in an image: centres and sizes in 0..1, or corners in pixels, with their classes."""
    start = torch.arange(number, dtype=torch.float32)[:, None] * 8
    boxes = torch.cat([start, start, start + 64, start + 96], 1) if corners else torch.full((number, 4), 0.25)
    key = "labels" if corners else "class_labels"
    return {"boxes": boxes, key: torch.arange(number) % classes}


def _detection(built: BuiltModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    size = 480
    images = [torch.empty(3, size, size, device="meta") for _ in range(BATCH)]
    if built.mode == "infer":
        return (images,), {}
    target: functools.partial[dict[str, torch.Tensor]] = functools.partial(_boxes, classes=90, corners=True)
    targets = [target(number) for number in range(1, BATCH + 1)]
    kind = type(built.module).__name__
    for number, one in enumerate(targets, 1):
        if kind == "MaskRCNN":
            one["masks"] = torch.empty(number, size, size, dtype=torch.uint8, device="meta")
        if kind == "KeypointRCNN":
            one["labels"] = torch.ones(number, dtype=torch.int64)
            one["keypoints"] = torch.empty(number, 17, 3, device="meta")
    return (images, targets), {}
