"""Compiled steps: predicted on FakeTensors, and as a real run of inductor's code allocates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxmem
from tests.simulation.compiled.real import measure_compiled


class Block(nn.Module):
    """Attention and an MLP, with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: torch.Tensor = x + self.mlp(x)
        return out


class Language(nn.Module):
    """A block between tied embeddings, with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.block = Block()
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(ids))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def language() -> tuple[nn.Module, Any, dict[str, Any]]:
    return Language(), torch.zeros(4, 32, dtype=torch.int64), {"optimizer": "adamw"}


def convolutions() -> tuple[nn.Module, Any, dict[str, Any]]:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten())
    return nn.Sequential(*layers), torch.zeros(4, 3, 16, 16), {"optimizer": "sgd-momentum"}


def inference() -> tuple[nn.Module, Any, dict[str, Any]]:
    return Block(), torch.zeros(4, 32, 64), {"mode": "infer"}


CASES = (language, convolutions, inference)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_predicted_bytes_are_those_of_a_real_compiled_step(
    case: Callable[[], tuple[nn.Module, Any, dict[str, Any]]],
) -> None:
    model, inputs, settings = case()
    analysis = fxmem.analyze(model, inputs, target="cpu", compile=True, **settings)
    real = measure_compiled(model, inputs, **settings)
    assert analysis.peak.requested_bytes == real.peak_without_kernel_scratch_bytes
    assert analysis.profile.step.compiled is not None
    assert analysis.profile.step.compiled.kernels > 0
    assert len(analysis.profile.step.compiled.breaks) == (case is language)
