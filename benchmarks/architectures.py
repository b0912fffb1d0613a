"""What the zoo consists of: each architecture by its model spec, made small where depth only repeats a layer.

torchvision: all of `list_models()`. timm: all of `list_models()`. transformers: every class of `families`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Literal

import families

from fxmem.errors import FxmemError
from fxmem.sources import BuiltModel, build_model

__all__ = ["COLLECTIONS", "QUICK", "build", "every_architecture"]

COLLECTIONS = ("torchvision", "timm", "hf")
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


def every_architecture(collections: Collection[str] = COLLECTIONS) -> list[str]:
    """Specs of the zoo, or of those collections of it, each as its library lists them."""
    found: list[str] = []
    if "torchvision" in collections:
        from torchvision.models import list_models

        found += [f"torchvision:{name}" for name in list_models()]
    if "timm" in collections:
        import timm

        found += [f"timm:{name}" for name in timm.list_models()]
    if "hf" in collections:
        found += [f"hf:{name}" for name in families.every_class()]
    return found


def build(spec: str, mode: Literal["train", "infer"]) -> BuiltModel:
    """An architecture, as shallow as its configuration allows."""
    collection, _, name = spec.partition(":")
    choices = families.settings(name) if collection == "hf" else [{}]
    for settings in choices[:-1]:
        with contextlib.suppress(FxmemError):
            return build_model(spec, settings, mode=mode)
    return build_model(spec, choices[-1], mode=mode)
