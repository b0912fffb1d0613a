"""Training of nanoVLM as its measure_vram.py runs it (huggingface/nanoVLM at f9539c4), one batch size after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Peaks, Program

IMAGE, PATCH, PATCHES = 224, 16, 14
SIGHT, SIGHT_HEADS, SIGHT_BLOCKS = 768, 12, 12
WIDTH, HEADS, KV_HEADS, HEAD, INNER, BLOCKS = 576, 9, 3, 64, 1536, 30
WORDS, SHUFFLE = 49152, 2
TOKENS = 128 - (PATCHES // SHUFFLE) ** 2
ITERATIONS = 2
STATISTICS = ("requested", "allocated", "reserved")


class Patches(nn.Module):
    """The image in patches, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, SIGHT, PATCH, PATCH)
        self.position_embedding = nn.Parameter(torch.rand(1, PATCHES**2, SIGHT))

    def forward(self, images: Tensor) -> Tensor:
        """Return a row for each patch."""
        return self.conv(images).flatten(2).transpose(1, 2) + self.position_embedding


class SightAttention(nn.Module):
    """Attention of the image's patches, all to all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(SIGHT, 3 * SIGHT)
        self.out_proj = nn.Linear(SIGHT, SIGHT)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, tokens, width = x.shape
        qkv = self.qkv_proj(x)
        q, k, v = qkv.split(width, dim=2)
        q = q.view(batch, tokens, SIGHT_HEADS, -1).transpose(1, 2)
        k = k.view(batch, tokens, SIGHT_HEADS, -1).transpose(1, 2)
        v = v.view(batch, tokens, SIGHT_HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        y = self.out_proj(y)
        y = self.resid_dropout(y)
        return y


class SightFeedForward(nn.Module):
    """The two layers after attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(SIGHT, 4 * SIGHT), nn.Linear(4 * SIGHT, SIGHT)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        x = self.fc1(x)
        x = F.gelu(x, approximate="tanh")
        x = self.fc2(x)
        x = self.dropout(x)
        return x


