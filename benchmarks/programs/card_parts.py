"""What scripts of `card_programs` have in common: what they print, a small language model, steps of random lengths,
DeepSpeed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def show(what: str) -> None:
    """The peaks since the last call."""
    print(what, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()


def probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of each token that was taken, in logarithms."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.gather(F.log_softmax(logits.float(), -1), 2, ids[:, 1:, None])[..., 0]


class Block(nn.Module):
    """A causal decoder block."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then a feed-forward block."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, layers: int = 6, width: int = 768) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = self.run(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return block(x)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    lengths: Sequence[int] = (1024,) * 5,
    step: Callable[[], Any] | None = None,
) -> None:
    """Five steps of a `Decoder`, each with what the card's allocator says after it."""
    for number, length in enumerate(lengths):
        torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(0, 32000, (4, length), device="cuda")
        loss = model(ids)
        loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()
        print(
            number, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
        )


def train_on_lengths(steps: int, every: int) -> None:
    """Steps of random lengths; every so many, what the card's allocator says."""
    random.seed(0)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(8192, 512), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(512, 8192)
    )
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        ids = torch.randint(0, 8192, (8, random.randint(16, 1024)), device="cuda")
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            print(step, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
    print(torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_stats()["num_device_alloc"])


def train_with_deepspeed(port: int, zero: dict[str, Any], **more: Any) -> None:
    """One rank in bfloat16, with DeepSpeed's own optimizer around torch's."""
    import deepspeed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())])
    configuration = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **more,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    print("made", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        loss = engine(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        print(step, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
