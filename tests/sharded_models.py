"""A small Llama in plain PyTorch, and the ways it is spread over ranks: as a training script has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fxmem.simulation.ranks.mesh_plan import MeshPlan, read_mesh

WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH = 64, 4, 250, 32, 2


class Attention(nn.Module):
    """Causal attention without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many heads as this rank has."""
        batch, length, _ = x.shape
        heads = [each(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        out: torch.Tensor = self.o(attended.transpose(1, 2).contiguous().view(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate, multiply, project."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward, each beside a residual."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Three layers."""

    tp_plan: ClassVar = {
        "embedding": "embedding_rowwise",
        **dict.fromkeys((f"layers.*.attention.{each}" for each in "qkv"), "colwise"),
        **dict.fromkeys((f"layers.*.feed_forward.{each}" for each in ("w1", "w3")), "colwise"),
        **dict.fromkeys(("layers.*.attention.o", "layers.*.feed_forward.w2"), "rowwise"),
        "output": "colwise_gather_output",
    }

    def __init__(self, layers: int = 3, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def tokens() -> torch.Tensor:
    """A batch."""
    return torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


def loss(logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy against zeros."""
    labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def shard_fully(model: Any, mesh: Any, *, half: bool = False, offload: bool = False, reshard: bool = True) -> None:
    """FSDP2 by layer."""
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if half:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def split_tensors(model: Any, mesh: Any, *, sequence: bool = True) -> None:
    """Tensor parallel, with sequence parallel unless it is off."""
    along: Any = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "output": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        plan = {
            "attention": PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
            "feed_forward": PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
            **dict.fromkeys(("attention.q", "attention.k", "attention.v"), ColwiseParallel()),
            **dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), ColwiseParallel()),
            **dict.fromkeys(("attention.o", "feed_forward.w2"), RowwiseParallel(output_layouts=along)),
        }
        if sequence:
            plan.update(dict.fromkeys(("attention_norm", "feed_forward_norm"), SequenceParallel()))
        parallelize_module(layer, mesh, plan)


def _keep_products(*_: Any) -> Any:
    """Matrix products are saved, all else is recomputed."""
    products = [torch.ops.aten.mm.default]
    return create_selective_checkpoint_contexts(products)


def checkpoint_layers(model: Any, *, selective: bool = False) -> None:
    """Each layer is recomputed in backward, or what are no products of it."""
    settings: dict[str, Any] = {"context_fn": _keep_products} if selective else {}
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False, **settings)


def compile_layers(model: Any, *, in_place: bool) -> None:
    """Each layer is compiled, in place or in a wrapper; FSDP2's hooks stay outside of its graph."""
    for number, layer in enumerate(model.layers):
        if in_place:
            layer.compile(fullgraph=True)
        else:
            model.layers[number] = torch.compile(layer, fullgraph=True)


def fsdp(
    device: str,
    *,
    checkpoint: bool = False,
    selective: bool = False,
    compiled: Literal["in place", "wrapped", None] = None,
    **settings: bool,
) -> Callable[[Any], Any]:
    """FSDP2 over all ranks."""

    def parallelize(model: Any) -> Any:
        if checkpoint or selective:
            checkpoint_layers(model, selective=selective)
        if compiled is not None:
            compile_layers(model, in_place=compiled == "in place")
        shard_fully(model, init_device_mesh(device, (torch.distributed.get_world_size(),)), **settings)
        return model

    return parallelize


def fsdp1(device: str, *, checkpoint: bool = False, half: bool = False, **settings: Any) -> Callable[[Any], Any]:
    """FullyShardedDataParallel by layer over all ranks."""
    if half:
        settings["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)

    def parallelize(model: Any) -> Any:
        policy = ModuleWrapPolicy({Block})
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device(device, 0 if device == "cuda" else None), **settings
        )
        if checkpoint:
            wrap = functools.partial(checkpoint_wrapper, preserve_rng_state=False)
            apply_activation_checkpointing(wrapped, wrap, lambda module: isinstance(module, Block))
        return wrapped

    return parallelize


def hsdp(device: str) -> Callable[[Any], Any]:
    """FSDP2 over half of the ranks, replicated over two."""

    def parallelize(model: Any) -> Any:
        world = torch.distributed.get_world_size()
        mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "fsdp"))
        shard_fully(model, mesh)
        return model

    return parallelize


def tp(device: str, *, sequence: bool = True) -> Callable[[Any], Any]:
    """Tensor parallel over all ranks."""

    def parallelize(model: Any) -> Any:
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
        split_tensors(model, mesh, sequence=sequence)
        return model

    return parallelize


def compiled_tp(device: str, *, sequence: bool = True) -> Callable[[Any], Any]:
    """Tensor parallel in layers that are compiled."""

    def parallelize(model: Any) -> Any:
        compile_layers(tp(device, sequence=sequence)(model), in_place=True)
        return model

    return parallelize


def fsdp_tp(device: str, *, checkpoint: bool = False, half: bool = True) -> Callable[[Any], Any]:
    """Tensor parallel over two ranks, FSDP2 over the others."""

    def parallelize(model: Any) -> Any:
        world = torch.distributed.get_world_size()
        mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
        split_tensors(model, mesh["tp"])
        if checkpoint:
            checkpoint_layers(model)
        shard_fully(model, mesh["fsdp"], half=half)
        return model

    return parallelize


