"""A denoising U-Net with attention, channels last under autocast, with a moving average."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Two convolutions, normalised by groups."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, inward), nn.GroupNorm(32, outward)
        self.a, self.b = nn.Conv2d(inward, outward, 3, padding=1), nn.Conv2d(outward, outward, 3, padding=1)
        self.time = nn.Linear(512, outward)
        self.skip = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """With the time added between."""
        h = self.a(F.silu(self.first(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.b(F.silu(self.second(h)))


class Attention(nn.Module):
    """Attention over all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        batch, width, high, wide = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, 8, width // 8, -1).transpose(-1, -2).unbind(1)
        out = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(batch, width, high, wide)
        return x + self.out(out)


class UNet(nn.Module):
    """Three sizes of pictures."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 512)) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(a, b) for a, b in zip((widths[0], *widths), widths, strict=False)])
        self.middle, self.attention = Residual(widths[-1], widths[-1]), Attention(widths[-1])
        self.up = nn.ModuleList([Residual(2 * b, a) for a, b in zip((widths[0], *widths), widths, strict=False)][::-1])
        self.time = nn.Sequential(nn.Linear(1, 512), nn.SiLU(), nn.Linear(512, 512))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The noise."""
        t, kept = self.time(time[:, None]), []
        x = self.begin(x)
        for layer in self.down:
            x = layer(x, t)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.attention(self.middle(x, t))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, kept.pop()], 1), t)
        return self.end(x)


model = UNet().cuda().to(memory_format=torch.channels_last)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    x = torch.randn(16, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    noise, time = torch.randn_like(x), torch.rand(16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x + noise * time[:, None, None, None], time).float(), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
