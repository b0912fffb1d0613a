"""How the zoo calls a model: the command line's default inputs where they say enough, else what its processor would make."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fxmem.errors import FxmemError
from fxmem.inputs import TensorSpec, default_inputs, make_inputs
from fxmem.sources import BuiltModel

__all__ = ["BATCH", "make_calls"]

BATCH = 2
"""Images, clips, pairs of frames or sequences in a step."""
TOKENS = 512
IMAGE = 224
FRAMES = 200
"""Of a spectrogram."""
SAMPLES = 16_000 * 2
"""Of sound, at 16 kHz."""

Call = tuple[tuple[Any, ...], dict[str, Any]]

_LENGTHS: Mapping[str, int] = {
    # Without their kernels' packages these recurrences are Python loops over tokens.
    **dict.fromkeys(
        (
            *("MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "JambaForSequenceClassification"),
            *("ZambaForCausalLM", "ZambaForSequenceClassification", "RwkvForCausalLM", "xLSTMForCausalLM"),
            *("KimiLinearForCausalLM", "BailingHybridForCausalLM", "RecurrentGemmaForCausalLM"),
        ),
        16,
    ),
}


def make_calls(built: BuiltModel) -> Iterator[tuple[str, Call]]:
    """Ways to call a model, on meta, the fullest first, each with what is left out; the next is for when one is refused as data-dependent."""
    if ".detection." in type(built.module).__module__ and built.spec.startswith("torchvision:"):
        yield "", _torchvision_detection(built)
        return
    if not built.spec.startswith("hf:"):
        yield "", make_inputs(default_inputs(built, BATCH), weights_dtype=built.weights_dtype)
        return
    full = _transformers(built)
    yield "", full
    args, kwargs = full
    targets = {name for name in kwargs if name.endswith("labels")}
    if targets:
        yield "its own loss", (args, {name: value for name, value in kwargs.items() if name not in targets})


# --- transformers -----------------------------------------------------------------------------------------------------------


def _transformers(built: BuiltModel) -> Call:
    takes = inspect.signature(built.module.forward).parameters
    makers: tuple[Callable[[BuiltModel], dict[str, Any] | None], ...] = (_by_class, _detection, _segmentation, _image_and_text, _usual, _by_argument)
    found = next(call for maker in makers if (call := maker(built)) is not None)
    return (), {name: value for name, value in found.items() if name in takes}


def _usual(built: BuiltModel) -> dict[str, Any] | None:
    """What the command line takes."""
    try:
        specs = default_inputs(built, BATCH)
    except FxmemError:
        return None
    tokens = _LENGTHS.get(type(built.module).__name__, TOKENS)
    return make_inputs([_shortened(spec, tokens) for spec in specs], weights_dtype=built.weights_dtype)[1]


def _shortened(spec: TensorSpec, tokens: int) -> TensorSpec:
    is_text = spec.dtype == "int64" and len(spec.shape) == 2
    return TensorSpec((spec.shape[0], min(spec.shape[1], tokens)), spec.dtype, spec.name) if is_text else spec


def _numbers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of some fields that a config, or a part of it, has."""
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "audio_config", "encoder_config", "encoder", "backbone_config"))]
    for part, name in itertools.product(parts, names):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _image_size(config: Any) -> tuple[int, int]:
    match _field(config, "image_size", default=IMAGE):
        case int() as size:
            return size, size
        case [int() as height, int() as width]:
            return height, width
        case {"height": int() as height, "width": int() as width}:
            return height, width
    return IMAGE, IMAGE


def _detection(built: BuiltModel) -> dict[str, Any] | None:
    kind = type(built.module).__name__
    if not kind.endswith("ForObjectDetection") and kind not in ("RfDetrForInstanceSegmentation", "DetrForSegmentation"):
        return None
    config: Any = built.module.config
    size = _image_size(config) if kind.startswith(("Yolos", "RfDetr")) else (640, 640)
    call: dict[str, Any] = {"pixel_values": _numbers(BATCH, 3, *size)}
    if built.mode == "train":
        labels = [_boxes(number, classes=max(2, config.num_labels), corners=False) for number in range(1, BATCH + 1)]
        if kind.endswith("Segmentation"):
            for number, one in enumerate(labels, 1):
                one["masks"] = _numbers(number, *size)
        call["labels"] = labels
    return call


