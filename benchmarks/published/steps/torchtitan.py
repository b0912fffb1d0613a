"""One rank of torchtitan's Llama 3.1, sharded with FSDP2, of 70 billion parameters with tensor parallel, too.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, of commit 9dec370 (December 2024): parameters
in float32, computation in bfloat16, gradients reduced in float32, AdamW, 8,192 tokens, a local batch of 2.
Checkpoints are its "selective op": attention, reduce-scatter and every other product are kept. The last block stays
whole between forward and backward, as the root does; the logits are deleted before backward. "Memory" is the peak of
reserved bytes, the largest of all ranks. With float8 all linear layers but the output compute in it by torchao, scaled
by tensor, and their weights are gathered in it. Since 2025 the loss is compiled as well. RMS norm is written out
(torchtitan/models/norms.py), until 3b39d7ab took torch's own in March 2025.
Tensor parallel has sequence parallel between the blocks' parts and parallel logits and loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._attention import _enable_context_parallel_dispatcher
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from . import Step
from .loops import leaf, linear, meta

HEAD, WORDS, TOKENS = 128, 128256, 8192


class Size(NamedTuple):
    """Of a model."""

    width: int
    layers: int
    heads: int
    groups: int
    inner: int


SIZES = {"8B": Size(4096, 32, 32, 8, 14336), "70B": Size(8192, 80, 64, 8, 28672)}
KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
CUDNN = frozenset({torch.ops.aten._scaled_dot_product_cudnn_attention.default})
"""Not in their list: newer releases take it for flash attention."""


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn pairs of channels in float32, as complex numbers."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table.view(1, -1, 1, HEAD // 2)
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Attention(nn.Module):
    """Attention with grouped keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.repeats = size.heads // size.groups
        self.wq, self.wo = (linear(size.width, size.width, dtype=torch.float32) for _ in "qo")
        self.wk, self.wv = (linear(size.width, size.groups * HEAD, dtype=torch.float32) for _ in "kv")
        self.ring: DeviceMesh | None = None
        """Of the ranks that share a sequence."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Attend to what came before."""
        batch, tokens, _ = x.shape
        q, k, v = (each(x).view(batch, tokens, -1, HEAD) for each in (self.wq, self.wk, self.wv))
        q, k = rotate(q, table), rotate(k, table)
        k, v = (
            each[:, :, :, None, :].expand(-1, -1, -1, self.repeats, -1).reshape(batch, tokens, -1, HEAD)
            for each in (k, v)
        )
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        output: Tensor = self.wo(y.transpose(1, 2).contiguous().view(batch, tokens, -1))
        return output

    def attend(self, *parts: Tensor) -> Tensor:
        """Attention itself; over a ring as `context_parallel` has it."""
        if self.ring is None:
            return F.scaled_dot_product_attention(*parts, is_causal=True)
        whole = (DTensor.from_local(each, self.ring, [Shard(2)], run_check=False) for each in parts)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):  # as `get_train_context` has it
            found: Any = F.scaled_dot_product_attention(*whole, is_causal=True)
        output: Tensor = found.to_local()
        return output


