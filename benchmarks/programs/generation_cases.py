"""Generations of small models: decoder families of transformers, and ways to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_SIZES: Mapping[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: Mapping[str, Any] = {"head_dim": 16}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK: Mapping[str, Any] = {
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
}
_MIXED: Mapping[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": _HEADS,
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "qwen3_next": {
        **{**_HEADS, **_EXPERTS, **_MIXED, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4},
        **{"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "gemma": _HEADS,
    "gemma2": _HEADS,
    "gemma3_text": _HEADS,
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "bloom": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "ctrl": {"n_embd": 64, "dff": 96, "n_layer": 2, "n_head": 4},
    "biogpt": {},
    "falcon": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16},
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": {**_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "persimmon": {},
    "nemotron": {},
    "nemotron_h": {"mamba_num_heads": 4, "n_groups": 2, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 16},
    "smollm3": {},
    "exaone4": {},
    "ernie4_5": _HEADS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "minimax": {"num_local_experts": 4},
    "llama4_text": {**_HEADS, "num_local_experts": 4, "intermediate_size_mlp": 96},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "seed_oss": _HEADS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "arcee": {},
    "apertus": {},
    "bitnet": {},
    "diffllama": {},
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {**_HEADS, "num_heads": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "jamba": {
        **{"num_experts": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2},
        "use_mamba_kernels": False,
    },
    "bamba": {
        **{"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
        **{"mamba_chunk_size": 16},
    },
    "granitemoehybrid": {
        **_MIXED,
        **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 64},
    "rwkv": {"attention_hidden_size": 64},
}
"""Fields of each decoder family's configuration, beside those that all have."""


def family(name: str) -> nn.Module:
    """A decoder of a family, of a few layers that are 64 wide."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[name](**{**_SIZES, **FAMILIES[name]})
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    """Token ids, none of which stands for padding, or the beginning or end of a text."""
    return torch.arange(batch * length).view(batch, length) % 800 + 20


class Generate(nn.Module):
    """A model's own `generate`, as a forward."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Call `generate`."""
        made: torch.Tensor = self.model.generate(**inputs, **self.settings)
        return made


class OldCacheLoop(nn.Module):
    """A loop by hand, which keeps the cache of the token before until the next is computed."""

    def __init__(self, model: nn.Module, new_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.new_tokens = new_tokens

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Generate greedily."""
        from transformers import DynamicCache

        cache = DynamicCache()
        made = [input_ids]
        for _ in range(self.new_tokens):
            kept = [(layer.keys, layer.values) for layer in cache.layers]
            logits = self.model(made[-1], past_key_values=cache).logits
            made.append(logits[:, -1:].argmax(-1))
        del kept
        return torch.cat(made, 1)


class Assisted(nn.Module):
    """Assisted decoding: a smaller model drafts what the larger one checks."""

    def __init__(self, model: nn.Module, assistant: nn.Module, new_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.assistant = assistant
        drafts = assistant.generation_config
        drafts.num_assistant_tokens = 4
        drafts.assistant_confidence_threshold = 0.0  # each is as long as it may be, as is assumed
        self.new_tokens = new_tokens

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Call `generate`."""
        made: torch.Tensor = self.model.generate(
            **inputs, assistant_model=self.assistant, max_new_tokens=self.new_tokens, do_sample=False
        )
        return made


def _text(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    call = _text(batch, length)
    call["attention_mask"][0, :7] = 0
    return call


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**{**_SIZES, "sliding_window": 40})).eval()


def _larger_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, "hidden_size": 128, "num_hidden_layers": 3})).eval()


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    stack = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
    sizes = {
        **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in stack.items()},
        **{"d_model": 64, "vocab_size": 1000, "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1},
        **{"eos_token_id": 2, "decoder_start_token_id": 3, "max_source_positions": 100, "max_target_positions": 64},
        **{"suppress_tokens": [], "begin_suppress_tokens": [4]},
    }
    return WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval()


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**seen, image_size=56, patch_size=14, projection_dim=32),
        text_config=LlamaConfig(**_SIZES),
        image_token_index=990,
    )
    return LlavaForConditionalGeneration(config).eval()


def _image_prompt() -> dict[str, torch.Tensor]:
    call = _text(2, 30)
    call["input_ids"][:, 3:19] = 990
    torch.manual_seed(1)
    return {**call, "pixel_values": torch.randn(2, 3, 56, 56)}


def _sound() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_features": torch.randn(2, 16, 200)}


def _llama_way(**way: Any) -> Callable[[], nn.Module]:
    return lambda: Generate(family("llama"), max_new_tokens=16, **{"do_sample": False, **way})


_STATIC: Mapping[str, Any] = {"cache_implementation": "static", "disable_compile": True}
WAYS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "dynamic cache, batch 1": (_llama_way(), lambda: _text(1, 40)),
    "dynamic cache, batch 4": (_llama_way(), lambda: _text(4, 40)),
    "padded prompts": (_llama_way(), lambda: _padded(4, 40)),
    "static cache": (_llama_way(**_STATIC), lambda: _text(4, 40)),
    "window that begins to slide": (
        lambda: Generate(_mistral(), max_new_tokens=16, do_sample=False),
        lambda: _text(4, 30),
    ),
    "window, static cache": (
        lambda: Generate(_mistral(), max_new_tokens=16, do_sample=False, **_STATIC),
        lambda: _text(4, 30),
    ),
    "sampling": (_llama_way(do_sample=True, top_k=50, top_p=0.9), lambda: _text(4, 40)),
    "4 beams": (_llama_way(num_beams=4), lambda: _text(2, 40)),
    "4 beams, static cache": (_llama_way(num_beams=4, **_STATIC), lambda: _text(2, 40)),
    "prefill in chunks": (_llama_way(prefill_chunk_size=16), lambda: _text(4, 40)),
    "T5": (lambda: Generate(_t5(), max_new_tokens=16, do_sample=False), lambda: _text(4, 40)),
    "T5, 4 beams": (lambda: Generate(_t5(), max_new_tokens=16, num_beams=4), lambda: _text(2, 40)),
    "Whisper": (lambda: Generate(_whisper(), max_new_tokens=16, do_sample=False), _sound),
    "LLaVA, image in the prompt": (lambda: Generate(_llava(), max_new_tokens=16, do_sample=False), _image_prompt),
    "Mamba": (lambda: Generate(family("mamba"), max_new_tokens=16, do_sample=False), lambda: _text(4, 40)),
    "Jamba": (lambda: Generate(family("jamba"), max_new_tokens=16, do_sample=False), lambda: _text(4, 40)),
    "assisted decoding": (lambda: Assisted(_larger_llama(), family("llama"), 10), lambda: _text(1, 40)),
    "loop that keeps the old cache": (lambda: OldCacheLoop(family("llama"), 16), lambda: {"input_ids": tokens(4, 40)}),
}
"""By name: what makes the model, and what makes its inputs."""
