"""A mixture of experts written by hand, which are spread over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EXPERTS, CHOSEN = 8, 2


class Send(torch.autograd.Function):
    """Rows go to other ranks, so many to each, and their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, receives: list[int], sends: list[int]) -> torch.Tensor:
        """The rows that come."""
        ctx.sizes = sends, receives
        received = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(received, x.contiguous(), receives, sends)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradients of those that went."""
        return Send.apply(gradient, *ctx.sizes), None, None  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """Each token goes to two of eight experts, whose real router gives each its share, or so many as `counts` says."""

    def __init__(self, world: int, counts: tuple[int, ...] = (), width: int = 64) -> None:
        super().__init__()
        self.world, self.counts = world, counts
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(EXPERTS // world)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what its experts make of each token, by its probabilities."""
        tokens, world = len(x), self.world
        counts = self.counts or [tokens * CHOSEN // EXPERTS] * EXPERTS
        every = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
        wanted = torch.zeros(tokens, EXPERTS).scatter_(1, every.view(CHOSEN, tokens).T, 9.0)
        probabilities, places = torch.topk((self.gate(x) + wanted.to(x.device)).softmax(-1), CHOSEN, dim=-1)
        del wanted, every
        order = places.flatten().argsort(stable=True)
        mine = torch.bincount(places.flatten(), minlength=EXPERTS)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        sends, receives = (each.view(world, -1).sum(1).tolist() for each in (mine, theirs))
        came: torch.Tensor = Send.apply(x[order // CHOSEN], receives, sends)  # type: ignore[no-untyped-call]
        number = torch.arange(EXPERTS // world, device=x.device).repeat(world).repeat_interleave(theirs)
        by_expert = number.argsort(stable=True)
        parts = came[by_expert].split(theirs.view(world, -1).sum(0).tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        made = torch.empty_like(made).index_copy(0, by_expert, made)
        back: torch.Tensor = Send.apply(made, sends, receives)  # type: ignore[no-untyped-call]
        weighted = back * probabilities.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, weighted)
