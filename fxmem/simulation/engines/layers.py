"""How wide the layers of a decoder are, and which are split by rows or by columns over the cards of an engine.

Source: vllm-project/vllm, `model_executor/layers/linear.py` (`ColumnParallelLinear`, `RowParallelLinear`,
`QKVParallelLinear`), `distributed/utils.py` (`get_pp_indices`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn

_INNER: Final = {"c_proj", "o_proj", "down_proj", "dense", "out_proj", "fc2", "wo", "w2", "dense_4h_to_h"}
"""Layers that add up what each card has of their input: they are split by columns, the others by rows."""
_ROUTERS: Final = {"gate", "router", "shared_expert_gate"}
"""Layers that each card has whole."""


class LayerSizes(NamedTuple):
    """The largest widths of a decoder's layers, in elements of one token."""

    hidden: int
    attention: int
    """Queries, keys and values."""
    up: int
    """What an MLP multiplies the hidden states to."""
    down: int
    """What it makes of that."""
    expert: int
    """The same as `up` of one expert; 0 without experts."""
    chosen: int
    """Experts that a token goes to."""
    takes_images: bool
    """Whether what an encoder makes of images is among its tokens."""
    dtype: torch.dtype

    @classmethod
    def read(cls, model: Any) -> LayerSizes:
        """Read them off the modules of a decoder of transformers."""
        config = model.config.get_text_config(decoder=True)
        widest, expert = [0, 0, 0], 0
        for layer in find_layers(model):
            found = [0, 0, 0]
            for path, module in layer.named_modules():
                name = path.rpartition(".")[2]
                if (shape := find_shape(module)) is not None and name not in _ROUTERS:
                    of_attention, is_inner = "attn" in path or "attention" in path, name in _INNER
                    if not (of_attention and is_inner):
                        found[0 if of_attention else 2 if is_inner else 1] += shape[is_inner]
                elif name == "experts":
                    for part, parameter in module.named_parameters(recurse=False):
                        if parameter.dim() == 3 and "down" not in part:
                            expert = max(expert, parameter[0].numel() // config.hidden_size)
            widest = [*map(max, widest, found)]
        chosen = next((count for each in _CHOSEN if (count := getattr(config, each, None))), 0)
        images = getattr(model.config, "vision_config", None) is not None
        dtype = model.get_output_embeddings().weight.dtype
        return cls(config.hidden_size, widest[0], widest[1], widest[2], expert, chosen if expert else 0, images, dtype)


_CHOSEN: Final = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def find_shape(module: nn.Module) -> tuple[int, int] | None:
    """The rows and columns of what a layer multiplies by, GPT-2's `Conv1D` among them; None for another module."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    size: Any = (getattr(module, "nf", None), getattr(module, "nx", None))
    return size if type(module).__name__ == "Conv1D" else None


def find_layers(model: Any) -> nn.ModuleList:
    """The layers of a decoder of transformers."""
    return next(each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList))


class Stage(NamedTuple):
    """What one card has of a model."""

    layers: range
    tensor: int
    """Cards that split each layer."""
    is_first: bool
    is_last: bool


def split_stages(count: int, stages: int, tensor: int) -> Iterator[Stage]:
    """The stages of so many layers; what is over goes to those before the last, the last of them first."""
    each, over = divmod(count, stages)
    sizes = [each] * stages
    for place in range(over):
        sizes[-2 - place] += 1
    begin = 0
    for index, size in enumerate(sizes):
        yield Stage(range(begin, begin + size), tensor, index == 0, index == stages - 1)
        begin += size


def is_split_inside(path: str) -> bool:
    """Whether a layer is split by columns, for its input is split."""
    return path.rpartition(".")[2] in _INNER


def is_whole(path: str) -> bool:
    """Whether each card has the whole of a layer."""
    return path.rpartition(".")[2] in _ROUTERS
