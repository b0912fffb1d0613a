"""The language model of eight committed memory snapshots, operator by operator.

Source: Wedsonlin/assignment2-systems, results/*.pickle and cs336_systems/nsys_profile.py: 24 layers, 405 million
parameters, AdamW written by hand, one steady round after five. Requested is the highest running sum of the file's
events upon what its last state leaves for the start; reserved is the sum of its segments, which all rounds have left:
for these the whole script runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fxmem.memory.allocator.blocks import AddressSpace

from . import Peaks, Program, Step
from .loops import leaf, measure, meta

BATCH, WIDTH, INNER, LAYERS, HEADS, WORDS = 4, 1024, 4096, 24, 16, 10000
WARM_UP = 5
"""Rounds before the one that is measured."""


class Weight(nn.Module):
    """A weight alone."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = leaf(*shape)


class Projection(Weight):
    """A linear layer by `einsum`."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class RootNorm(Weight):
    """RMS norm in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; `x` is rebound."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


def softmax(x: Tensor) -> Tensor:
    """Softmax of the last dimension, step by step."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    raised = torch.exp(shifted)
    return raised / torch.sum(raised, dim=-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    """Log-softmax of the last dimension, step by step."""
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over tokens."""
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def swish(x: Tensor) -> Tensor:
    """The activation of the MLP."""
    return x * torch.sigmoid(x)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of channels by the angles of their positions."""
    halves = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).permute(4, 0, 1, 2, 3)
    a, b = halves.unbind(0)
    cos, sin = angles[:, : x.size(-2), :].unbind(0)
    first = cos * a - sin * b
    second = sin * a + cos * b
    return torch.cat((first, second), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by two `einsum` and a softmax."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class Block(nn.Module):
    """A layer: attention and a gated MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Projection(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.gate = Projection(INNER, WIDTH), Projection(WIDTH, INNER), Projection(INNER, WIDTH)
        self.norm1, self.norm2 = RootNorm(WIDTH), RootNorm(WIDTH)

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        """Causal attention."""
        batch, tokens, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.reshape(batch, tokens, HEADS, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        q = rotate(q, angles)
        k = rotate(k, angles)
        places = torch.arange(tokens, device=x.device)
        mask = places.unsqueeze(1) >= places.unsqueeze(0)
        mask = mask[None, ...]
        out = attend(q, k, v, mask)
        out = out.permute(0, 2, 1, 3).reshape(batch, tokens, -1).contiguous()
        output: Tensor = self.o(out)
        return output

    def mlp(self, x: Tensor) -> Tensor:
        """The gated MLP."""
        output: Tensor = self.down(swish(self.up(x)) * self.gate(x))
        return output

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Add both parts; the names stay bound until the block returns, as the published ones do."""
        inner = self.attention(self.norm1(x), angles)
        attended = x + inner
        fed = self.mlp(self.norm2(attended))
        return attended + fed


class Angles(nn.Module):
    """The angles of all positions."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.register_buffer("table", meta(2, context, WIDTH // HEADS // 2), persistent=False)


class LanguageModel(nn.Module):
    """The model; `earlier` batches of the rounds before are still on the card."""

    def __init__(self, context: int, earlier: int = 0) -> None:
        super().__init__()
        self.tokens, self.angles = Weight(WORDS, WIDTH), Angles(context)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.final, self.head = RootNorm(WIDTH), Projection(WORDS, WIDTH)
        for number in range(earlier):
            self.register_buffer(f"earlier{number}", meta(WARM_UP, BATCH, context, dtype=torch.int64))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits, and the loss where there are targets; without any, in inference mode as the script."""
        with torch.inference_mode(targets is None):
            logits = self.score(ids)
            return logits if targets is None else (logits, cross_entropy(logits, targets))

    def score(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        embedded = self.tokens.weight[ids, :]
        x = embedded  # the first keeps its name
        for layer in self.layers:
            x = layer(x, self.angles.table)
        logits: Tensor = self.head(self.final(x))
        return logits


class HandWrittenAdamW(torch.optim.Optimizer):
    """AdamW that makes its two moments anew in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                p.data -= 1e-3 * 0.01 * p.data
                before_m = state.get("m", torch.zeros_like(grad))
                before_v = state.get("v", torch.zeros_like(grad))
                m = 0.9 * before_m + (0.1 * grad)
                v = 0.999 * before_v + (0.001 * torch.square(grad))
                p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
                state["m"] = m
                state["v"] = v


def language_model(context: int, *, mode: str, precision: str | None = None) -> Step:
    """A forward, or a training step, over four rows of `context` tokens."""
    ids = meta(BATCH, context, dtype=torch.int64)
    if mode == "infer":
        return Step(LanguageModel(context, 1), (ids,), {"mode": "infer", "precision": precision})
    options = {"mode": "train", "precision": precision, "optimizer": HandWrittenAdamW, "loss": lambda out: out[1]}
    return Step(LanguageModel(context, 2), (ids, meta(BATCH, context, dtype=torch.int64)), options)


def run_script(context: int, mode: str, precision: str | None) -> dict[str, Peaks]:
    """Run the warm-up and the measured round, on Windows."""
    with mock.patch.object(AddressSpace, "take", _place_upwards()):
        return _run_script(context, mode, precision)


def _place_upwards() -> Callable[[AddressSpace, int], int]:
    """The driver of Windows places a segment above the one before: by address, the snapshots' segments are in the order
    of the model's parameters."""
    ends = [1 << 34]

    def take(_: AddressSpace, nbytes: int) -> int:
        ends.append(ends[-1] + nbytes)
        return ends[-2]

    return take


def _run_script(context: int, mode: str, precision: str | None) -> dict[str, Peaks]:
    model = LanguageModel(context).to_empty(device="cuda")
    optimizer = HandWrittenAdamW(model.parameters())
    autocast = partial(torch.autocast, "cuda", dtype=torch.bfloat16, enabled=precision is not None)

    def draw(rounds: int) -> Tensor:
        return torch.randint(0, WORDS, (rounds, BATCH, context), device="cuda")

    warm_up, measured = draw(WARM_UP), draw(1)
    if mode == "infer":

        def infer(ids: Tensor) -> None:
            with autocast():
                model.score(ids)

        with torch.inference_mode():
            for ids in warm_up:
                infer(ids)
            return {"": measure(lambda: infer(measured[0]))}

    warm_up_targets, measured_targets = draw(WARM_UP), draw(1)
    for number in range(WARM_UP):
        with autocast():
            logits = model.score(warm_up[number])
            loss = cross_entropy(logits, warm_up_targets[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del logits, loss
    optimizer.zero_grad(set_to_none=True)

    def train() -> None:
        with autocast():
            logits = model.score(measured[0])
            loss = cross_entropy(logits, measured_targets[0])
        loss.backward()
        optimizer.step()

    return {"": measure(train)}


def script(context: int, *, mode: str, precision: str | None = None) -> Program:
    """The whole script, whose earlier rounds decide what is reserved."""
    return Program(partial(run_script, context, mode, precision), "")