def _segmentation(built: BuiltModel) -> dict[str, Any] | None:
    kind = type(built.module).__name__
    if not kind.endswith(("ForUniversalSegmentation", "ForInstanceSegmentation", "ForSemanticSegmentation")):
        return None
    size = _image_size(built.module.config)
    frames = _field(built.module.config, "num_frames") if kind.startswith("Videomt") else None
    call: dict[str, Any] = {"pixel_values": _numbers(BATCH, *((frames,) if frames else ()), 3, *size)}
    if kind.startswith("OneFormer"):
        call["task_inputs"] = _ids(BATCH, 77)
    if built.mode == "train":
        if kind.endswith("ForSemanticSegmentation"):
            call["labels"] = _ids(BATCH, *size)
        else:
            call["mask_labels"] = [_numbers(number, *size) for number in range(1, BATCH + 1)]
            call["class_labels"] = [torch.arange(number) for number in range(1, BATCH + 1)]
    return call


def _image_and_text(built: BuiltModel) -> dict[str, Any] | None:
    """An image's placeholders in the text, as many as it has features; None for a model that has another way to see."""
    module: Any = built.module
    config, takes = module.config, inspect.signature(module.forward).parameters
    image = next((number for name in ("image_token_id", "image_token_index") if isinstance(number := getattr(config, name, None), int)), None)
    if image is None or not {"input_ids", "pixel_values"} <= takes.keys() or not hasattr(module, "get_image_features"):
        return None
    seen = (
        _as_patches(config) if "image_grid_thw" in takes else {"pixel_values": _numbers(BATCH, _field(config, "num_channels", default=3), *_image_size(config))}
    )
    try:
        with torch.no_grad():
            features = module.get_image_features(**seen)
    except Exception:
        return None
    places = _rows(getattr(features, "pooler_output", features)) // BATCH
    text = torch.ones(BATCH, places + 32, dtype=torch.int64)
    text[:, 1 : 1 + places] = image
    call = {**seen, "input_ids": text, "attention_mask": torch.ones_like(text)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in takes:
            call[name] = (text == image).to(torch.int64)
    if built.mode == "train":
        call["labels"] = torch.ones_like(text)
    return call


def _rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return features.shape[:-1].numel()
    return sum(map(_rows, features))


def _as_patches(config: Any) -> dict[str, Any]:
    """An image as the Qwen-VL family sees it: its patches in one row, and how many of them stand in time, height and width."""
    high = wide = 16
    patch, frames, channels = (_field(config, name, default=value) for name, value in (("patch_size", 14), ("temporal_patch_size", 1), ("in_channels", 3)))
    return {
        "pixel_values": _numbers(BATCH * high * wide, channels * frames * patch * patch),
        "image_grid_thw": torch.tensor([[1, high, wide]] * BATCH),
    }


def _by_argument(built: BuiltModel) -> dict[str, Any]:
    """From the names of what forward takes."""
    module: Any = built.module
    config, kind = module.config, type(module).__name__
    takes = inspect.signature(module.forward).parameters
    call: dict[str, Any] = {}
    if "pixel_values" in takes:
        frames = _field(config, "num_frames") if "Video" in kind else None
        call["pixel_values"] = _numbers(BATCH, *((frames,) if frames else ()), _field(config, "num_channels", default=3), *_image_size(config))
    elif "pixel_values_videos" in takes and "input_ids" not in takes:
        call["pixel_values_videos"] = _numbers(BATCH, _field(config, "num_frames", "frames_per_clip", default=16), 3, *_image_size(config))
    elif "input_values" in takes:
        call["input_values"] = _numbers(BATCH, SAMPLES)
    elif "input_features" in takes:
        mel = _field(config, "feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim", "num_features", default=80)
        call["input_features"] = _numbers(BATCH, FRAMES, mel)
    if "input_ids" in takes:
        call["input_ids"] = _ids(BATCH, TOKENS)
    if "decoder_input_ids" in takes:
        call["decoder_input_ids"] = _ids(BATCH, 32)
    if built.mode == "train" and "labels" in takes:
        if kind.endswith(("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")):
            call["labels"] = _ids(BATCH)
        elif kind.endswith("ForCTC"):
            call["labels"] = torch.ones(BATCH, 12, dtype=torch.int64)
        elif "decoder_input_ids" in takes:
            call["labels"] = _ids(BATCH, 32)
        elif "input_ids" in call:
            call["labels"] = _ids(BATCH, TOKENS)
    return call


def _by_class(built: BuiltModel) -> dict[str, Any] | None:
    """What nothing but the class gives away."""
    del built
    return None


# --- boxes ------------------------------------------------------------------------------------------------------------------
def _boxes(number: int, *, classes: int, corners: bool) -> dict[str, torch.Tensor]:
    """Some objects in an image: centres and sizes in 0..1, or corners in pixels, with their classes."""
    start = torch.arange(number, dtype=torch.float32)[:, None] * 8
    boxes = torch.cat([start, start, start + 64, start + 96], 1) if corners else torch.full((number, 4), 0.25)
    key = "labels" if corners else "class_labels"
    return {"boxes": boxes, key: torch.arange(number) % classes}


def _torchvision_detection(built: BuiltModel) -> Call:
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
