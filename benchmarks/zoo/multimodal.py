"""How the zoo calls models that read text with images or sound in it: the placeholders in the text are as many as the
image has features."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from benchmarks.lib.parts import BATCH, field, image_size, numbers
from fxmem.cli.specs import BuiltModel

__all__ = ["call"]

SIDE = 16
"""Patches in the height and width of an image that comes as a row of patches."""

_TILES = 3
"""Of LLaVA-NeXT: an image as large as the vision model takes lies in two tiles of the smallest grid, after the image
itself."""


def call(built: BuiltModel) -> dict[str, Any] | None:
    """Images, and a text with their places; None for a model that has another way to see."""
    module: Any = built.module
    config, takes = module.config, inspect.signature(module.forward).parameters
    image = next(
        (
            number
            for name in ("image_token_id", "image_token_index")
            if isinstance(number := getattr(config, name, None), int)
        ),
        None,
    )
    if image is None or not {"input_ids", "pixel_values"} <= takes.keys():
        return None
    seen, places = _seen(module, takes)
    if places is None:
        return None
    text = torch.full((BATCH, places + 32), 7, dtype=torch.int64)
    text[:, 1 : 1 + places] = image
    if type(config).__name__.endswith("OmniThinkerConfig") or type(config).__name__.endswith("OmniMoeThinkerConfig"):
        config.vision_start_token_id = 151652  # in every checkpoint's config.json, though not in the class
        text[:, 0] = config.vision_start_token_id
    made = {**seen, "input_ids": text, "attention_mask": torch.ones_like(text)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in takes:
            made[name] = (text == image).to(torch.int64)
    if "moe_mm_token_type_ids" in takes:
        made["moe_mm_token_type_ids"] = (text == image).to(torch.int64)
    if built.mode == "train":
        made["labels"] = torch.ones_like(text)
    return made


def _seen(module: Any, takes: Any) -> tuple[dict[str, Any], int | None]:
    """What the model sees, and how many features it makes of one image; None where nothing tells."""
    config = module.config
    if "image_grid_thw" in takes:
        seen, merged = _as_patches(config)
        if "image_merge_sizes" in takes:
            seen["image_merge_sizes"] = torch.tensor([math.isqrt(merged)] * BATCH)
        if type(module).__name__.startswith(
            "HunYuanVL"
        ):  # a separator ends each row, and one token each begins and ends the image
            side = SIDE // math.isqrt(merged)
            return seen, side * (side + 1) + 2
        return seen, SIDE * SIDE // merged
    height, width = image_size(config)
    channels = field(config, "num_channels", default=3)
    if "pixel_attention_mask" in takes:
        seen = {
            "pixel_values": numbers(BATCH, 1, channels, height, width),
            "pixel_attention_mask": torch.ones(BATCH, 1, height, width, dtype=torch.bool),
        }
    else:
        tiles = (_TILES,) if type(module).__name__.startswith("LlavaNext") else ()
        seen = {"pixel_values": numbers(BATCH, *tiles, channels, height, width)}
        if "image_sizes" in takes:
            seen["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return seen, _features(module, seen)


def _features(module: Any, seen: dict[str, Any]) -> int | None:
    """Of one image, as the model itself makes them on meta."""
    if not hasattr(module, "get_image_features"):
        return None
    takes = inspect.signature(module.get_image_features).parameters
    try:
        with torch.no_grad():
            features = module.get_image_features(**{name: value for name, value in seen.items() if name in takes})
    except Exception:
        number: int | None = field(module.config, "image_seq_length", "image_seq_len", "mm_tokens_per_image")
        return number
    return _rows(getattr(features, "pooler_output", features)) // BATCH


def _rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return features.shape[:-1].numel()
    return sum(map(_rows, features))


def _as_patches(config: Any) -> tuple[dict[str, Any], int]:
    """An image as the Qwen-VL family sees it: its patches in one row, and how many of them stand in time, height and
    width; how many become one feature."""
    patch, frames, channels = (
        field(config, name, default=value)
        for name, value in (
            ("patch_size", 14),
            ("temporal_patch_size", 2 if type(config).__name__.startswith("Muse") else 1),
            ("in_channels", 3),
        )
    )
    merge = field(config, "spatial_merge_size", "merge_size", default=1)
    if type(config).__name__ == "Inkling2Config":  # counts, and has in a row, what becomes one feature
        return {
            "pixel_values": numbers(BATCH * SIDE * SIDE, merge * patch, merge * patch, channels),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * BATCH),
        }, 1
    seen = {
        "pixel_values": numbers(BATCH * SIDE * SIDE, channels * frames * patch * patch),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * BATCH),
    }
    return seen, merge * merge
