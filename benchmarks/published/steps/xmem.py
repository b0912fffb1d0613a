"""The trainings of the paper xMem (Middleware 2025), as its repository runs them.

Source: Stone-ResearchLife/xMem, exp/trainer. float32, 1,000 classes or 10 as the model there has them, pictures of
86 x 86. A text is cut after 128 tokens and padded to the longest of its batch, which is one of 128 for almost every
batch of ten. Gradients are cleared where `zero_grad_mode` says: 0 before the batch is loaded, 1 between forward and
backward, 2 after the step. Runs of before that was a setting (None) had the trainer's default: 1 in the loop for
pictures; the loop for texts of that time is not stored, and their figures say 0. The loop's variables hold the logits
of the step before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import Step
from .loops import meta
from .vision import train_classifier

SIZE = 86
TOKENS = 128
MOBILE_CLASSES = 10


def _mobilenet_v3(size: str) -> nn.Module:
    """`MobileNetV3` with the rows of the paper that torchvision has too, and ten classes."""
    from torchvision.models import mobilenetv3

    rows, channels = mobilenetv3._mobilenet_v3_conf(f"mobilenet_v3_{size}")
    return mobilenetv3.MobileNetV3(rows, channels, num_classes=MOBILE_CLASSES)


def _make_network(model: str) -> nn.Module:
    import torchvision

    # RegNet computes its widths with tensors that need values.
    with torch.device("cpu" if model.startswith("RegNet") else "meta"):
        if model.startswith("MobeNetV3"):
            return _mobilenet_v3(model.removeprefix("MobeNetV3").lower())
        if model == "MnasNet":
            return torchvision.models.MNASNet(alpha=1.0, num_classes=MOBILE_CLASSES)
        names = {"MobileNetV2": "mobilenet_v2", "ConvNeXtTiny": "convnext_tiny", "ConvNeXtBase": "convnext_base"}
        names |= {"RegNetX400MF": "regnet_x_400mf", "RegNetY400MF": "regnet_y_400mf"}
        network: nn.Module = getattr(torchvision.models, names.get(model, model.lower()))()
    return network


def _options(optimizer: str, zero_grad_mode: int) -> dict[str, Any]:
    cleared = "before-backward" if zero_grad_mode == 1 else "after-step"
    return {"optimizer": _OPTIMIZERS.get(optimizer, optimizer.lower()), "zero_grad": cleared, "keep_outputs": True}


def _adafactor(params: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    made: torch.optim.Optimizer = Adafactor(params, lr=1e-3, relative_step=False)
    return made


_OPTIMIZERS: dict[str, Any] = {"Adafactor": _adafactor}
"""Those that are none of torch's, by their names."""


def cnn(model: str, batch: int, optimizer: str, zero_grad_mode: int | None) -> Step:
    """A network of torchvision on CIFAR-10."""
    options = _options(optimizer, 1 if zero_grad_mode is None else zero_grad_mode)
    return train_classifier(_make_network(model), batch, size=SIZE, **options)


def _gpt2(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "GPT2LMHeadModel", changes


_CEREBRAS = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
_QWEN_1B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
_QWEN_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
_LLAMA_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
_OPT_350M = {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-community-gpt2": _gpt2(),
    "distilbert-distilgpt2": _gpt2(n_layer=6),
    "cerebras-Cerebras-GPT-111M": _gpt2(n_layer=10, n_positions=2048, activation_function="gelu", **_CEREBRAS),
    "EleutherAI-gpt-neo-125M": (
        "GPTNeoForCausalLM",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "facebook-opt-125m": ("OPTForCausalLM", {}),
    "facebook-opt-350m": (
        "OPTForCausalLM",
        {**_OPT_350M, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "T5-small": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "t5-base": (
        "T5ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-1.5B": ("Qwen2ForCausalLM", {**_QWEN_1B, "num_key_value_heads": 2}),
    "Qwen-Qwen3-4B": (
        "Qwen3ForCausalLM",
        {**_QWEN_4B, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "meta-llama-Llama-3.2-3B-Instruct": (
        "LlamaForCausalLM",
        {**_LLAMA_3B, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True},
    ),
}
"""By xMem's name of it: the class of transformers, and what its configuration changes."""


def transformer(model: str, batch: int, optimizer: str, zero_grad_mode: int | None) -> Step:
    """A language model of transformers on wikitext-2."""
    import transformers

    name, changes = LANGUAGE_MODELS[model]
    cls = getattr(transformers, name)
    config = cls.config_class(**changes)
    with torch.device("meta"):
        network = cls._from_config(config)
    mask = torch.ones(batch, TOKENS, dtype=torch.int64)
    mask[1:, TOKENS // 2 :] = 0  # of a batch, one text is long
    inputs = {
        "input_ids": meta(batch, TOKENS, dtype=torch.int64),
        "attention_mask": mask,
        "labels": meta(batch, TOKENS, dtype=torch.int64),
    }
    return Step(network, inputs, {"mode": "train", **_options(optimizer, zero_grad_mode or 0)})
