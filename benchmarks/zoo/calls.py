"""How the zoo calls a model: the command line's default inputs where they say enough, else what its processor would
make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import make_inputs
from benchmarks.lib import packages
from benchmarks.lib.parts import BATCH, FRAMES, TOKENS, field, ids, image_size, numbers
from benchmarks.zoo import multimodal
from fxmem.cli.specs import BuiltModel
from fxmem.cli.specs.inputs import TensorSpec, default_inputs
from fxmem.errors import FxmemError

__all__ = ["Way", "make_calls"]

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


@dataclass(frozen=True)
class Way:
    """A way to call a model, on meta."""

    call: Call
    left_out: str = ""
    """Of the step."""
    when_refused: bool = False
    """Whether it is for a model that raises in eager on what came before, not only for one whose step depends on
    data."""


def make_calls(built: BuiltModel) -> Iterator[Way]:
    """The fullest first, each for when the one before it does not work."""
    if ".detection." in type(built.module).__module__ and built.spec.startswith("torchvision:"):
        yield Way(_torchvision_detection(built))
        return
    if built.spec.partition(":")[0] in packages.PACKAGES:
        yield Way(packages.call(built))
        return
    if not built.spec.startswith("hf:"):
        yield Way(make_inputs(default_inputs(built, BATCH), weights_dtype=built.weights_dtype))
        return
    args, kwargs = _transformers(built)
    yield Way((args, kwargs))
    known = _with_ids(built, kwargs)
    yield Way((args, known))
    targets = {name for name in kwargs if name.endswith("labels")}
    if targets:
        yield Way((args, {name: value for name, value in known.items() if name not in targets}), "its own loss")
    text = {name for name in kwargs if name in _TEXT or name in targets}
    if {"input_ids"} < set(kwargs) and text < set(kwargs):
        texts = {"input_ids": ids(BATCH, TOKENS), "decoder_input_ids": ids(BATCH, 32), "labels": ids(BATCH, TOKENS)}
        if "decoder_input_ids" in kwargs:
            texts["labels"] = texts["decoder_input_ids"]
        if isinstance(labels := kwargs.get("labels"), torch.Tensor) and labels.dim() == 1:
            texts["labels"] = labels
        yield Way((args, {name: texts[name] for name in sorted(text & _WORDS)}), "its images or sound", True)


_WORDS = frozenset(("input_ids", "labels", "decoder_input_ids"))
_TEXT = _WORDS | {"attention_mask", "token_type_ids"}


def _with_ids(built: BuiltModel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """With values in the place of token ids on meta: one that stands for nothing else, and at the end of a text that
    which ends it."""
    config: Any = built.module.config
    end = field(config, "eos_token_id")

    def filled(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta or value.is_floating_point():
            return value
        if not name.endswith("input_ids"):
            return torch.ones(value.shape, dtype=value.dtype)
        text = torch.full(value.shape, _WORD, dtype=value.dtype)
        if isinstance(end, int):
            text[..., -1] = end
        return text

    return {name: filled(name, value) for name, value in kwargs.items()}


_WORD = 7
"""A token id that no configuration keeps for padding, or the beginning or end of a text."""


# --- transformers -----------------------------------------------------------------------------------------------------


def _transformers(built: BuiltModel) -> Call:
    takes = inspect.signature(built.module.forward).parameters
    makers: tuple[Callable[[BuiltModel], dict[str, Any] | None], ...] = (
        _by_class,
        _detection,
        _segmentation,
        multimodal.call,
        _usual,
        _by_argument,
    )
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


def _detection(built: BuiltModel) -> dict[str, Any] | None:
    kind = type(built.module).__name__
    if not kind.endswith("ForObjectDetection") and kind not in ("RfDetrForInstanceSegmentation", "DetrForSegmentation"):
        return None
    config: Any = built.module.config
    size = image_size(config) if kind.startswith(("Yolos", "RfDetr")) else (640, 640)
    call: dict[str, Any] = {"pixel_values": numbers(BATCH, 3, *size)}
    if built.mode == "train":
        labels = [_boxes(number, classes=max(2, config.num_labels), corners=False) for number in range(1, BATCH + 1)]
        if kind.endswith("Segmentation"):
            for number, one in enumerate(labels, 1):
                one["masks"] = numbers(number, *size)
        call["labels"] = labels
    return call


def _segmentation(built: BuiltModel) -> dict[str, Any] | None:
    kind = type(built.module).__name__
    if not kind.endswith(("ForUniversalSegmentation", "ForInstanceSegmentation", "ForSemanticSegmentation")):
        return None
    size = image_size(built.module.config)
    frames = field(built.module.config, "num_frames") if kind.startswith("Videomt") else None
    call: dict[str, Any] = {"pixel_values": numbers(BATCH, *((frames,) if frames else ()), 3, *size)}
    if kind.startswith("OneFormer"):
        call["task_inputs"] = ids(BATCH, 77)
    if built.mode == "train":
        if kind.endswith("ForSemanticSegmentation"):
            call["labels"] = ids(BATCH, *size)
        else:
            call["mask_labels"] = [numbers(number, *size) for number in range(1, BATCH + 1)]
            call["class_labels"] = [torch.arange(number) for number in range(1, BATCH + 1)]
    return call


def _by_argument(built: BuiltModel) -> dict[str, Any]:
    """From the names of what forward takes."""
    module: Any = built.module
    config, kind = module.config, type(module).__name__
    takes = inspect.signature(module.forward).parameters
    call: dict[str, Any] = {}
    if "pixel_values" in takes:
        frames = field(config, "num_frames") if "Video" in kind else None
        call["pixel_values"] = numbers(
            BATCH, *((frames,) if frames else ()), field(config, "num_channels", default=3), *image_size(config)
        )
    elif "pixel_values_videos" in takes and "input_ids" not in takes:
        call["pixel_values_videos"] = numbers(
            BATCH, field(config, "num_frames", "frames_per_clip", default=16), 3, *image_size(config)
        )
    elif "input_values" in takes:
        call["input_values"] = numbers(BATCH, SAMPLES)
    elif "input_features" in takes:
        mel = field(
            config,
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "num_mel_bins",
            "input_dim",
            "num_features",
            default=80,
        )
        call["input_features"] = numbers(BATCH, FRAMES, mel)
    if "input_ids" in takes:
        call["input_ids"] = ids(BATCH, TOKENS)
    if "decoder_input_ids" in takes:
        call["decoder_input_ids"] = ids(BATCH, 32)
    if built.mode == "train" and "labels" in takes:
        if kind.endswith(
            ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
        ):
            call["labels"] = ids(BATCH)
        elif kind.endswith("ForCTC"):
            call["labels"] = torch.ones(BATCH, 12, dtype=torch.int64)
        elif "decoder_input_ids" in takes:
            call["labels"] = ids(BATCH, 32)
        elif "input_ids" in call:
            call["labels"] = ids(BATCH, TOKENS)
    return call


def _by_class(built: BuiltModel) -> dict[str, Any] | None:
    """What nothing but the class gives away."""
    module: Any = built.module
    config, kind = module.config, type(module).__name__
    call: dict[str, Any] | None = None
    match kind:
        case "MusicgenForCausalLM" | "MusicgenMelodyForCausalLM":
            call = {"input_ids": ids(BATCH * config.num_codebooks, TOKENS)}
        case "PerceiverForMaskedLM":
            call = {"inputs": ids(BATCH, 2048), "labels": ids(BATCH, 2048)}
        case "ProphetNetForCausalLM":
            call = {"input_ids": ids(BATCH, 256), "labels": ids(BATCH, 256)}
        case "ProphetNetForConditionalGeneration":
            call = {"input_ids": ids(BATCH, 256), "decoder_input_ids": ids(BATCH, 32), "labels": ids(BATCH, 32)}
        case "Pix2StructForConditionalGeneration":
            call = {
                "flattened_patches": numbers(BATCH, 1024, 770),
                "decoder_input_ids": ids(BATCH, 32),
                "labels": ids(BATCH, 32),
            }
        case "UdopForConditionalGeneration":
            text = {
                "input_ids": ids(BATCH, TOKENS),
                "bbox": torch.arange(BATCH * TOKENS).view(BATCH, TOKENS, 1).repeat(1, 1, 4) % 1000,
            }
            call = {
                **text,
                "pixel_values": numbers(BATCH, 3, *image_size(config)),
                "decoder_input_ids": ids(BATCH, 32),
                "labels": ids(BATCH, 32),
            }
        case "DiaForConditionalGeneration":
            call = {
                "input_ids": ids(BATCH, TOKENS),
                "decoder_input_ids": ids(BATCH, 64, config.decoder_config.num_channels),
            }
        case "KyutaiSpeechToTextForConditionalGeneration":
            call = {"input_ids": ids(BATCH, TOKENS, config.num_codebooks + 1), "labels": ids(BATCH, TOKENS)}
        case "Pop2PianoForConditionalGeneration":
            call = {
                "input_features": numbers(BATCH, FRAMES, config.d_model),
                "decoder_input_ids": ids(BATCH, 32),
                "labels": ids(BATCH, 32),
            }
        case "DepthProForDepthEstimation":
            call = {"pixel_values": numbers(BATCH, 3, 1536, 1536)}
        case "LasrForCTC" | "ParakeetForCTC":
            mask = torch.ones(BATCH, FRAMES, dtype=torch.int64)
            call = {
                "input_features": numbers(BATCH, FRAMES, field(config, "num_mel_bins", default=80)),
                "attention_mask": mask,
                "labels": torch.ones(BATCH, 4).long(),
            }
        case "GraniteSpeech5ForCTC":
            call = {"input_features": numbers(BATCH, FRAMES, 320), "labels": torch.ones(BATCH, 4, dtype=torch.int64)}
        case "InstructBlipForConditionalGeneration" | "InstructBlipVideoForConditionalGeneration":
            found = multimodal.call(built)
            call = None if found is None else {**found, "qformer_input_ids": ids(BATCH, 32)}
    if call is not None and built.mode == "infer":
        call.pop("labels", None)
    return call


# --- boxes ------------------------------------------------------------------------------------------------------------
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
