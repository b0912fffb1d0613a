"""A step of QLoRA or full fine-tuning, as fitcheck's scripts/measure.py runs it (Anassbzdd/fitcheck at 02ebe015)."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import Peaks, Program
from .loops import measure

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
FULL = {
    "llama-160m": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    }
}
"""Models that are trained whole, from their config.json."""


def measure_py(model: str, batch: int, tokens: int, attention: str, rank: int = 0) -> Program:
    """The step that is measured, after one that makes the optimizer's state: float16, every layer a checkpoint.

    Args:
        model: its name on the hub, or one of `FULL`.
        batch: rows.
        tokens: of each.
        attention: `eager`, or `sdpa`, which is that of `EFFICIENT_ATTENTION` with keys and values repeated before.
        rank: of the adapters, with NF4 weights; 0 for full fine-tuning.
    """
    return Program(lambda: {"": _run(model, batch, tokens, attention, rank)}, "")


def _run(model: str, batch: int, tokens: int, attention: str, rank: int) -> Peaks:
    network = _build(model, attention, rank)
    params = [each for each in network.parameters() if each.requires_grad]
    for each in params:
        each.data = each.data.float()
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    ids = torch.randint(0, network.config.vocab_size, (batch, tokens), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        out = network(input_ids=ids, labels=ids)
        out.loss.backward()
        optimizer.step()

    with contextlib.ExitStack() as stack:
        if attention == "sdpa":
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _repeating()))
            stack.enter_context(sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION))
        step()
        return measure(step)


def _build(model: str, attention: str, rank: int) -> Any:
    import transformers

    given: dict[str, Any] = {"dtype": torch.float16, "attn_implementation": attention}
    if rank:
        quantised = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
        network = transformers.AutoModelForCausalLM.from_pretrained(
            model, quantization_config=quantised, device_map={"": 0}, **given
        )
        network = _adapt(network, rank)
    else:
        config = transformers.LlamaConfig(**FULL[model])
        network = transformers.AutoModelForCausalLM.from_config(config, **given).cuda()
    network.config.use_cache = False
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.enable_input_require_grads()
    return network.train()


def _adapt(network: nn.Module, rank: int) -> nn.Module:
    import peft

    network = peft.prepare_model_for_kbit_training(network, use_gradient_checkpointing=True)
    options = {"lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": TARGETS}
    adapted: nn.Module = peft.get_peft_model(network, peft.LoraConfig(r=rank, task_type="CAUSAL_LM", **options))
    return adapted


def _repeating() -> Any:
    """`scaled_dot_product_attention` that repeats the heads of keys and values before it is called."""
    attend = F.scaled_dot_product_attention

    @functools.wraps(attend)
    def repeat(query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Tensor:
        if key.size(-3) != query.size(-3):
            groups = query.size(-3) // key.size(-3)
            key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
            options.pop("enable_gqa", None)
        return attend(query, key, value, *given, **options)

    return repeat
