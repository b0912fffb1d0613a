"""bitsandbytes' optimizers, of 8 and 32 bits, paged ones too."""

import gc

import bitsandbytes
import torch
from torch import nn

from benchmarks.programs.card_parts import show

for name in (
    "Adam8bit",
    "AdamW",
    "PagedAdamW8bit",
    "PagedAdamW32bit",
    "Lion8bit",
    "SGD8bit",
    "Adagrad8bit",
):
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
    settings = {"momentum": 0.9} if name == "SGD8bit" else {}
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-4, **settings)
    for step in range(3):
        model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        show(f"{name} {step}")
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
