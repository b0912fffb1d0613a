"""What a serving engine runs to measure itself: a forward of as many tokens as a batch may have, then a sample.

Source: vllm-project/vllm, `v1/worker/gpu_model_runner.py` (`profile_run`, `_dummy_sampler_run`), `v1/sample/sampler.py`
at bbf906a8; `v1/sample/ops/topk_topp_triton.py` at 08a57232; `fused_moe/fused_moe.py` (`workspace_shapes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from fxmem.simulation.engines.layers import LayerSizes
from fxmem.simulation.engines.releases import Engine


class ProfileSettings(NamedTuple):
    """What a profile run depends on beside its model."""

    engine: Engine
    sequences: int
    """From whose logits it samples."""
    processors: int
    """Multiprocessors of the card."""
    tensor: int = 1
    """Cards that split each layer."""
    is_staged: bool = False
    """Whether the hidden states go from card to card."""
    samples: bool = True
    """Whether this card has the model's head."""
    keeps_experts: bool = True
    """Whether the kernels of experts keep what they work in: all but those of MXFP4 do."""
    quantizes_inputs: bool = False
    """Whether what is multiplied is quantised, too, into a byte an element."""
    is_alone: bool = True
    """Whether nothing is kept for another run."""


class ProfileRun(nn.Module):
    """A forward without a cache, then a sample for each sequence."""

    def __init__(self, model: Any, settings: ProfileSettings) -> None:
        super().__init__()
        self.head = model.get_output_embeddings()
        if not settings.engine.merges_layers:
            self.decoder = model.get_decoder()
        self.settings = settings
        self.sizes = LayerSizes.read(model)
        self.kept: dict[str, list[torch.Tensor]] = {}
        """What kernels work in and keep, and the hidden states that go from card to card."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One run."""
        settings = self.settings
        if not settings.engine.merges_layers:
            hidden: torch.Tensor = self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        else:
            hidden = self._run_layers(ids)
        last = hidden[: settings.sequences].clone()
        if settings.samples:
            drawn = torch.rand_like(last) if settings.engine.copies_logits else last
            drawn = self._sample(self.head(drawn))
        if settings.is_alone:
            self.kept.clear()
        return drawn if settings.samples else last

    def _run_layers(self, ids: torch.Tensor) -> torch.Tensor:
        """What is alive at most in a layer of merged products: its hidden states, and what they are multiplied to."""
        sizes, count, tensor = self.sizes, ids.numel(), self.settings.tensor

        def make(columns: int) -> torch.Tensor:
            return ids.new_empty(count, columns, dtype=sizes.dtype)

        if self.settings.is_staged and "stages" not in self.kept:
            self.kept["stages"] = [make(sizes.hidden) for _ in range(2)]
        if sizes.takes_images and "images" not in self.kept:
            self.kept["images"] = [make(sizes.hidden)]
        if sizes.chosen and self.settings.keeps_experts and "experts" not in self.kept:
            widest = sizes.chosen * max(sizes.hidden, sizes.expert // tensor)
            self.kept["experts"] = [make(widest) for _ in range(2)]
        hidden, *others = (make(sizes.hidden) for _ in range(self.settings.engine.hidden_states))
        torch.mm(hidden[:, :1], hidden[:1, :1])  # cuBLAS's workspace
        others.append(make(max(sizes.attention, sizes.up + sizes.down) // tensor))
        if self.settings.quantizes_inputs:
            others.append(ids.new_empty(count, sizes.down // tensor, dtype=torch.int8))
        del others
        return hidden

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample with a temperature, top-k and top-p."""
        engine = self.settings.engine
        if engine.sampler == "gumbel":
            return logits.argmax(-1)
        scores = logits.to(torch.float32, copy=engine.copies_logits)
        likeliest = scores.argmax(-1)
        scores.div_(0.5)
        if engine.sampler == "sort":
            scores = _keep_likeliest(scores, likeliest)
        elif engine.sampler == "triton" and "rows" not in self.kept:
            self.kept["rows"] = [scores.new_empty(self.settings.processors, scores.shape[-1])]
        chances = scores.softmax(-1)
        drawn = chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)
        return torch.where(likeliest < 0, likeliest, drawn)


def _keep_likeliest(scores: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Set all but the likeliest to minus infinity, by the kernels of torch."""
    ordered, places = scores.sort(-1)
    least = ordered.gather(-1, torch.ones_like(likeliest)[:, None])
    ordered.masked_fill_(ordered < least, -torch.inf)
    shares = ordered.softmax(-1).cumsum(-1)
    ordered.masked_fill_(shares <= 0.1, -torch.inf)
    del shares
    return ordered.scatter(-1, places, ordered)
