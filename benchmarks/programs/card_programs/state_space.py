"""Mamba's selective scan and its causal convolution, built from source."""

import gc

import torch
from mamba_ssm.modules.mamba_simple import Mamba
from torch import nn

from benchmarks.programs.card_parts import show

for dtype in (torch.float32, torch.bfloat16):
    for settings in ({}, {"use_fast_path": False}):
        model = nn.Sequential(*[Mamba(d_model=512, **settings) for _ in range(3)]).cuda().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model(torch.randn(4, 1024, 512, device="cuda", dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            show(f"{dtype} Mamba {settings} {step}")
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
