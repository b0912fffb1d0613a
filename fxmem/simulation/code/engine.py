"""How a serving engine lays out keys and values, and what it runs to measure itself.

Source: vllm-project/vllm, `v1/worker/gpu_model_runner.py` (`profile_run`, `_dummy_sampler_run`),
`v1/sample/sampler.py`, `v1/core/kv_cache_utils.py` at bbf906a8 (`get_num_blocks`,
`_get_kv_cache_groups_uniform_page_size`), `v1/kv_cache_interface.py` (`FullAttentionSpec`, `SlidingWindowSpec`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

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


class ProfileRun(nn.Module):
    """What the engine runs to measure itself."""

    def __init__(self, model: Any, sequences: int) -> None:
        super().__init__()
        self.model = model
        self.sequences = sequences

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A forward without a cache, then a sample for each sequence."""
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        last = hidden[: self.sequences].clone()
        return _sample(self.model.get_output_embeddings()(last))


def _sample(logits: torch.Tensor) -> torch.Tensor:
    """Sample with a temperature, top-k and top-p, by the kernels of torch."""
    scores = logits.to(torch.float32)
    likeliest = scores.argmax(-1)
    scores.div_(0.5)
    ordered, places = scores.sort(-1)
    least = ordered.gather(-1, torch.ones_like(likeliest)[:, None])
    ordered.masked_fill_(ordered < least, -torch.inf)
    shares = ordered.softmax(-1).cumsum(-1)
    ordered.masked_fill_(shares <= 0.1, -torch.inf)
    del shares
    scores = ordered.scatter(-1, places, ordered)
    del ordered, places
    chances = scores.softmax(-1)
    drawn = chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)
    return torch.where(likeliest < 0, likeliest, drawn)


def read_layout(model: Any) -> CacheLayout:
    """What each layer keeps of a token, by the model's configuration.

    Raises:
        UsageError: it is not known.
    """
    if not callable(getattr(model, "get_decoder", None)) or not callable(getattr(model, "get_output_embeddings", None)):
        raise UsageError(f"expected a decoder of transformers, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    other = set(kinds) - {"full_attention", "sliding_attention"}
    heads = getattr(config, "num_attention_heads", None)
    if other or heads is None or getattr(config, "kv_lora_rank", None) or model.get_output_embeddings() is None:
        what = ", ".join(sorted(other)) or "compressed keys and values, or none"
        raise UsageError(f"expected layers that keep keys and values for each head; {type(model).__name__} has {what}")
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    item = model.get_output_embeddings().weight.dtype.itemsize
    window = getattr(config, "sliding_window", None)
    # Mistral's configurations have a window without kinds of layers: then every layer has it.
    if window and not getattr(config, "layer_types", None):
        kinds = ["sliding_attention"] * len(kinds)
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return CacheLayout(2 * kept * size * item, windows)


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