class FeedForward(nn.Module):
    """The gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w3 = (linear(size.width, size.inner, dtype=torch.float32) for _ in range(2))
        self.w2 = linear(size.inner, size.width, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class RootNorm(nn.Module):
    """RMS norm in float32, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = leaf(width)

    def normalise(self, x: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.normalise(x.float()).type_as(x) * self.weight


Norm = Callable[[int], nn.Module]
"""Makes a norm of this width."""

own_norm: Norm = partial(nn.RMSNorm, eps=1e-5, device="meta")
"""Torch's."""


class Block(nn.Module):
    """A layer."""

    def __init__(self, size: Size, norm: Norm) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(size), FeedForward(size)
        self.attention_norm, self.ffn_norm = norm(size.width), norm(size.width)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Apply attention and MLP."""
        h = x + self.attention(self.attention_norm(x), table)
        output: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return output


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class Llama(nn.Module):
    """Ends with the loss, so that nothing keeps the logits over backward."""

    def __init__(self, size: Size, tokens: int = TOKENS, norm: Norm = RootNorm, context: int = 1) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, size.width, device="meta")
        self.share = tokens // context
        names = ("table", "whole_table") if context > 1 else ("table",)  # `context_parallel` copies what it restores
        for name in names:
            table = torch.empty(tokens, HEAD // 2, dtype=torch.complex64, device="meta")
            self.register_buffer(name, table, persistent=False)
        self.layers = nn.ModuleList(Block(size, norm) for _ in range(size.layers))
        self.norm = norm(size.width)
        self.output = linear(size.width, WORDS, dtype=torch.float32)
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h, self.table[: self.share])
        return self.loss(self.output(self.norm(h)), labels)


def keep_every_other_product(kept: frozenset[Any]) -> Any:
    """Make the two contexts of a checkpointed block."""
    products: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if function == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


Checkpoints = Literal["selective", "full", "every second", "none"]


def compute_in_float8(model: nn.Module, *, by_row: bool) -> None:
    """All linear layers but the output compute in float8; FSDP gathers their weights in it unless scaled by row."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    by_tensor = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    config = Float8LinearConfig.from_recipe_name("rowwise") if by_row else by_tensor
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")


def wrap(block: nn.Module, index: int, way: Way) -> nn.Module:
    """Checkpoint a block, or leave it."""
    if way.checkpoints == "none" or (way.checkpoints == "every second" and index % 2 == 0):
        return block
    kept = KEPT | CUDNN if way.keeps_cudnn else KEPT
    settings = {"context_fn": partial(keep_every_other_product, kept)} if way.checkpoints == "selective" else {}
    return checkpoint_wrapper(block, preserve_rng_state=False, **settings)


def split(model: Llama, mesh: DeviceMesh, *, float8: bool) -> None:
    """Tensor parallel: outside of attention and MLP the tokens are spread, after the last norm the words."""
    from torchao.float8 import float8_tensor_parallel as in_float8

    columns: Any = in_float8.Float8ColwiseParallel if float8 else ColwiseParallel
    rows: Any = in_float8.Float8RowwiseParallel if float8 else RowwiseParallel
    gathered: Any = in_float8.PrepareFloat8ModuleInput if float8 else PrepareModuleInput
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for block in model.layers:
        parts = {
            "attention_norm": SequenceParallel(),
            "attention": gathered(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{f"attention.{name}": columns() for name in ("wq", "wk", "wv")},
            "attention.wo": rows(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": gathered(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"feed_forward.{name}": columns() for name in ("w1", "w3")},
            "feed_forward.w2": rows(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, parts)
    loss_parallel().__enter__()  # for backward, too; only losses of DTensors notice


class Way(NamedTuple):
    """How a step is spread, computed and checkpointed."""

    ranks: int
    parts: int = 1
    """Of tensor parallel."""
    compiled: bool = False
    float8: bool = False
    by_row: bool = False
    """How float8 is scaled; else by tensor."""
    checkpoints: Checkpoints = "selective"
    compiled_loss: bool = False
    fused: bool = False
    """AdamW, the default since February 2025 (6e498855)."""
    keeps_cudnn: bool = True
    """Whether selective checkpoints keep cuDNN's attention, as they keep flash attention."""
    splits_ends: bool = False
    """Embeddings and head are sharded by themselves, every block is whole for its own time only (since 83e69410)."""
    torch_norm: bool = False
    """RMS norm is torch's own (since 3b39d7ab)."""
    context: int = 1
    """Ranks that share a sequence, by torch's `context_parallel`; FSDP shards over these, too."""


def shard(model: nn.Module, way: Way) -> nn.Module:
    """Checkpoint, compile and shard each block, then shard the rest."""
    shape = {"fsdp": way.ranks // way.parts, **({"tp": way.parts} if way.parts > 1 else {})}
    whole = init_device_mesh("cuda", tuple(shape.values()), mesh_dim_names=tuple(shape))
    mesh = whole["fsdp"]
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert isinstance(model, Llama)
    if way.float8:
        compute_in_float8(model, by_row=way.by_row)
    if way.context > 1:
        ring = init_device_mesh("cuda", (way.ranks // way.context, way.context), mesh_dim_names=("dp", "cp"))["cp"]
        _enable_context_parallel_dispatcher()  # only attention on DTensors notices
        for block in model.layers:
            block.attention.ring = ring
    if way.parts > 1:
        split(model, whole["tp"], float8=way.float8)
    if way.compiled_loss:
        model.loss = torch.compile(cross_entropy)
    for index, block in enumerate(model.layers):
        wrapped: Any = wrap(block, index, way)
        if way.compiled:
            wrapped = torch.compile(wrapped, fullgraph=True)
        model.layers[index] = wrapped
        reshard = way.splits_ends or index < len(model.layers) - 1
        fully_shard(wrapped, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    if way.splits_ends:
        fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        fully_shard([model.norm, model.output], mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return model


def train(ranks: int, batch: int = 2, tokens: int = TOKENS, size: str = "8B", **ways: Any) -> Step:
    """The training step of one of these ranks, its blocks compiled or not.

    Args:
        ranks: of the world.
        batch: of the rank.
        tokens: of a sequence.
        size: a name of `SIZES`.
        ways: what else `Way` has.
    """
    way = Way(ranks, **ways)
    ids = meta(batch, tokens // way.context, dtype=torch.int64)
    options = {
        "mode": "train",
        "optimizer": "adamw:fused" if way.fused else "adamw",
        "ranks": ranks,
        "rank": 0,
        "parallelize": partial(shard, way=way),
        "compile": "as-is" if way.compiled else None,
    }
    model = Llama(SIZES[size], tokens, own_norm if way.torch_norm else RootNorm, way.context)
    return Step(model, (ids, ids), {**options, "loss": lambda output: output})
