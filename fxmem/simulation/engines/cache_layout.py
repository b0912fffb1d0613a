"""How a serving engine lays out keys and values.

Source: vllm-project/vllm, `v1/core/kv_cache_utils.py` at bbf906a8 (`get_num_blocks`,
`_get_kv_cache_groups_uniform_page_size`), `v1/kv_cache_interface.py` (`FullAttentionSpec`, `SlidingWindowSpec`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

from fxmem.errors import UsageError


class CacheLayout(NamedTuple):
    """How an engine keeps keys and values."""

    layer_bytes: int
    """Of one token in one layer."""
    windows: tuple[int | None, ...]
    """Of each layer that keeps any; None: all tokens."""

    @property
    def group_size(self) -> int:
        """Layers of a group: as many as there are of the rarer kind, or of the other where that is near."""
        counts = Counter(self.windows).values()
        return max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)

    @property
    def groups(self) -> list[int | None]:
        """The window of each group."""
        size = self.group_size
        return [window for window, count in Counter(self.windows).items() for _ in range(-(-count // size))]

    def count_blocks(self, context: int, block_size: int, batched_tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes at most."""
        found = 0
        for window in self.groups:
            kept = context if window is None else min(context, window - 1 + batched_tokens)
            found += -(-kept // block_size) + (window is not None)
        return found

    def of(self, layers: range) -> CacheLayout:
        """That of some of the layers."""
        return CacheLayout(self.layer_bytes, tuple(self.windows[layer] for layer in layers))


def read_layout(model: Any, tensor: int = 1, element_size: int | None = None) -> CacheLayout:
    """What each layer keeps of a token, by the model's configuration.

    Args:
        model: a decoder of transformers.
        tensor: cards that split each layer; each has one head at least.
        element_size: bytes of an element of keys and values; that of the weights unless given.

    Raises:
        UsageError: it is not known.
    """
    if not callable(getattr(model, "get_decoder", None)) or not callable(getattr(model, "get_output_embeddings", None)):
        raise UsageError(f"expected a decoder of transformers, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    other = set(kinds) - {"full_attention", *_WINDOWS}
    heads = getattr(config, "num_attention_heads", None)
    if other or heads is None or model.get_output_embeddings() is None:
        what = ", ".join(sorted(other)) or "none"
        raise UsageError(f"expected layers that keep keys and values for each head; {type(model).__name__} has {what}")
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_shared = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    all_kept = 1 if is_shared else getattr(config, "num_key_value_heads", None) or heads
    kept = max(all_kept // tensor, 1)
    item = element_size or model.get_output_embeddings().weight.dtype.itemsize
    if rank := getattr(config, "kv_lora_rank", None):  # one compressed row for all heads, on each card
        return CacheLayout((rank + config.qk_rope_head_dim) * item, (None,) * config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    # Mistral's configurations have a window without kinds of layers: then every layer has it.
    if window and not getattr(config, "layer_types", None):
        kinds = ["sliding_attention"] * len(kinds)
    windows = tuple(getattr(config, _WINDOWS[kind]) if kind in _WINDOWS else None for kind in kinds)
    return CacheLayout(2 * kept * size * item, windows)


_WINDOWS: Final = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""By the kind of a layer, the field that says how many tokens it keeps."""


def rotary_bytes(model: Any) -> int:
    """Bytes of the engine's table of sines and cosines, `RotaryEmbedding._compute_cos_sin_cache`; 0 without rotary
    positions."""
    config = model.config.get_text_config(decoder=True)
    frequencies = next((each for name, each in model.named_buffers() if name.endswith("inv_freq")), None)
    positions = getattr(config, "max_position_embeddings", None)
    if frequencies is None or positions is None:
        return 0
    item = model.get_output_embeddings().weight.dtype.itemsize
    return int(positions * 2 * frequencies.numel() * item)
