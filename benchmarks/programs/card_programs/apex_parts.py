"""apex: its fused Adam, LAMB and SGD, and its fused norms, built from source (`amp_C`, `fused_layer_norm_cuda`)."""

import gc

import torch
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from torch import nn

from benchmarks.programs.card_parts import show

for dtype in (torch.float32, torch.bfloat16):
    for make, settings in ((FusedAdam, {}), (FusedLAMB, {}), (FusedSGD, {"momentum": 0.9})):
        if make is FusedLAMB and dtype is torch.bfloat16:  # it takes float16 and float32
            continue
        layers = [
            layer
            for _ in range(4)
            for layer in (FusedLayerNorm(1024), nn.Linear(1024, 1024), FusedRMSNorm(1024), nn.GELU())
        ]
        model = nn.Sequential(*layers).cuda().to(dtype)
        optimizer = make(model.parameters(), lr=1e-3, **settings)
        for step in range(3):
            model(torch.randn(512, 1024, device="cuda", dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            show(f"{dtype} {make.__name__} {step}")
        del model, optimizer, layers
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
