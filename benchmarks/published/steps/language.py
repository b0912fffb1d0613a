"""Training steps and evaluations of language models of transformers, from their configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import Step
from .loops import meta

LLAMA_3_8B = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Make a model of transformers on meta from its default configuration with these changes."""
    import transformers

    cls = getattr(transformers, name)
    with torch.device("meta"):
        model: nn.Module = cls(cls.config_class(**changes))
    return model.to(dtype)


class LossOnly(nn.Module):
    """A model whose outputs are freed when its loss is known, as the trainer of transformers frees them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def full_fine_tuning(model: str, batch: int, *, tokens: int = 256) -> Step:
    """A step of full fine-tuning in bfloat16 with AdamW and activation checkpointing, as the trainer runs it.

    Source: foundation-model-stack/fms-acceleration, scripts/benchmarks. The lengths of the examples are not published;
    the peak is in the optimizer's step, where they do not matter.
    """
    changes = {"MistralForCausalLM": {}, "LlamaForCausalLM": LLAMA_3_8B}[model]
    made = make_model(model, torch.bfloat16, use_cache=False, **changes)
    made.gradient_checkpointing_enable()  # type: ignore[operator]
    ids = meta(batch, tokens, dtype=torch.int64)
    return Step(LossOnly(made), (ids,), {"mode": "train", "optimizer": "adamw"})
