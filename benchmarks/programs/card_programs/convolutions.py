"""Convolutions of many shapes and kinds, forward and backward."""

import torch
from torch import nn

from benchmarks.programs.card_parts import show

kinds = {
    "3x3": (nn.Conv2d(64, 128, 3, padding=1), (16, 64, 56, 56)),
    "1x1": (nn.Conv2d(256, 64, 1), (16, 256, 56, 56)),
    "7x7": (nn.Conv2d(3, 64, 7, 2, 3), (16, 3, 224, 224)),
    "depthwise": (nn.Conv2d(128, 128, 5, padding=2, groups=128), (16, 128, 56, 56)),
    "groups": (nn.Conv2d(128, 128, 3, padding=1, groups=32), (16, 128, 56, 56)),
    "dilated": (nn.Conv2d(64, 64, 3, padding=4, dilation=4), (8, 64, 64, 64)),
    "transposed": (nn.ConvTranspose2d(128, 64, 4, 2, 1), (16, 128, 28, 28)),
    "1d": (nn.Conv1d(128, 256, 9, padding=4), (16, 128, 2048)),
    "3d": (nn.Conv3d(32, 64, 3, padding=1), (2, 32, 16, 56, 56)),
    "3d transposed": (nn.ConvTranspose3d(64, 32, 2, 2), (2, 64, 8, 28, 28)),
    "wide": (nn.Conv2d(512, 512, 3, padding=1), (8, 512, 28, 28)),
    "odd": (nn.Conv2d(37, 53, 3), (7, 37, 41, 41)),
    "fold": (nn.Fold((64, 64), 4, stride=4), (8, 64 * 16, 256)),
    "unfold": (nn.Unfold(3, padding=1), (8, 64, 56, 56)),
}
for name, (layer, shape) in kinds.items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for last in (False, True) if len(shape) == 4 else (False,):
            module = layer.to("cuda", dtype)
            x = torch.randn(shape, device="cuda", dtype=dtype)
            if last:
                module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
            x.requires_grad_()
            torch.cuda.empty_cache()
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                module(x).square().mean().backward()
                module.zero_grad()
                x.grad = None
            show(f"{name} {str(dtype)[6:]} {'last' if last else 'first'}")
            module.to(memory_format=torch.contiguous_format)
            x = None
