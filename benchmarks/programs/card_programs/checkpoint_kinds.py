"""Checkpoints: reentrant, not reentrant, the whole model, in segments."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.programs.card_parts import Block

blocks = nn.Sequential(*[Block() for _ in range(6)]).cuda()
x = torch.randn(4, 1024, 768, device="cuda", requires_grad=True)


def each(reentrant: bool) -> torch.Tensor:
    """Every block by itself."""
    out = x
    for block in blocks:
        out = checkpoint(block, out, use_reentrant=reentrant)
    return out


ways = {
    "none": lambda: blocks(x),
    "reentrant": lambda: each(True),
    "each": lambda: each(False),
    "whole": lambda: checkpoint(blocks, x, use_reentrant=False),
    "segments": lambda: checkpoint_sequential(blocks, 3, x, use_reentrant=False),
}
for name, way in ways.items():
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        way().square().mean().backward()
        blocks.zero_grad()
        x.grad = None
    print(name, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
