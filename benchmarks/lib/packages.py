"""Models of packages that are not among the development dependencies, in the zoo where they are installed: diffusers,
segmentation_models_pytorch, MONAI.

Each with the settings that make it shallow, or that have no default, and with what it is called with. Widths are the
defaults.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fxmem.cli.specs import BuiltModel

__all__ = ["PACKAGES", "call", "every_model", "settings"]

_TIME: tuple[str, int] = ("int64", 2)
_SHORT: Mapping[str, Any] = {"num_layers": 2}
_IMAGE: Mapping[str, Any] = {"x": (2, 3, 224, 224)}
_VOLUME: Mapping[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_SCAN: Mapping[str, Any] = {"x": (2, 1, 96, 96, 96)}
_NOISE: Mapping[str, Any] = {"sample": (2, 4, 64, 64), "timestep": _TIME, "encoder_hidden_states": (2, 77, 1280)}

_MODELS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "diffusers:UNet1DModel": ({"extra_in_channels": 64}, {"sample": (2, 2, 65536), "timestep": _TIME}),
    "diffusers:UNet2DModel": ({}, {"sample": (2, 3, 64, 64), "timestep": _TIME}),
    "diffusers:UNet2DConditionModel": ({}, _NOISE),
    "diffusers:UNet3DConditionModel": (
        {},
        {"sample": (2, 4, 8, 32, 32), "timestep": _TIME, "encoder_hidden_states": (2, 77, 1024)},
    ),
    "diffusers:UNetMotionModel": (
        {},
        {"sample": (2, 4, 8, 32, 32), "timestep": _TIME, "encoder_hidden_states": (2, 77, 1280)},
    ),
    "diffusers:ControlNetModel": ({}, {**_NOISE, "controlnet_cond": (2, 3, 512, 512)}),
    "diffusers:AutoencoderKL": ({}, {"sample": (2, 3, 256, 256)}),
    "diffusers:VQModel": ({}, {"sample": (2, 3, 256, 256)}),
    "diffusers:DiTTransformer2DModel": (
        _SHORT,
        {"hidden_states": (2, 4, 32, 32), "timestep": _TIME, "class_labels": _TIME},
    ),
    "diffusers:PixArtTransformer2DModel": (
        {**_SHORT, "caption_channels": 4096, "use_additional_conditions": False},
        {
            "hidden_states": (2, 4, 128, 128),
            "encoder_hidden_states": (2, 120, 4096),
            "timestep": _TIME,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "diffusers:SD3Transformer2DModel": (
        _SHORT,
        {
            "hidden_states": (2, 16, 128, 128),
            "encoder_hidden_states": (2, 154, 4096),
            "pooled_projections": (2, 2048),
            "timestep": _TIME,
        },
    ),
    "diffusers:FluxTransformer2DModel": (
        {**_SHORT, "num_single_layers": 2},
        {
            "hidden_states": (2, 1024, 64),
            "encoder_hidden_states": (2, 512, 4096),
            "pooled_projections": (2, 768),
            "timestep": (2,),
            "img_ids": (1024, 3),
            "txt_ids": (512, 3),
        },
    ),
    "diffusers:AuraFlowTransformer2DModel": (
        {"num_mmdit_layers": 2, "num_single_dit_layers": 2},
        {"hidden_states": (2, 4, 64, 64), "encoder_hidden_states": (2, 256, 2048), "timestep": (2,)},
    ),
    "diffusers:SanaTransformer2DModel": (
        _SHORT,
        {"hidden_states": (2, 32, 32, 32), "encoder_hidden_states": (2, 300, 2304), "timestep": _TIME},
    ),
    "diffusers:CogVideoXTransformer3DModel": (
        _SHORT,
        {"hidden_states": (1, 13, 16, 60, 90), "encoder_hidden_states": (1, 226, 4096), "timestep": ("int64", 1)},
    ),
    "diffusers:WanTransformer3DModel": (
        _SHORT,
        {"hidden_states": (1, 16, 4, 60, 104), "encoder_hidden_states": (1, 512, 4096), "timestep": ("int64", 1)},
    ),
    **{
        f"segmentation_models_pytorch:{name}": ({"encoder_weights": None}, _IMAGE)
        for name in (
            "DPT",
            "DeepLabV3",
            "DeepLabV3Plus",
            "FPN",
            "Linknet",
            "MAnet",
            "PAN",
            "PSPNet",
            "Segformer",
            "UPerNet",
            "Unet",
            "UnetPlusPlus",
        )
    },
    "monai.networks.nets:UNet": ({**_VOLUME, "channels": [16, 32, 64, 128], "strides": [2, 2, 2]}, _SCAN),
    "monai.networks.nets:DynUNet": (
        {**_VOLUME, "kernel_size": [3, 3, 3, 3], "strides": [1, 2, 2, 2], "upsample_kernel_size": [2, 2, 2]},
        _SCAN,
    ),
    "monai.networks.nets:SegResNet": (_VOLUME, _SCAN),
    "monai.networks.nets:BasicUNet": (_VOLUME, _SCAN),
    "monai.networks.nets:VNet": ({}, _SCAN),
    "monai.networks.nets:SwinUNETR": ({"in_channels": 1, "out_channels": 2}, {"x_in": (2, 1, 96, 96, 96)}),
}
PACKAGES = tuple(dict.fromkeys(spec.partition(":")[0] for spec in _MODELS))


def every_model(packages: Collection[str] = PACKAGES) -> list[str]:
    """Specs of the models of those packages that are installed."""
    there = {
        package
        for package in packages
        if package in PACKAGES and importlib.util.find_spec(package.partition(".")[0]) is not None
    }
    return [spec for spec in _MODELS if spec.partition(":")[0] in there]


def settings(spec: str) -> dict[str, Any]:
    """Arguments of a model's class."""
    return dict(_MODELS[spec][0])


def call(built: BuiltModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with, on meta; one that names its only input otherwise takes it by position."""
    made = {name: _made(value) for name, value in _MODELS[built.spec][1].items()}
    return (tuple(made.values()), {}) if len(made) == 1 else ((), made)


def _made(value: Any) -> Any:
    match value:
        case ("int64", int() as length):
            return torch.empty(length, dtype=torch.int64, device="meta")
        case tuple():
            return torch.empty(value, device="meta")
    return value
