"""LoRA fine-tuning and generation with LitGPT's models, operator by operator.

Source: Lightning-AI/litgpt, tutorials/resource-tables.md (lit-gpt at 0cc02afa, October 2023, torch 2.1.0) and
config_hub/finetune (April 2024). Parameters are bfloat16. In 2023 the longest example of the data came first, before
the optimizer had any state, so the peak is that of a step without optimizer; in 2024 it comes by chance.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Step
from .loops import leaf, meta

BF16 = torch.bfloat16
EXAMPLES = 8
"""Between optimizer steps, in the configurations of 2024."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model and the form of its layers."""

    width: int
    layers: int
    heads: int
    words: int
    inner: int
    groups: int = 0
    """Heads of keys and values; 0 for as many as of queries."""
    rotary: float = 1.0
    is_llama: bool = True
    """RMS norm and a gated MLP in sequence, without biases; else layer norm and GELU side by side, with biases."""
    shares_norm: bool = False
    has_head_bias: bool = False
    activation: str = "none"
    head_size: int = 0

    @property
    def head(self) -> int:
        """Return the channels of a head."""
        return self.head_size or self.width // self.heads


PHI = {"is_llama": False, "shares_norm": True, "has_head_bias": True, "activation": "tanh"}
MODELS = {
    "phi-1.5": Architecture(2048, 24, 32, 51200, 8192, rotary=0.5, **PHI),
    "phi-2": Architecture(2560, 32, 32, 51200, 10240, rotary=0.4, **PHI),
    "StableLM Alpha 3B": Architecture(4096, 16, 32, 50688, 16384, rotary=0.25, is_llama=False),
    "Llama 2 7B": Architecture(4096, 32, 32, 32000, 11008),
    "Llama 2 13B": Architecture(5120, 40, 40, 32000, 13824),
    "Llama 3 8B": Architecture(4096, 32, 32, 128256, 14336, groups=8),
    "Mistral 7B": Architecture(4096, 32, 32, 32000, 14336, groups=8),
    "TinyLlama": Architecture(2048, 22, 32, 32000, 5632, groups=4),
}


@dataclass(frozen=True)
class Lora:
    """The adapters: their rank, dropout, and the layers they are beside."""

    rank: int
    dropout: float
    beside: Collection[str]


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter beside it where there is one."""

    def __init__(self, inner: int, outer: int, bias: bool, lora: Lora | None) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer, bias=bias, dtype=BF16, device="meta")
        self.lora = lora
        if lora is not None:
            self.dropout = nn.Dropout(lora.dropout)
            self.a, self.b = leaf(lora.rank, inner, dtype=BF16), leaf(outer, lora.rank, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the adapter says."""
        pretrained: Tensor = self.linear(x)
        if self.lora is None:
            return pretrained
        lora = (self.dropout(x) @ self.a.transpose(0, 1) @ self.b.transpose(0, 1)) * 2.0
        return pretrained + lora


class AdaptedQKV(nn.Module):
    """The projection to queries, keys and values, with adapters beside some of the three."""

    def __init__(self, architecture: Architecture, lora: Lora | None) -> None:
        super().__init__()
        groups = architecture.groups or architecture.heads
        outer = (architecture.heads + 2 * groups) * architecture.head
        self.linear = nn.Linear(architecture.width, outer, bias=not architecture.is_llama, dtype=BF16, device="meta")
        sizes = {"query": architecture.heads, "key": groups, "value": groups}
        chosen = [] if lora is None else [name for name in sizes if name in lora.beside]
        self.lora = lora if chosen else None
        if self.lora is not None:
            self.dropout = nn.Dropout(self.lora.dropout)
            self.parts, self.is_grouped = len(chosen), groups != architecture.heads
            self.sizes = [sizes[name] * architecture.head for name in chosen]
            self.a = leaf(self.lora.rank * self.parts, architecture.width, dtype=BF16)
            self.b = leaf(sum(self.sizes), self.lora.rank, dtype=BF16)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply each part by its own matrix, as a convolution."""
        if not self.is_grouped:
            return F.conv1d(x, weight, groups=self.parts)
        pairs = zip(x.chunk(self.parts, dim=1), weight.split(self.sizes), strict=True)
        return torch.cat([F.conv1d(a, b) for a, b in pairs], dim=1)

    def pad(self, x: Tensor) -> Tensor:
        """Put the parts where they belong among queries, keys and values, and zeros elsewhere."""
        if self.parts == 3:
            return x
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.linear.out_features))
        result = result.view(-1, self.linear.out_features)
        index = torch.zeros(sum(self.sizes), dtype=torch.int64, device=result.device)
        result = result.index_copy(1, index, x.reshape(-1, sum(self.sizes)))
        return result.view((*x.shape[:-1], self.linear.out_features)).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the adapters say."""
        pretrained: Tensor = self.linear(x)
        if self.lora is None:
            return pretrained
        after_a = F.linear(self.dropout(x), self.a)
        after_b = self.convolve(after_a.transpose(-2, -1), self.b.unsqueeze(-1)).transpose(-2, -1)
        lora = self.pad(after_b) * 2.0
        return pretrained + lora


