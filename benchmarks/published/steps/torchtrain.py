"""One rank of Llama 2 7B with FSDP2, as torchtitan had it in March 2024 and called it torchtrain.

Source: pytorch/torchtitan at 83c879f1 (#165), train.py, torchtrain/parallelisms/parallelize_llama.py and
torchtrain/models/llama/model.py; train_configs/llama_7b.toml. Between the blocks the rows are folded, logits are in
float32 and stay over backward, RMS norm is written out. What is compiled is the whole model, after it is sharded.
Checkpoints are those of `torchtitan`: all of a block, or every other product and what is not attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from . import Step
from .loops import leaf, linear, meta
from .torchtitan import Checkpoints, Way, wrap

WIDTH, LAYERS, HEADS, HEAD, INNER, WORDS, TOKENS, POSITIONS = 4096, 32, 32, 128, 11008, 32000, 2048, 65536
RANKS = 8

project = partial(linear, dtype=torch.float32)


class RootNorm(nn.Module):
    """RMS norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = leaf(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.weight


def rotate(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs of channels in float32, as complex numbers, of queries and keys at once."""
    wide_q, wide_k = (torch.view_as_complex(each.float().reshape(*each.shape[:-1], -1, 2)) for each in (q, k))
    table = table.view(1, TOKENS, 1, HEAD // 2)
    turned_q, turned_k = torch.view_as_real(wide_q * table).flatten(3), torch.view_as_real(wide_k * table).flatten(3)
    return turned_q.type_as(q), turned_k.type_as(k)


class Attention(nn.Module):
    """Attention over folded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (project(WIDTH, WIDTH) for _ in "qkvo")

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Attend to what came before."""
        q, k, v = (each(x).view(-1, TOKENS, HEADS, HEAD) for each in (self.wq, self.wk, self.wv))
        q, k = rotate(q, k, table)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        output: Tensor = self.wo(y.transpose(1, 2).contiguous().view(-1, WIDTH))
        return output


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), RootNorm(), RootNorm()
        self.w1, self.w3, self.w2 = project(WIDTH, INNER), project(WIDTH, INNER), project(INNER, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Apply attention and the gated MLP."""
        h = x + self.attention(self.norm1(x), table)
        normed = self.norm2(h)
        output: Tensor = h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return output


class Llama(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, device="meta")
        table = torch.empty(POSITIONS, HEAD // 2, dtype=torch.complex64, device="meta")
        self.register_buffer("table", table, persistent=False)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = RootNorm(), project(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits in float32."""
        h = self.words(ids)
        table = self.table[:TOKENS]
        h = h.view(-1, WIDTH)
        for layer in self.layers:
            h = layer(h, table)
        h = self.norm(h)
        logits: Tensor = self.output(h.view(-1, TOKENS, WIDTH)).float()
        return logits


class Trained(nn.Module):
    """The model with its loss; both results stay until the step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1)), logits


def shard(module: nn.Module, checkpoints: Checkpoints, *, compiled: bool) -> nn.Module:
    """Checkpoint and shard each block, then the rest; compile the whole."""
    assert isinstance(module, Trained)
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = module.model.layers
    for index, block in enumerate(layers):
        layers[index] = wrapped = wrap(block, index, Way(RANKS, checkpoints=checkpoints))
        fully_shard(wrapped, mesh=mesh, mp_policy=precision, reshard_after_forward=index < LAYERS - 1)
    fully_shard(module.model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    if compiled:
        module.model.compile()
    return module


def train(checkpoints: Checkpoints, *, compiled: bool = False, batch: int = 8) -> Step:
    """The training step of one of eight ranks."""
    ids = meta(batch, TOKENS, dtype=torch.int64)
    options: dict[str, Any] = {
        "mode": "train",
        "optimizer": "adamw:foreach",
        "ranks": RANKS,
        "rank": 0,
        "parallelize": partial(shard, checkpoints=checkpoints, compiled=compiled),
        "compile": "as-is" if compiled else None,
    }
    return Step(Trained(), (ids, ids), {**options, "loss": lambda output: output[0]})
