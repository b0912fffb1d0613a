"""A wide network in 60 % of its memory: recomputed, or waiting in the host's memory; and the same gradients.

Both plans are made for an RTX 4090 and cost what its estimated step takes longer. The second is then carried out on the
CPU, for a batch of another size.
"""

import copy

import torch
from torch import nn

import fxmem

ROWS, WIDTH = 32768, 1024


def build(width: int) -> nn.Module:
    """Six layers of two products with a GELU between them."""
    layers = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6))
    return nn.Sequential(*layers)


rows = torch.empty(ROWS, WIDTH, device="meta")
analysis = fxmem.analyze(lambda: build(WIDTH), rows, target="rtx4090", optimizer=None)
for host_memory in (None, "32GiB"):
    plan = fxmem.plan(analysis, budget=0.6, host_memory=host_memory)
    slower = plan.after_seconds / plan.before_seconds - 1
    print(
        f"{plan.after.allocated_bytes:>13,} of {plan.before.allocated_bytes:,} bytes, {slower:.1%} slower: "
        f"{plan.extent}"
    )
print(f"{plan.host_bytes:,} bytes of the host's memory")

torch.manual_seed(0)
plain = build(WIDTH)
planned = fxmem.checkpoint(copy.deepcopy(plain), plan)
batch = torch.randn(4, WIDTH)
for one in (plain, planned):
    one(batch).square().sum().backward()
equal = all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), planned.parameters(), strict=True))
print(f"gradients equal: {equal}")
