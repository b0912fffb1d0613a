"""The whole of torch-preflight's measurement of a card: one case after the other, in one process.

Source: highwaterlabs/torch-preflight, tests/calibration/measure_cuda.py. What ran before decides what is reserved:
cuBLAS's workspaces lie in segments that `empty_cache` does not free, and the next case fills these. It takes bfloat16
where `torch.cuda.is_bf16_supported()`, which includes emulation and so is true on a T4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Peaks, Program
from .loops import measure


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        bias = dropout > 0
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.drop = nn.Dropout(dropout) if bias else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then apply the MLP."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        y = self.norm_1(x)
        q = self.q(y).view(shape).transpose(1, 2)
        k = self.k(y).view(shape).transpose(1, 2)
        v = self.v(y).view(shape).transpose(1, 2)
        if self.fused:
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            attended = self.drop(((q @ k.transpose(-2, -1)) / math.sqrt(shape[-1])).softmax(-1)) @ v
        x = x + self.drop(self.o(attended.transpose(1, 2).reshape(batch, tokens, width)))
        result: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))
        return result


SYNTHETIC = (
    (4, 512, 8, 2048, 4, 256, 0.0, False),
    (6, 768, 12, 3072, 8, 512, 0.1, False),
    (6, 768, 12, 3072, 4, 1024, 0.0, True),
    (12, 768, 12, 3072, 2, 512, 0.0, False),
    (4, 1024, 16, 4096, 2, 1024, 0.0, True),
)
"""Layers, width, heads, inner width, batch, tokens, dropout, fused attention."""
MODELS = ("GPT2LMHeadModel", "DistilBertModel", "BertModel", "resnet50")


def train_twice(model: nn.Module, call: Callable[[nn.Module], tuple[Any, Tensor]]) -> Peaks:
    """Measure the second of two steps under autocast with AdamW.

    `call` returns what the script's variable keeps through backward, and the loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _kept, loss = call(model)
        loss.backward()
        optimizer.step()

    step()
    return measure(step)


def use_libraries() -> None:
    """Multiply and convolve, as the script does before everything else."""
    a = torch.randn(256, 256, device="cuda")
    (a @ a).sum().item()
    layer = nn.Conv2d(3, 16, 3, padding=1).cuda()
    layer(torch.randn(1, 3, 64, 64, device="cuda")).sum().backward()


def synthetic(layers: int, width: int, heads: int, inner: int, batch: int, tokens: int, *further: float) -> Peaks:
    """Train a stack of layers."""
    dropout, fused = further
    stack = nn.Sequential(*(Block(width, heads, inner, dropout, bool(fused)) for _ in range(layers))).cuda()
    x = torch.randn(batch, tokens, width, device="cuda")
    return train_twice(stack, lambda model: (None, model(x).float().pow(2).mean()))


def language(name: str, batch: int, tokens: int) -> Peaks:
    """Train a model of transformers."""
    import transformers

    cls = getattr(transformers, name)
    made = cls(cls.config_class()).cuda().train()
    ids = torch.randint(0, 30000, (batch, tokens), device="cuda")

    def call(model: nn.Module) -> tuple[Any, Tensor]:
        has_head = name == "GPT2LMHeadModel"
        out = model(input_ids=ids, labels=ids) if has_head else model(input_ids=ids)
        return out, out.loss if has_head else out.last_hidden_state.float().pow(2).mean()

    return train_twice(made, call)


def vision(name: str, batch: int) -> Peaks:
    """Train a classifier of torchvision."""
    import torchvision

    made = getattr(torchvision.models, name)().cuda()
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    return train_twice(made, lambda model: (None, F.cross_entropy(model(images), labels)))


def run_script(last: str) -> dict[str, Peaks]:
    """Run the cases up to those of a model, each from an empty cache."""
    use_libraries()
    for case in SYNTHETIC:
        torch.cuda.empty_cache()
        synthetic(*case)
    found = {}
    for name in MODELS[: MODELS.index(last) + 1]:
        for batch, tokens in ((16, 0), (32, 0)) if name == "resnet50" else ((4, 128), (8, 256)):
            torch.cuda.empty_cache()
            found[f"{name} {batch}"] = language(name, batch, tokens) if tokens else vision(name, batch)
    return found


@lru_cache
def script_until(last: str) -> Callable[[], dict[str, Peaks]]:
    """The script up to the cases of a model, the same function each time."""
    return partial(run_script, last)


def case(model: str, batch: int, tokens: int = 0) -> Program:
    """Make the script up to a model, of which one case is compared."""
    return Program(script_until(model), f"{model} {batch}")
