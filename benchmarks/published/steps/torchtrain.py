"""One rank of Llama 2 7B with FSDP2, as torchtitan had it in March 2024 and called it torchtrain.

Source: pytorch/torchtitan at 83c879f1 (#165), train.py, torchtrain/parallelisms/parallelize_llama.py and
torchtrain/models/llama/model.py; train_configs/llama_7b.toml. Between the blocks the rows are folded, logits are in
float32 and stay until the next step's are there, RMS norm is written out. What is compiled is the whole model, after it
is sharded. Checkpoints are those of `torchtitan`: all of a block, or every other product and what is not attention.
Gradients are clipped.

Two things are as torch had them that spring, by its releases 2.3 and 2.4, and are later ones' no more: FSDP2 took what
it reduces from the memory of its own stream (foreach_reduce in _composable/fsdp/_fsdp_collectives.py), where nothing
else can use it, and inductor did not order a graph's nodes by what they need (reorder_for_peak_memory is not in its
config.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch._inductor.config
import torch.distributed
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn import functional as F

from . import Peaks, Program
from .loops import linear, measure
from .torchtitan import Checkpoints, RootNorm, Way, wrap

WIDTH, LAYERS, HEADS, HEAD, INNER, WORDS, TOKENS, POSITIONS = 4096, 32, 32, 128, 11008, 32000, 2048, 65536
RANKS = 8

project = partial(linear, dtype=torch.float32)


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
        self.attention, self.norm1, self.norm2 = Attention(), RootNorm(WIDTH), RootNorm(WIDTH)
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
        self.norm, self.output = RootNorm(WIDTH), project(WIDTH, WORDS)

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


class OwnStream(ReduceScatter):
    """Takes what is reduced from the memory of the stream that reduces, as FSDP2 did until torch 2.4."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a buffer."""
        with torch.cuda.stream(self.root._get_fsdp_state()._comm_ctx.reduce_scatter_stream):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce."""
        return torch.distributed.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def shard(model: Llama, checkpoints: Checkpoints) -> None:
    """Checkpoint and shard each block, then the rest."""
    mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.layers
    for index, block in enumerate(layers):
        layers[index] = wrapped = wrap(block, index, Way(RANKS, checkpoints=checkpoints))
        fully_shard(wrapped, mesh=mesh, mp_policy=precision, reshard_after_forward=index < LAYERS - 1)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_reduce_scatter(OwnStream(model))


class Loop:
    """The training loop."""

    def __init__(self, checkpoints: Checkpoints, *, compiled: bool, batch: int) -> None:
        torch.distributed.init_process_group("nccl")
        self.model, self.batch = Llama(), batch
        shard(self.model, checkpoints)
        self.model.to_empty(device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        if compiled:
            self.model.compile()

    def train(self, steps: int = 4) -> None:
        """Train for a few steps."""
        for _ in range(steps):
            ids, labels = (torch.zeros(self.batch, TOKENS, dtype=torch.int64).cuda() for _ in range(2))
            self.optimizer.zero_grad()
            logits = self.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.optimizer.step()


def train(checkpoints: Checkpoints, *, compiled: bool = False, batch: int = 8) -> Program:
    """The training step of one of eight ranks."""

    def run() -> dict[str, Peaks]:
        with torch._inductor.config.patch(reorder_for_peak_memory=False):
            return {"": measure(Loop(checkpoints, compiled=compiled, batch=batch).train)}

    return Program(run, "", compile="as-is" if compiled else None, ranks=RANKS)
