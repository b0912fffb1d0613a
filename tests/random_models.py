"""Programs made at random from a grammar of what models do: views, in-place writes, shared weights, branches, loops,
checkpoints, dropout.

Every value is a float32 tensor of shape (BATCH, WIDTH); a statement reads one or two of them and makes one. A program
is its seed, so that a case can be named, kept and run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH = 96, 128

Unary = Callable[[nn.Module, Tensor], Tensor]
Binary = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _attend(_: nn.Module, x: Tensor) -> Tensor:
    heads = x.view(4, BATCH // 4, 8, WIDTH // 8).transpose(1, 2)
    scores = (heads @ heads.transpose(-1, -2) / 4).softmax(-1)
    return (scores @ heads).transpose(1, 2).reshape(BATCH, WIDTH)


def _fused_attention(_: nn.Module, x: Tensor) -> Tensor:
    heads = x.view(4, BATCH // 4, 8, WIDTH // 8).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(BATCH, WIDTH)


def _halves(_: nn.Module, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat([a * torch.sigmoid(b), b], dim=1)


def _loop(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(m.shared(x))
    return x


def _with_local(_: nn.Module, x: Tensor) -> Tensor:
    wide = x.repeat(1, 3)
    narrow = wide[:, :WIDTH] * 2
    del wide
    return narrow + 1


def _half_precision(m: nn.Module, x: Tensor) -> Tensor:
    return m.first(x.double().float()).to(torch.bfloat16).float()


UNARY: dict[str, Unary] = {
    "first": lambda m, x: m.first(x),
    "second": lambda m, x: m.second(x),
    "shared": lambda m, x: m.shared(x),
    "norm": lambda m, x: m.norm(x),
    "batch_norm": lambda m, x: m.batch_norm(x),
    "relu": lambda _, x: x.relu(),
    "relu_module": lambda m, x: m.relu(x),
    "gelu": lambda _, x: F.gelu(x),
    "silu": lambda _, x: F.silu(x),
    "exp": lambda _, x: torch.exp(-x.abs()),
    "softmax": lambda _, x: x.softmax(-1),
    "log_softmax": lambda _, x: F.log_softmax(x, -1),
    "dropout": lambda m, x: m.dropout(x),
    "alpha_dropout": lambda _, x: F.alpha_dropout(x, 0.1, training=True),
    "view": lambda _, x: x.view(BATCH * 2, -1).reshape(BATCH, WIDTH),
    "transposed": lambda _, x: (x.t() * 0.5).t(),
    "permuted": lambda _, x: x.view(BATCH, 8, -1).permute(0, 2, 1).reshape(BATCH, WIDTH),
    "flipped": lambda _, x: x.flip(0),
    "rolled": lambda _, x: torch.roll(x, 3, dims=1),
    "padded": lambda _, x: F.pad(x, (2, 2))[:, 2:-2],
    "sliced": lambda _, x: torch.cat([x[1:], x[:1]]),
    "chunked": _halves,
    "split": lambda _, x: sum(x.split(WIDTH // 4, dim=1)).repeat(1, 4),
    "stacked": lambda _, x: torch.stack([x, x * 2]).mean(0),
    "mean": lambda _, x: x - x.mean(0, keepdim=True),
    "variance": lambda _, x: x / (x.var(1, keepdim=True) + 1),
    "maximum": lambda _, x: x - x.amax(1, keepdim=True),
    "cumsum": lambda _, x: x.cumsum(0) / BATCH,
    "sorted": lambda _, x: x.sort(dim=1).values,
    "top": lambda _, x: x.topk(WIDTH // 2, dim=1).values.repeat(1, 2),
    "gathered": lambda _, x: x.index_select(0, torch.arange(BATCH - 1, -1, -1, device=x.device)),
    "masked": lambda _, x: x.masked_fill(torch.arange(WIDTH, device=x.device) % 3 == 0, 0.0),
    "where": lambda _, x: torch.where(torch.ones(BATCH, 1, dtype=torch.bool, device=x.device), x, x * 2),
    "expanded": lambda m, x: x + m.bias.expand(BATCH, WIDTH),
    "detached": lambda _, x: x + x.detach(),
    "cloned": lambda _, x: x.clone().mul_(0.5),
    "in_place": lambda _, x: (x * 1.5).add_(1).relu_(),
    "in_place_given": lambda _, x: x.add_(0.1),
    "in_place_row": lambda _, x: _write_row(x),
    "no_grad": lambda _, x: x * _quietly(x),
    "attention": _attend,
    "fused_attention": _fused_attention,
    "loop": _loop,
    "local": _with_local,
    "casts": _half_precision,
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.first.weight),
    "outer": lambda _, x: (x.unsqueeze(2) * x[:, :8].unsqueeze(1)).sum(2),
    "checkpointed": lambda m, x: checkpoint(m.block, x, use_reentrant=False),
    "checkpointed_function": lambda m, x: checkpoint(_attend, m, x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(m.block, x, use_reentrant=True),
    "nested": lambda m, x: checkpoint(
        lambda y: m.norm(checkpoint(m.block, y, use_reentrant=False)), x, use_reentrant=False
    ),
}
BINARY: dict[str, Binary] = {
    "add": lambda _, x, y: x + y,
    "multiply": lambda _, x, y: x * y,
    "divide": lambda _, x, y: x / (y.abs() + 1),
    "matmul": lambda _, x, y: x @ (y.t() @ y) / WIDTH,
    "lerp": lambda _, x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda _, x, y: torch.addcmul(x, x, y, value=0.1),
    "concatenated": lambda _, x, y: torch.cat([x, y], 1).view(BATCH, 2, WIDTH).amax(1),
    "larger": lambda _, x, y: torch.maximum(x, y),
    "chosen": lambda _, x, y: torch.where(x.detach() > 0, x, y),
    "bilinear": lambda m, x, y: m.first(x) * m.first(y),
    "in_place_sum": lambda _, x, y: (x * 1).add_(y),
    "checkpointed_pair": lambda m, x, y: checkpoint(lambda a, b: m.block(a) * b, x, y, use_reentrant=False),
}


def _write_row(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[0] = copy[1] * 2
    return copy


@torch.no_grad()
def _quietly(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 3) + 1


class RandomModel(nn.Module):
    """A program of 4 to 16 statements; what is not read again is dropped at once or kept to the end, as the seed
    says."""

    unary, binary = UNARY, BINARY

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.first, self.second, self.shared = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight if chance.random() < 0.3 else self.second.weight
        self.norm, self.batch_norm, self.relu, self.dropout = (
            nn.LayerNorm(WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
        self.second.requires_grad_(chance.random() < 0.8)
        self.statements: list[tuple[str, tuple[int, ...]]] = []
        for made in range(1, chance.randint(5, 17)):
            names: Iterable[str]
            names, count = (self.unary, 1) if chance.random() < 0.7 else (self.binary, 2)
            self.statements.append(
                (chance.choice(sorted(names)), tuple(chance.randrange(max(0, made - 4), made) for _ in range(count)))
            )
        self.keeps = chance.random() < 0.3
        self.several = chance.random() < 0.3

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        held = {0: x + self.bias}
        last_read = {place: at for at, (_, places) in enumerate(self.statements) for place in places}
        for at, (name, places) in enumerate(self.statements):
            made = (
                self.unary[name](self, held[places[0]])
                if name in self.unary
                else self.binary[name](self, held[places[0]], held[places[1]])
            )
            if not self.keeps:
                for place in set(places):
                    if last_read[place] <= at:
                        held.pop(place, None)
            held[at + 1] = made
            del made
        end = held[len(self.statements)]
        return (end, end * 2, end.detach()) if self.several else end
