"""What the zoo consists of: each architecture by its model spec, made small where depth only repeats a layer.

torchvision: all of `list_models()`. timm: all of `list_models()`. transformers: every class of `families`. Of some
further packages, where they are installed: the models of `packages`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Literal

from benchmarks.lib import packages
from benchmarks.zoo import families
from fxmem.cli.specs import BuiltModel, build_model
from fxmem.errors import FxmemError

__all__ = ["COLLECTIONS", "SAMPLE", "build", "every_architecture"]

COLLECTIONS = ("torchvision", "timm", "hf", *packages.PACKAGES)
SAMPLE = tuple(
    f"{collection}:{name}"
    for collection, names in {
        "torchvision": (
            "alexnet vgg11_bn resnet18 squeezenet1_1 r3d_18 mobilenet_v3_small shufflenet_v2_x0_5 mnasnet0_5 "
            "regnet_x_400mf convnext_tiny vit_b_32 "
            "lraspp_mobilenet_v3_large quantized_resnet18 googlenet"
        ),
        "timm": (
            "resnetv2_18 dla34 convnext_atto gmixer_12_224 lcnetv2_base skresnet18 efficientvit_b0 "
            "inception_next_atto hardcorenas_a botnet26t_256 starnet_s1 "
            "test_vit_relpos levit_128 selecsls42 visformer_small pvt_v2_b0 eca_vovnet39b efficientformer_l1"
        ),
        "hf": (
            "GPT2LMHeadModel LlamaForCausalLM BloomForCausalLM OlmoeForCausalLM MixtralForCausalLM "
            "FalconMambaForCausalLM Gemma2ForCausalLM RobertaForMaskedLM "
            "AlbertForMaskedLM FNetForMaskedLM DebertaV2ForMaskedLM T5ForConditionalGeneration "
            "PegasusForConditionalGeneration BigBirdForCausalLM "
            "ViTForImageClassification Qwen3ForCausalLM OPTForCausalLM DetrForObjectDetection GPTNeoXForCausalLM "
            "MptForCausalLM ASTForAudioClassification XGLMForCausalLM StableLmForCausalLM "
            "WhisperForConditionalGeneration "
            "LlavaForConditionalGeneration PhiForCausalLM GraniteMoeForCausalLM GitForCausalLM"
        ),
    }.items()
    for name in names.split()
)
"""Sixty small ones, one of each kind; those of them that are hardest the tests analyse."""


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
    return found + packages.every_model(collections)


def build(spec: str, mode: Literal["train", "infer"]) -> BuiltModel:
    """An architecture, as shallow as its configuration allows."""
    collection, _, name = spec.partition(":")
    choices = (
        families.settings(name)
        if collection == "hf"
        else [packages.settings(spec) if collection in packages.PACKAGES else {}]
    )
    for settings in choices[:-1]:
        with contextlib.suppress(FxmemError):
            return build_model(spec, settings, mode=mode)
    return build_model(spec, choices[-1], mode=mode)