class RootNorm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = leaf(width, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        dtype = x.dtype
        x = x.float()
        norm = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(norm + 1e-5)
        return (self.weight * normed).to(dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channels by float16 tables, so in float32."""
    half = x.size(-1) // 2
    first = x[..., :half]
    second = x[..., half:]
    rotated = torch.cat((-second, first), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.type_as(x)


class Attention(nn.Module):
    """Causal attention with rotary embeddings of some of the channels."""

    def __init__(self, architecture: Architecture, lora: Lora | None) -> None:
        super().__init__()
        self.architecture = architecture
        self.attn = AdaptedQKV(architecture, lora)
        of_projection = lora if lora is not None and "projection" in lora.beside else None
        inner = architecture.heads * architecture.head
        self.proj = AdaptedLinear(inner, architecture.width, not architecture.is_llama, of_projection)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend."""
        batch, tokens, _ = x.size()
        model = self.architecture
        groups, turned = model.groups or model.heads, cos.size(-1)
        qkv = self.attn(x)
        per_group = model.heads // groups
        qkv = qkv.view(batch, tokens, groups, per_group + 2, model.head)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_group, 1, 1), dim=2)
        if groups != 1:
            k = k.expand(batch, groups, per_group, tokens, model.head)
            v = v.expand(batch, groups, per_group, tokens, model.head)
        q = q.reshape(batch, -1, tokens, model.head)
        k = k.reshape(batch, -1, tokens, model.head)
        v = v.reshape(batch, -1, tokens, model.head)
        q_turned = rotate(q[..., :turned], cos, sin)
        k_turned = rotate(k[..., :turned], cos, sin)
        q = torch.cat((q_turned, q[..., turned:]), dim=-1)
        k = torch.cat((k_turned, k[..., turned:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = y.reshape(batch, tokens, -1)
        output: Tensor = self.proj(y)
        return output


class MLP(nn.Module):
    """The gated MLP of Llama, or one with GELU."""

    def __init__(self, architecture: Architecture, lora: Lora | None) -> None:
        super().__init__()
        self.architecture = architecture
        width, inner, bias = architecture.width, architecture.inner, not architecture.is_llama
        beside = lora if lora is not None and "mlp" in lora.beside else None
        self.fc_1 = AdaptedLinear(width, inner, bias, beside)
        if architecture.is_llama:
            self.fc_2 = AdaptedLinear(width, inner, bias, beside)
        self.proj = AdaptedLinear(inner, width, bias, beside)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it; names are bound as in the published code."""
        if self.architecture.is_llama:
            x_fc_1 = self.fc_1(x)
            x_fc_2 = self.fc_2(x)
            x = F.silu(x_fc_1) * x_fc_2
        else:
            x = self.fc_1(x)
            x = F.gelu(x, approximate=self.architecture.activation)
        output: Tensor = self.proj(x)
        return output


class Block(nn.Module):
    """A layer."""

    def __init__(self, architecture: Architecture, lora: Lora | None) -> None:
        super().__init__()
        self.architecture = architecture
        self.norm_1 = make_norm(architecture)
        self.attn = Attention(architecture, lora)
        if not architecture.shares_norm:
            self.norm_2 = make_norm(architecture)
        self.mlp = MLP(architecture, lora)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply attention and MLP, side by side or one after the other."""
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if not self.architecture.is_llama:
            n_2 = n_1 if self.architecture.shares_norm else self.norm_2(x)
            x = x + h + self.mlp(n_2)
        else:
            x = x + h
            x = x + self.mlp(self.norm_2(x))
        return x


def make_norm(architecture: Architecture) -> nn.Module:
    """Make the norm of an architecture."""
    if architecture.is_llama:
        return RootNorm(architecture.width)
    return nn.LayerNorm(architecture.width, dtype=BF16, device="meta")


class GPT(nn.Module):
    """A model with adapters; all else is frozen. Logits are computed by 128 tokens, and so is the loss."""

    def __init__(self, architecture: Architecture, lora: Lora | None, tokens: int) -> None:
        super().__init__()
        beside_head = lora if lora is not None and "head" in lora.beside else None
        self.head = AdaptedLinear(architecture.width, architecture.words, architecture.has_head_bias, beside_head)
        self.words = nn.Embedding(architecture.words, architecture.width, dtype=BF16, device="meta")
        self.blocks = nn.ModuleList([Block(architecture, lora) for _ in range(architecture.layers)])
        self.norm = make_norm(architecture)
        turned = int(architecture.rotary * architecture.head)
        for name in ("cos", "sin"):
            self.register_buffer(name, meta(tokens, turned, dtype=torch.float16))
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.endswith((".a", ".b"))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        """Return the loss, or the logits where there are no targets."""
        cos = self.cos[: ids.size(1)]
        sin = self.sin[: ids.size(1)]
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        return self.finish(self.split_head(x), targets)

    def split_head(self, x: Tensor) -> list[Tensor]:
        """Compute the logits of 128 tokens each."""
        return [self.head(part) for part in x.split(128, dim=1)]

    def finish(self, chunks: list[Tensor], targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss; Lightning Fabric makes float32 of what a module with 16-bit parameters returns."""
        logits = [chunk.to(torch.float32) for chunk in chunks]
        chunks.clear()
        logits[-1] = logits[-1][..., :-1, :]
        return chunked_loss(logits, targets[..., 1:]), logits


def chunked_loss(logits: list[Tensor], targets: Tensor) -> Tensor:
    """The mean of the cross entropies by 128 tokens."""
    logit_chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    target_chunks = [chunk.reshape(-1) for chunk in targets.split(logits[0].size(1), dim=1)]
    losses = [
        F.cross_entropy(chunk, target, ignore_index=-1, reduction="none")
        for chunk, target in zip(logit_chunks, target_chunks, strict=True)
    ]
    return torch.cat(losses).mean()


ALL_LAYERS = "query key value projection mlp head"


def finetune(
    model: str,
    batch: int,
    tokens: int,
    *,
    rank: int = 8,
    dropout: float = 0.05,
    beside: str = "query value",
    is_first: bool = True,
) -> Step:
    """A micro-batch of LoRA fine-tuning over rows of the longest example, before the optimizer has any state or after.

    The loss is divided by the micro-batches.
    """
    made = GPT(MODELS[model], Lora(rank, dropout, (ALL_LAYERS if beside == "all" else beside).split()), tokens)
    inputs = (meta(batch, tokens, dtype=torch.int64), meta(batch, tokens, dtype=torch.int64))
    options = {"optimizer": None} if is_first else {"optimizer": "adamw", "accumulate": EXAMPLES // batch}
    return Step(made, inputs, {"mode": "train", "loss": lambda out: out[0] / 32, **options})


def generate(model: str, prompt: int = 6, new: int = 50) -> Step:
    """The first forward of a generation, over the whole prompt, with the cache of keys and values beside it."""
    architecture = MODELS[model]
    made = GPT(architecture, None, prompt + new)
    shape = (1, architecture.heads, prompt + new, architecture.head)
    for layer in range(architecture.layers):
        for name in ("keys", "values"):
            made.register_buffer(f"{name}{layer}", meta(*shape, dtype=BF16))
    return Step(made, (meta(1, prompt, dtype=torch.int64),), {"mode": "infer"})
