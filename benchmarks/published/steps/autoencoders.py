"""Autoencoders of diffusion models, as InvokeAI measured how much memory encoding and decoding take.

Source: invoke-ai/InvokeAI. At 7785061e, vae_benchmarks/benchmark_sd_vae.py, benchmark_flux_vae.py and
all_benchmark_results.json (`measured`): each script is one process, in which for one size after the other a picture is
encoded and latents are decoded, twice and then five times that count, of which the first two are run here. What is
cached goes before each. The largest peak of these is published. In between the first script decodes in tiles, which is
left out: nothing of it stays, but that from 1,536 pixels on the encoder works in tiles, too; such figures are not here.
Weights in half precision that are to compute in float32 ("upcast") fail at their first picture, which is in half
precision, and stay in float32.

Pull request 9305, scripts/calibrate_qwen_vae_working_memory.py (`calibrated`): a process for each figure.

The models are diffusers' own, but for FLUX: invokeai/backend/flux/modules/autoencoder.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Peaks, Program
from .loops import measure

CHANNELS = (128, 256, 512, 512)
SIZES = (512, 768, 1024, 1536, 2048)
TILED = 1536
"""From this size on Stable Diffusion's encoder works in tiles: decoding in tiles has switched that on."""
WARM_UP, COUNTED = 2, 2
LATENT_PIXELS = 8
"""Pixels of a picture by one of its latents, each way."""

# --- FLUX -------------------------------------------------------------------------------------------------------------


def norm(channels: int) -> nn.GroupNorm:
    """Make the norm of all layers."""
    return nn.GroupNorm(32, channels, eps=1e-6)


