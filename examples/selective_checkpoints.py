"""Blocks of a transformer that keep the results of their products: the memory of a checkpoint, with little recomputed.

A block saves 16 tensors of its input's size for backward. A checkpoint of the whole block keeps its input alone and
recomputes everything but its last product. One that keeps the results of `qkv`, attention, `project` and `up` keeps 9
and the input, and recomputes norms, GELU and an addition. Within the same peak a plan of fxmem recomputes less again:
it decides for each result of an operator by itself.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmem

BLOCKS, BATCH, TOKENS, WIDTH, HEADS = 8, 8, 256, 256, 4


class Block(nn.Module):
    """Attention and a perceptron, each after a normalisation and added to what came in."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Checkpointed(nn.Module):
    """A block that runs under a checkpoint."""

    def __init__(self, block, options):
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, **self.options)


x = torch.empty(BATCH, TOKENS, WIDTH, device="meta")
plain = nn.Sequential(*(Block() for _ in range(BLOCKS)))
selective = {"context_fn": fxmem.keep(0, 1, 2, 3)}
for name, options in (("plain", None), ("whole", {}), ("selective", selective)):
    model = plain if options is None else nn.Sequential(*(Checkpointed(block, options) for block in plain))
    analysis = fxmem.analyze(model, x, target="cpu", optimizer=None)
    flops = sum(op.flops or 0 for op in analysis.profile.ops)
    print(f"{name:<10}{analysis.peak.requested_bytes:>14,} bytes {flops:>18,} FLOPs")

step = fxmem.analyze(plain, x, target="cpu", optimizer=None)
plan = fxmem.plan(step, budget=analysis.peak.requested_bytes)
again = sum(op.flops or 0 for op in step.profile.ops) + (plan.extra_flops or 0)
print(f"{'fxmem':<10}{plan.after.requested_bytes:>14,} bytes {again:>18,} FLOPs")
planned = fxmem.checkpoint(copy.deepcopy(plain), plan)
batch = torch.randn(2, 64, WIDTH)
for model in (plain, planned):
    model(batch).square().sum().backward()
pairs = zip(plain.parameters(), planned.parameters(), strict=True)
print(f"gradients equal: {all(torch.equal(a.grad, b.grad) for a, b in pairs)}")