class SightBlock(nn.Module):
    """One layer of the image's half."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(SIGHT, eps=1e-6), SightAttention()
        self.ln2, self.mlp = nn.LayerNorm(SIGHT, eps=1e-6), SightFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


class Sight(nn.Module):
    """The image's half: SigLIP base."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding, self.dropout = Patches(), nn.Dropout(0.0)
        self.blocks = nn.ModuleList([SightBlock() for _ in range(SIGHT_BLOCKS)])
        self.layer_norm = nn.LayerNorm(SIGHT, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """Return a row for each patch."""
        x = self.patch_embedding(images)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.layer_norm(x)
        return x


class RootMeanSquare(nn.Module):
    """The norm as the program writes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scale to one."""
        inverse = torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        x = x * inverse * self.weight
        return x


class Rotary(nn.Module):
    """Cosines and sines of the tokens' places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100000 ** (torch.arange(0, HEAD, 2).float() / HEAD)))

    @torch.no_grad()
    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return both for each sample."""
        batch, tokens = places.shape
        if places.max() + 1 > 8192:
            raise ValueError("more tokens than the program has")
        flat = places.reshape(-1).float()
        angles = flat.unsqueeze(-1) * self.get_buffer("inv_freq").unsqueeze(0)
        angles = angles.reshape(batch, tokens, -1)
        both = torch.cat([angles, angles], dim=-1)
        return torch.cos(both) * 1.0, torch.sin(both) * 1.0


def rotate_half(x: Tensor) -> Tensor:
    """Exchange the halves, one of them negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their places."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned_q = (q * cos) + (rotate_half(q) * sin)
    turned_k = (k * cos) + (rotate_half(k) * sin)
    return turned_q, turned_k


class Attention(nn.Module):
    """Attention of the words, whose mask and order are both given."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, HEAD * KV_HEADS, bias=False)
        self.v_proj = nn.Linear(WIDTH, HEAD * KV_HEADS, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Attend."""
        batch, tokens, width = x.shape
        q = self.q_proj(x).view(batch, tokens, HEADS, HEAD).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, KV_HEADS, HEAD).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, KV_HEADS, HEAD).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        mask = mask.unsqueeze(1).unsqueeze(2)
        padding = (mask == 0).transpose(-1, -2)  # noqa: F841 - as long as the call in the program
        mask = (1.0 - mask) * torch.finfo(q.dtype).min
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        y = self.out_proj(y)
        y = self.resid_dropout(y)
        return y


class FeedForward(nn.Module):
    """The gated layers after attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        gate = F.silu(self.gate_proj(x))
        x = self.up_proj(x)
        x = self.down_proj(gate * x)
        return x


class Block(nn.Module):
    """One layer of the words' half."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.attn = FeedForward(), Attention()
        self.norm1, self.norm2 = RootMeanSquare(), RootMeanSquare()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Run the layer."""
        before = x
        x = self.norm1(x)
        x = self.attn(x, cos, sin, mask)
        x = before + x
        before = x
        x = self.norm2(x)
        x = self.mlp(x)
        x = before + x
        return x


class Language(nn.Module):
    """The words' half: SmolLM2 135M."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding, self.rotary_embd = nn.Embedding(WORDS, WIDTH), Rotary()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm, self.head = RootMeanSquare(), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return what the head takes."""
        batch, tokens, _ = x.shape
        places = torch.arange(tokens, device=x.device).unsqueeze(0).expand(batch, -1)
        cos, sin = self.rotary_embd(places)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        return x


class Projector(nn.Module):
    """Four neighbouring patches become one word."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(SIGHT * SHUFFLE**2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Join and project them."""
        batch, _, width = x.shape
        side = PATCHES // SHUFFLE
        x = x.view(batch, PATCHES, PATCHES, width)
        x = x.reshape(batch, side, SHUFFLE, side, SHUFFLE, width)
        x = x.permute(0, 1, 3, 2, 4, 5).contiguous()
        x = x.reshape(batch, side**2, width * SHUFFLE**2)
        x = self.proj(x)
        return x


class NanoVlm(nn.Module):
    """Both halves, and the loss of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_encoder, self.decoder, self.MP = Sight(), Language(), Projector()

    def forward(self, ids: Tensor, image: Tensor, mask: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words' logits and the loss."""
        seen = self.vision_encoder(image)
        seen = self.MP(seen)
        words = self.decoder.token_embedding(ids)
        both = torch.cat((seen, words), dim=1)
        of_image = torch.ones((seen.size(0), seen.size(1)), device=mask.device, dtype=mask.dtype)
        mask = torch.cat((of_image, mask), dim=1)
        logits = self.decoder(both, mask)
        logits = self.decoder.head(logits)
        logits = logits[:, seen.size(1) :, :]
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)
        return logits, loss


def measure_vram(sizes: str, case: str) -> Program:
    """The program with these batch sizes, one after another.

    Where it drops a batch it asks `locals()` for each variable. Up to Python 3.12 its frame keeps what the last of
    these calls found until the next: the logits of one batch size through the steps of the next. `found` is that.

    Args:
        sizes: samples, as the command line has them.
        case: `loaded`, or the size that is asked for.
    """
    return Program(_program(sizes), case)


@functools.cache
def _program(sizes: str) -> Callable[[], Mapping[str, Peaks]]:
    """One function for all cases of a run."""
    return functools.partial(_measure, [int(size) for size in sizes.split()])


def _measure(sizes: Sequence[int]) -> dict[str, Peaks]:
    torch.cuda.reset_peak_memory_stats()
    model = NanoVlm().to("cuda")
    peaks: dict[str, Peaks] = {"loaded": {"allocated": torch.cuda.memory_allocated()}}
    for size in sizes:
        torch.cuda.reset_peak_memory_stats()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for _ in range(ITERATIONS):
            images = torch.zeros(size, 3, IMAGE, IMAGE).to("cuda")
            ids, labels, mask = (torch.ones(size, TOKENS, dtype=torch.int64).to("cuda") for _ in range(3))
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits, loss = model(ids, images, mask, labels)
            loss.backward()
            optimizer.step()
        stats = torch.cuda.memory_stats()
        peaks[str(size)] = {name: stats[f"{name}_bytes.all.peak"] for name in STATISTICS}
        del optimizer
        found = logits, mask
        del loss, images, ids, labels, mask
        torch.cuda.empty_cache()
    del found
    return peaks