def conv(inner: int, outer: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps the size, or one that halves what has been padded."""
    return nn.Conv2d(inner, outer, size, stride, padding=size // 2 if stride == 1 else 0)


class Residual(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = norm(inner), conv(inner, outer)
        self.norm_2, self.conv_2 = norm(outer), conv(outer, outer)
        self.shortcut = conv(inner, outer, size=1) if inner != outer else None

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's result."""
        h = self.norm_1(x)
        h = F.silu(h)
        h = self.conv_1(h)
        h = self.norm_2(h)
        h = F.silu(h)
        h = self.conv_2(h)
        if self.shortcut is not None:
            x = self.shortcut(x)
        return x + h


class Attention(nn.Module):
    """Attention over all places by one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.out = (conv(channels, channels, size=1) for _ in range(4))

    def attend(self, h: Tensor) -> Tensor:
        """What each place attends to."""
        h = self.norm(h)
        q, k, v = self.q(h), self.k(h), self.v(h)
        shape = h.shape
        q = q.flatten(2).transpose(1, 2)[:, None].contiguous()
        k = k.flatten(2).transpose(1, 2)[:, None].contiguous()
        v = v.flatten(2).transpose(1, 2)[:, None].contiguous()
        h = F.scaled_dot_product_attention(q, k, v)
        return h.squeeze(1).transpose(1, 2).reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Add it."""
        return x + self.out(self.attend(x))


class Down(nn.Module):
    """Halve a picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv(channels, channels, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Pad below and on the right, then convolve."""
        x = F.pad(x, (0, 1, 0, 1))
        x = self.conv(x)
        return x


class Up(nn.Module):
    """Double a picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Repeat points, then convolve."""
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        x = self.conv(x)
        return x


def make_stages(channels: Sequence[int], blocks: int, change: type[nn.Module]) -> list[nn.ModuleList]:
    """Make the blocks of each resolution, and what leads to the next."""
    stages, inner = [], channels[0]
    for outer in channels:
        stages.append(nn.ModuleList(Residual(outer if block else inner, outer) for block in range(blocks)))
        inner = outer
    for stage, width in zip(stages[:-1], channels, strict=False):
        stage.append(change(width))
    return stages


def make_middle() -> nn.ModuleList:
    """Make the blocks of the lowest resolution."""
    width = CHANNELS[-1]
    return nn.ModuleList([Residual(width, width), Attention(width), Residual(width, width)])


class Encoder(nn.Module):
    """Makes latents of pictures; the results of all blocks but the last ones stay in a list until the end."""

    def __init__(self, latents: int) -> None:
        super().__init__()
        self.first = conv(3, CHANNELS[0])
        self.stages = nn.ModuleList(make_stages(CHANNELS, 2, Down))
        self.middle = make_middle()
        self.end = nn.ModuleList([norm(CHANNELS[-1]), nn.SiLU(), conv(CHANNELS[-1], 2 * latents)])

    def forward(self, x: Tensor) -> Tensor:
        """Return means and logarithms of variances."""
        kept = [self.first(x)]
        for stage in self.stages:
            for layer in stage:
                kept.append(layer(kept[-1]))
        h = kept[-1]
        for layer in (*self.middle, *self.end):
            h = layer(h)
        return h


class Decoder(nn.Module):
    """Makes pictures of latents. The weights of the largest size go to the card first."""

    def __init__(self, latents: int) -> None:
        super().__init__()
        self.first = conv(latents, CHANNELS[-1])
        self.middle = make_middle()
        self.stages = nn.ModuleList(reversed(make_stages(CHANNELS[::-1], 3, Up)))
        self.end = nn.ModuleList([norm(CHANNELS[0]), nn.SiLU(), conv(CHANNELS[0], 3)])

    def forward(self, x: Tensor) -> Tensor:
        """Return a picture."""
        h = self.first(x)
        for stage in (self.middle, *reversed([*self.stages]), self.end):
            for layer in stage:
                h = layer(h)
        return h


class Flux(nn.Module):
    """An encoder and a decoder."""

    latents = 16
    """Channels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(self.latents), Decoder(self.latents)

    def encode(self, picture: Tensor) -> tuple[Tensor, None]:
        """Return latents."""
        mean, logarithm = self.encoder(picture).chunk(2, dim=1)
        deviation = torch.exp(0.5 * logarithm)
        latents = mean + deviation * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)
        return 0.3611 * (latents - 0.1159), None

    def decode(self, latents: Tensor) -> Tensor:
        """Return a picture."""
        latents = latents / 0.3611 + 0.1159
        picture: Tensor = self.decoder(latents)
        return picture


# --- diffusers' own ---------------------------------------------------------------------------------------------------


class StableDiffusion:
    """AutoencoderKL as the scripts call it."""

    latents = 4
    """Channels."""

    def __init__(self, dtype: torch.dtype) -> None:
        import diffusers

        self.model = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * len(CHANNELS),
            up_block_types=["UpDecoderBlock2D"] * len(CHANNELS),
            block_out_channels=CHANNELS,
            layers_per_block=2,
            latent_channels=self.latents,
        )
        self.model.to(dtype).to("cuda").eval()

    def encode(self, picture: Tensor) -> tuple[Tensor, Any]:
        """Return latents and what they are drawn from."""
        drawn = self.model.encode(picture).latent_dist
        latents = drawn.sample()
        return self.model.config.scaling_factor * latents, drawn

    def decode(self, latents: Tensor) -> Tensor:
        """Return a picture."""
        scaled = latents / self.model.config.scaling_factor
        picture: Tensor = self.model.decode(scaled, return_dict=False)[0]
        return picture


# --- the scripts ------------------------------------------------------------------------------------------------------


def clear() -> None:
    """Forget what is cached, and the peaks."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def count(run: Callable[[], Any]) -> Peaks:
    """Return the largest peaks of a few runs.

    What latents are drawn from is still there in the first run that counts.
    """
    for _ in range(WARM_UP):
        made = run()
        clear()
    drawn = [*made[1:]] if isinstance(made, tuple) else []
    del made
    peaks: list[Peaks] = []
    for _ in range(COUNTED):
        clear()
        peaks.append(measure(run))
        drawn.clear()
    return {name: max(each[name] for each in peaks) for name in peaks[0]}


def measure_sizes(
    model: Flux | StableDiffusion, given: torch.dtype, computed: torch.dtype, encodes: Callable[[int], bool]
) -> dict[str, Peaks]:
    """Encode and decode at each size what is given in one dtype and computed in another."""
    peaks = {}
    for pixels in SIZES:
        if encodes(pixels):
            picture = torch.randn(1, 3, pixels, pixels).to("cuda", given)
            peaks[f"encode {pixels}"] = count(partial(model.encode, picture))
            del picture
        side = pixels // LATENT_PIXELS
        latents = torch.randn(1, model.latents, side, side).to("cuda", given)
        peaks[f"decode {pixels}"] = count(lambda latents=latents: model.decode(latents.to(computed)))
        del latents
    return peaks


def run_stable_diffusion() -> dict[str, Peaks]:
    """Run the script of both models of Stable Diffusion."""
    peaks: dict[str, Peaks] = {}
    for name in ("SD1.5", "SDXL"):
        for weights in ("float16", "upcast", "float32"):
            clear()
            given = torch.float32 if weights == "float32" else torch.float16
            model = StableDiffusion(given)
            computed, is_encoded = given, TILED
            if weights == "upcast":
                computed, is_encoded = torch.float32, 0
                picture = torch.randn(1, 3, SIZES[0], SIZES[0]).to("cuda", given)
                model.model.to(computed)
                del picture
            with torch.inference_mode():
                found = measure_sizes(model, given, computed, is_encoded.__gt__)
            peaks |= {f"{name} {weights} {case}": peak for case, peak in found.items()}
            del model
    return peaks


def run_flux() -> dict[str, Peaks]:
    """Run the script of FLUX."""
    peaks: dict[str, Peaks] = {}
    for name in ("float16", "float32", "bfloat16"):
        clear()
        dtype = getattr(torch, name)
        model = Flux().to("cuda", dtype).eval()
        with torch.no_grad():
            found = measure_sizes(model, dtype, dtype, encodes=lambda _: True)
        peaks |= {f"FLUX {name} {case}": peak for case, peak in found.items()}
        del model
    return peaks


def measured(model: str, weights: str, what: str, pixels: int) -> Program:
    """Encode or decode one picture with weights of this dtype, or `upcast`."""
    return Program(run_flux if model == "FLUX" else run_stable_diffusion, f"{model} {weights} {what} {pixels}")


def normalise(self: Any, x: Tensor) -> Tensor:
    """`QwenImageRMS_norm` of diffusers 0.37.0, which the pull request's commit pins; later ones do so in float32."""
    dim = 1 if self.channel_first else -1
    normalised: Tensor = F.normalize(x, dim=dim) * self.scale * self.gamma + self.bias
    return normalised


@torch.inference_mode()
def run_qwen(what: str, height: int, width: int) -> dict[str, Peaks]:
    """Encode or decode one picture in half precision. What is reserved for the weights before does not count."""
    import diffusers
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm

    model = diffusers.AutoencoderKLQwenImage(dim_mult=[1, 2, 4, 4]).to(torch.float16).to("cuda")
    decodes = what == "decode"
    channels, by = (model.config.z_dim, LATENT_PIXELS) if decodes else (3, 1)
    given = torch.randn(1, channels, 1, height // by, width // by, device="cuda", dtype=torch.float16)
    clear()
    before = torch.cuda.memory_reserved()

    def run() -> None:
        if decodes:
            model.decode(given, return_dict=False)
        else:
            model.encode(given).latent_dist.mode()

    with mock.patch.object(QwenImageRMS_norm, "forward", normalise):
        peaks = measure(run)
    return {"": {**peaks, "reserved": peaks["reserved"] - before}}


def calibrated(what: str, height: int, width: int) -> Program:
    """Encode or decode one picture by the autoencoder of Qwen-Image."""
    return Program(partial(run_qwen, what, height, width), "")