class Wide(nn.Module):
    """More parameters than results: four layers on the mean of all tokens, of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, WIDTH)) for _ in range(4)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x.mean((0, 1), keepdim=True))
        out: torch.Tensor = self.output(x)
        return out


def ddp(device: str, compiles: str) -> Callable[[Any], Any]:
    """Buckets of the smallest size that dynamo splits by, the model compiled before or after it is wrapped."""

    def parallelize(_: Any) -> Any:
        model: Any = torch.compile(Wide()) if compiles == "before" else Wide()
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        return torch.compile(model) if compiles == "after" else model

    return parallelize


def mesh(words: str, **settings: Any) -> Callable[[str], Callable[[Any], Any]]:
    """The plan of `--mesh`."""
    return lambda _: MeshPlan(read_mesh(words), **settings)


Configuration = tuple[int, int, Callable[[str], Callable[[Any], Any]], dict[str, Any]]
"""World, rank, what shards the model for a device, and the step's settings."""
CONFIGURATIONS: Final[dict[str, Configuration]] = {
    "fsdp": (2, 1, fsdp, {}),
    "fsdp, bf16 with fp32 reduction": (4, 3, lambda device: fsdp(device, half=True), {}),
    "fsdp, uneven shards, the last rank": (3, 2, lambda device: fsdp(device, half=True), {}),
    "fsdp, no resharding": (2, 0, lambda device: fsdp(device, reshard=False), {}),
    "fsdp, checkpointed": (2, 0, lambda device: fsdp(device, checkpoint=True, half=True), {}),
    "fsdp, selectively checkpointed": (2, 1, lambda device: fsdp(device, selective=True), {}),
    "fsdp, accumulation": (2, 1, fsdp, {"accumulate": 2}),
    "fsdp, uneven, accumulation": (3, 2, lambda device: fsdp(device, half=True), {"accumulate": 3}),
    "fsdp, inference": (2, 0, fsdp, {"mode": "infer"}),
    "fsdp1": (2, 1, fsdp1, {}),
    "fsdp1, bf16 with fp32 reduction": (3, 2, lambda device: fsdp1(device, half=True, use_orig_params=True), {}),
    "fsdp1, no resharding": (2, 0, lambda device: fsdp1(device, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), {}),
    "fsdp1, checkpointed": (2, 0, lambda device: fsdp1(device, checkpoint=True, use_orig_params=True), {}),
    "fsdp1, accumulation": (2, 1, fsdp1, {"accumulate": 2}),
    "fsdp1, inference": (2, 0, fsdp1, {"mode": "infer"}),
    "hsdp": (4, 2, hsdp, {}),
    "tp": (2, 1, lambda device: tp(device, sequence=False), {}),
    "tp with sequence parallel": (2, 0, tp, {}),
    "fsdp x tp, checkpointed": (8, 7, lambda device: fsdp_tp(device, checkpoint=True), {}),
    "mesh of fsdp": (4, 1, mesh("fsdp=4", precision="bf16"), {}),
    "mesh of fsdp, no resharding": (2, 1, mesh("fsdp=2", reshard_after_forward=False), {}),
    "mesh of replicate, fsdp and tp": (8, 5, mesh("replicate=2,fsdp=2,tp=2"), {}),
    "mesh of tp": (4, 3, mesh("tp=4"), {}),
}
COMPILED: Final[dict[str, Configuration]] = {
    "fsdp, compiled layers": (2, 0, lambda device: fsdp(device, compiled="in place"), {}),
    "fsdp, compiled layers, no resharding": (2, 1, lambda device: fsdp(device, compiled="in place", reshard=False), {}),
    "fsdp, compiled checkpoints": (2, 1, lambda device: fsdp(device, compiled="wrapped", selective=True), {}),
    "fsdp, compiled layers, bf16": (3, 2, lambda device: fsdp(device, compiled="wrapped", half=True), {}),
    "fsdp, compiled layers, accumulation": (2, 1, lambda device: fsdp(device, compiled="in place"), {"accumulate": 2}),
    "fsdp, compiled layers, inference": (2, 1, lambda device: fsdp(device, compiled="in place"), {"mode": "infer"}),
    "fsdp, compiled whole": (2, 0, lambda device: lambda model: torch.compile(fsdp(device)(model)), {}),
    "ddp, compiled": (2, 0, lambda device: ddp(device, compiles="after"), {}),
    "ddp, compiled within": (2, 1, lambda device: ddp(device, compiles="before"), {}),
    "tp, compiled layers": (2, 1, lambda device: compiled_tp(device, sequence=False), {}),
    "tp with sequence parallel, compiled layers": (2, 0, compiled_tp, {}),
}
"""What `torch.compile` is in."""
HALF: Final = (
    *("fsdp, bf16 with fp32 reduction", "fsdp, uneven shards, the last rank", "fsdp, uneven, accumulation"),
    *("fsdp, checkpointed", "fsdp x tp, checkpointed", "mesh of fsdp", "fsdp, compiled layers, bf16"),
    "fsdp1, bf16 with fp32 reduction",
)
"""Those that compute in bfloat16."""
PRODUCTS: Final = "aten.mm.default", "aten.bmm.default"
"""For which oneDNN lays out operands anew, as the machine wants them, where they are in bfloat16."""
