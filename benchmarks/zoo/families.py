"""transformers in the zoo: every class that an Auto mapping of the tasks below names, made shallow.

Widths, heads and vocabularies are those of each configuration's defaults, which nothing is allocated for; only depth is
cut, because a layer is like the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["TASKS", "every_class", "settings"]

TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
)
"""As in `MODEL_FOR_…_MAPPING_NAMES` of transformers/models/auto/modeling_auto.py."""

_DEPTHS = frozenset(
    {
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers",
        "encoder_layers", "decoder_layers", "depth", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
        "num_text_layers", "speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers",
        "num_hidden_layers_encoder", "num_hidden_layers_decoder",
    }
)  # fmt: skip
_KINDS = frozenset(("layer_types", "layers_block_type", "mlp_layer_types"))
"""Fields that say what each layer is."""
LAYERS = 2


_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_GLM_ROPE: Mapping[str, Any] = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_HEADS_OF_128: Mapping[str, Any] = {"head_dim": 128}
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "Aria": {"vision_config.image_size": 490, "vision_config.patch_size": 14},
    "Bamba": {"attn_layer_indices": [1]},
    "Blt": {"use_cache": False},
    "Chameleon": {"vocabulary_map": {"<image>": 8711}},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "CohereCompassForConditionalGeneration": {
        "text_config.rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "CohereCompassTextForSequenceClassification": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "DeepseekV2": {"num_experts_per_tok": 2},
    "DepthPro": {"intermediate_hook_ids": [1, 0]},
    "Dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "Emu3": {"vocabulary_map": {"<image>": 8711, "<|extra_200|>": 8712}},
    "Esm": {"vocab_size": 33, "pad_token_id": 1},
    "GPTNeo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "Gemma3": {"vision_config.image_size": 896, "vision_config.patch_size": 14},
    **{family: {"text_config.rope_parameters": _GLM_ROPE} for family in ("Glm4v", "Glm46V", "GlmOcr")},
    "Glm4vMoe": {"text_config.num_attention_heads": 32, "text_config.rope_parameters": _GLM_ROPE},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "HunYuanDenseV1": _HEADS_OF_128,
    "HunYuanMoEV1": _HEADS_OF_128,
    "HunYuanVL": {
        "text_config.head_dim": 128,
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [16, 16, 16, 16]},
    },
    "Jamba": {"num_hidden_layers": 5},
    "Lfm2Moe": {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3},
    "Ministral": _HEADS_OF_128,
    "Nemotron": {"num_key_value_heads": 8},
    "Ovis2": {"hidden_size": 4096},
    "Qwen3OmniMoeThinker": {"text_config.num_attention_heads": 32},
    "RecurrentGemma": {"num_hidden_layers": 3},
    "ReformerForMaskedLM": {"axial_pos_shape": [16, 32]},
    "ReformerForSequenceClassification": {"axial_pos_shape": [16, 32]},
    "Step3p7": {"text_config.sliding_window": 512},
    "VipLlava": {"vision_feature_layers": [-1, -2]},
    "Wav2Vec2BertForCTC": {"vocab_size": 32},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
    "Xmod": {"default_language": "en_XX"},
}
"""Fields without a default that works, or that a shallow model needs to have a layer of each kind; of a class, or of a
family."""


def every_class() -> list[str]:
    """Names of the classes, by task and in the mappings' order, each once."""
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for task in TASKS:
        for classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            names.update(dict.fromkeys([classes] if isinstance(classes, str) else classes))
    return list(names)


def settings(name: str) -> list[dict[str, Any]]:
    """Settings that make a class's default configuration shallow, the shallowest first; the last are always possible.

    `LAYERS` of each stack, or one layer of each kind if that is more; where a configuration refuses that, half its
    layers, then all of them.
    """
    import transformers

    if not hasattr(transformers, name):
        return [{}]
    try:
        config = getattr(transformers, name).config_class()
    except Exception:
        return [{}]
    needed = dict(_needed(name, config))
    choices = [{**dict(_depths(config, "", half)), **needed} for half in (False, True)]
    return [choice for number, choice in enumerate([*choices, needed]) if choice not in choices[:number]]


def _needed(name: str, config: Any) -> Iterator[tuple[str, Any]]:
    """What a configuration's defaults leave out and a step needs."""
    yield from {**_NEEDED.get(name.partition("For")[0], {}), **_NEEDED.get(name, {})}.items()
    seeing, reading = getattr(config, "vision_config", None), getattr(config, "text_config", None)
    if (width := getattr(reading, "hidden_size", None)) is not None:
        if hasattr(seeing, "out_hidden_size"):
            yield "vision_config.out_hidden_size", width
        elif hasattr(seeing, "embed_dim") and hasattr(
            seeing, "spatial_merge_size"
        ):  # Qwen2-VL's name for the width of what comes out is hidden_size
            yield "vision_config.hidden_size", width
    if name.endswith("ForSequenceClassification"):
        for prefix, part in (("", config), ("text_config.", getattr(config, "text_config", None))):
            if part is not None and "pad_token_id" in part.to_dict() and part.pad_token_id is None:
                yield f"{prefix}pad_token_id", 0


def _depths(config: Any, prefix: str, half: bool) -> Iterator[tuple[str, Any]]:
    if "neck_hidden_sizes" in config.to_dict():  # a neck takes what certain layers give
        return
    for field, value in config.to_dict().items():
        inner = vars(config).get(field)
        if hasattr(inner, "to_diff_dict"):
            yield from _depths(inner, f"{prefix}{field}.", half)
        elif field in _DEPTHS and isinstance(value, int):
            layers = (value + 1) // 2 if half else max(LAYERS, _one_of_each(config, value))
            if layers < value:
                yield prefix + field, layers


def _one_of_each(config: Any, layers: int) -> int:
    """How many layers from the first on have one of each kind."""
    kinds = [
        value
        for field, value in vars(config).items()
        if field in _KINDS and isinstance(value, list) and len(value) == layers
    ]
    return max((1 + max(map(each.index, set(each))) for each in kinds), default=0)
