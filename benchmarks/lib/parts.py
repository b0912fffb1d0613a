"""What calls of the zoo's models are made of: tensors on meta, and what a configuration says of its inputs."""

from __future__ import annotations

import itertools
from typing import Any

import torch

__all__ = ["BATCH", "FRAMES", "IMAGE", "TOKENS", "field", "ids", "image_size", "numbers"]

BATCH = 2
"""Images, clips, pairs of frames or sequences in a step."""
TOKENS = 512
IMAGE = 224
FRAMES = 200
"""Of a spectrogram."""


def numbers(*shape: int) -> torch.Tensor:
    """In floating point."""
    return torch.empty(shape, device="meta")


def ids(*shape: int) -> torch.Tensor:
    """Whole numbers."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of some fields that a config, or a part of it, has."""
    parts = [
        config,
        *(
            getattr(config, part, None)
            for part in ("vision_config", "audio_config", "encoder_config", "encoder", "backbone_config")
        ),
    ]
    for part, name in itertools.product(parts, names):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def image_size(config: Any) -> tuple[int, int]:
    """Height and width."""
    match field(config, "image_size", default=IMAGE):
        case int() as size:
            return size, size
        case [int() as height, int() as width]:
            return height, width
        case {"height": int() as height, "width": int() as width}:
            return height, width
    return IMAGE, IMAGE
