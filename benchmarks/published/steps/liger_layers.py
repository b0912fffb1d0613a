"""Layers and activations of Liger-Kernel's benchmarks, in torch's and Hugging Face's own operators.

Source: linkedin/Liger-Kernel, benchmark/scripts. A figure is the median of ten peaks; gradients stay between rounds. In
most scripts the layer of Liger that is compared is on the card too (`other`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Program, Step
from .loops import forward_after_backward, last_round, leaf, meta, repeat_step, train_function

BF16 = torch.bfloat16


def backward_and_retain(y: Tensor, gradient: Tensor) -> None:
    """Run backward and keep the graph."""
    y.backward(gradient, retain_graph=True)


# --- norms ------------------------------------------------------------------------------------------------------------


class LlamaNorm(nn.Module):
    """RMS norm as in transformers: which names are rebound decides what is alive at the peak."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = leaf(width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise rows in float32."""
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype)


def normalise_rows(m: Any) -> None:
    """One round of the scripts of norms and of multi-token attention."""
    y = m.norm(m.x)
    backward_and_retain(y, m.dy)


def rms_norm(H: int) -> Step:
    """Llama's RMS norm over 2048 rows in bfloat16, its weight in float32."""
    norms = {"norm": LlamaNorm(H), "other": LlamaNorm(H)}
    return repeat_step(normalise_rows, x=leaf(2048, H, dtype=BF16), dy=meta(2048, H, dtype=BF16), **norms)


def layer_norm(N: int) -> Step:
    """Layer norm over 4096 rows in float32."""
    norms = {name: nn.LayerNorm(N, device="meta") for name in ("norm", "other")}
    return repeat_step(normalise_rows, x=leaf(4096, N), dy=meta(4096, N), **norms)


def group_norm(C: int) -> Step:
    """Group norm with four channels a group over 128 x C x 512 in float32."""
    norms = {name: nn.GroupNorm(C // 4, C, device="meta") for name in ("norm", "other")}
    return repeat_step(normalise_rows, x=leaf(128, C, 512), dy=meta(128, C, 512), **norms)


class AddAndNorm(nn.Module):
    """Adds the residual, then normalises; both names are rebound."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = leaf(width)

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised sum and the sum."""
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        residual = residual.to(torch.float32)
        hidden = hidden + residual
        residual = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype), residual.to(dtype)


def add_rms_norm(H: int) -> Step:
    """Residual and RMS norm over 2048 rows in float32; three more weights of the modules compared are on the card."""

    def step(m: Any) -> None:
        outputs = m.norm(m.x, m.residual)
        torch.autograd.backward(outputs, (m.dy, m.dresidual))

    tensors = {name: meta(2048, H) for name in ("dy", "dresidual")}
    others = nn.ParameterList([leaf(H) for _ in range(3)])
    return repeat_step(step, x=leaf(2048, H), residual=leaf(2048, H), norm=AddAndNorm(H), others=others, **tensors)


def fused_rms_norm(H: int) -> Step:
    """`nn.RMSNorm` over 4096 rows in bfloat16, as Megatron calls it; the loss is the sum."""

    def step(m: Any) -> None:
        y = m.norm(m.x)
        y.sum().backward()

    return repeat_step(step, x=leaf(4096, 1, H, dtype=BF16), norm=nn.RMSNorm(H, 1e-6, device="meta", dtype=BF16))


# --- activations ------------------------------------------------------------------------------------------------------


def llama_mlp(T: int, *, activation: str, direction: str, batch: int, hidden: int, intermediate: int) -> Step | Program:
    """Llama's MLP of transformers in bfloat16."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, hidden_act=activation)
    residents = {"x": leaf(batch, T, hidden, dtype=BF16), "layer": LlamaMLP(config).to("meta").to(BF16)}

    def function(m: Any) -> Tensor:
        y: Tensor = m.layer(m.x)
        return y

    if direction == "forward":
        return forward_after_backward(function, **residents)
    return train_function(function, retain=True, random_gradient=True, **residents)


def megatron_swiglu(ffn: int) -> Step:
    """SwiGLU of the two halves of 2048 x 4 rows in bfloat16; the loss is the sum."""

    def activate(y: Tensor) -> Tensor:
        a, b = torch.chunk(y, 2, -1)
        return F.silu(a) * b

    def step(m: Any) -> None:
        m.x.grad = None
        y = activate(m.x)
        y.sum().backward()

    return repeat_step(step, x=leaf(2048, 4, 2 * ffn, dtype=BF16))


def one_row(N: int, *, function: str, dtype: str) -> Step:
    """Softmax or squared ReLU of a tensor of one dimension."""

    def squared_relu(x: Tensor) -> Tensor:
        positive = F.relu(x)
        return torch.square(positive)

    chosen = {"softmax": lambda x: F.softmax(x, -1), "squared_relu": squared_relu}[function]

    def step(m: Any) -> None:
        y = chosen(m.x)
        backward_and_retain(y, torch.ones_like(y))

    return repeat_step(step, x=leaf(N, dtype=getattr(torch, dtype)))


def sparsemax(V: int) -> Step:
    """Sparsemax by sorting 2048 rows in float32."""

    def function(x: Tensor) -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        width = x.size(-1)
        ranks = torch.arange(1, width + 1, device=x.device, dtype=x.dtype).view(1, width)
        bound = 1 + ranks * ordered
        support = bound > sums
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        total = (ordered * support).sum(dim=-1, keepdim=True)
        threshold = (total - 1) / count
        return torch.clamp(x - threshold, min=0)

    def step(m: Any) -> None:
        y = function(m.x)
        backward_and_retain(y, m.dy)

    return repeat_step(step, x=leaf(2048, V), dy=meta(2048, V))


# --- attention and embeddings -----------------------------------------------------------------------------------------


def make_angles(m: Any) -> None:
    """Compute the rotary angles, a matrix product: cuBLAS allocates its workspace there."""
    with torch.no_grad():
        m.frequencies[None, :, None].float() @ m.positions[:, None, :].float()


def rotary_tensors(H: int, T: int) -> dict[str, Any]:
    """Make the queries and keys of 32 and 8 heads, their gradients, and what the angles are made from."""
    width = H // 32
    shapes = {"q": 32, "k": 8}
    return {
        **{name: leaf(1, T, heads, width, dtype=BF16) for name, heads in shapes.items()},
        **{f"d{name}": meta(1, T, heads, width, dtype=BF16) for name, heads in shapes.items()},
        "positions": meta(1, T, dtype=torch.int64),
        "frequencies": meta(width // 2),
    }


def rope(H: int, T: int) -> Step:
    """Rotary embedding as in Llama, in bfloat16."""

    def rotate_half(x: Tensor) -> Tensor:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)

    def embed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q_out = (q * cos) + (rotate_half(q) * sin)
        k_out = (k * cos) + (rotate_half(k) * sin)
        return q_out, k_out

    def before(m: Any) -> tuple[Tensor, Tensor]:
        make_angles(m)
        return m.q.transpose(1, 2), m.k.transpose(1, 2)

    def step(m: Any, heads_first: tuple[Tensor, Tensor]) -> None:
        outputs = embed(*heads_first, m.cos, m.sin)
        gradients = m.dq.transpose(1, 2), m.dk.transpose(1, 2)
        torch.autograd.grad(outputs, heads_first, gradients, allow_unused=True, retain_graph=True)

    tables = {name: meta(1, T, H // 32, dtype=BF16) for name in ("cos", "sin")}
    return repeat_step(step, before=before, **rotary_tensors(H, T), **tables)


def llama4_rope(H: int, T: int) -> Step:
    """Rotary embedding as in Llama 4, by complex numbers."""

    def as_complex(x: Tensor) -> Tensor:
        return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))

    def embed(m: Any) -> tuple[Tensor, Tensor]:
        q, k = as_complex(m.q), as_complex(m.k)
        q_out = torch.view_as_real(q * m.table[:, :, None, :]).flatten(3)
        k_out = torch.view_as_real(k * m.table[:, :, None, :]).flatten(3)
        return q_out.type_as(m.q), k_out.type_as(m.k)

    def step(m: Any, _: None) -> None:
        outputs = embed(m)
        torch.autograd.grad(outputs, (m.q, m.k), (m.dq, m.dk), allow_unused=True, retain_graph=True)

    table = meta(1, T, H // 64, dtype=torch.complex64)
    return repeat_step(step, before=make_angles, table=table, **rotary_tensors(H, T))


class NeighbourhoodAttention(nn.Module):
    """Attention whose mask lets a token see its neighbourhood."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width, self.scale = heads, width // heads, 1 / math.sqrt(width // heads)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, device="meta") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend with the whole matrix of scores."""
        batch, tokens, width = x.shape
        query = self.q(x)
        key = self.k(x)
        value = self.v(x)
        query = query.view(batch, tokens, self.heads, self.width).transpose(1, 2)
        key = key.view(batch, tokens, self.heads, self.width).transpose(1, 2)
        value = value.view(batch, tokens, self.heads, self.width).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        # The published code fills the mask element by element, which allocates nothing that stays.
        mask = torch.zeros(tokens, tokens, device=x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out = torch.matmul(weights, value)
        out = out.transpose(1, 2).contiguous().view(batch, tokens, width)
        output: Tensor = self.out(out)
        return output


def neighbourhood_attention(T: int, *, B: int, H: int, heads: int) -> Program:
    """Neighbourhood attention in float32, beside a layer of the other provider."""
    layers = {name: NeighbourhoodAttention(H, heads) for name in ("other", "layer")}
    return last_round(
        lambda m: m.layer(m.x).backward(m.dy, retain_graph=True), x=leaf(B, T, H), dy=meta(B, T, H), **layers
    )


class MultiTokenAttention(nn.Module):
    """Softmax of masked scores, then a convolution over them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = leaf(4, 4, 3, 3, dtype=dtype), leaf(4, dtype=dtype)

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores after the convolution, masked again."""
        length = scores.shape[-1]
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=scores.device)).view(1, 1, length, length)
        low = torch.tensor(-1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.tensor(0.0, device=scores.device, dtype=scores.dtype)
        masked = scores.masked_fill(~mask, low)
        probs = torch.softmax(masked, dim=-1)
        out = F.conv2d(probs, self.weight, self.bias, stride=1, padding=1)
        return out.masked_fill(~mask, zero)


def multi_token_attention(L: int) -> Step:
    """Multi-token attention over 2 x 4 matrices of scores in bfloat16."""
    layers = {name: MultiTokenAttention(BF16) for name in ("norm", "other")}
    return repeat_step(normalise_rows, x=leaf(2, 4, L, L, dtype=BF16), dy=meta(2, 4, L, L, dtype=BF16), **layers)


class SparseMultiTokenAttention(MultiTokenAttention):
    """Sparsemax of masked scores, then a convolution over them, in float32."""

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores after the convolution, masked again; all names stay bound, as the published ones do."""
        length, device, dtype = scores.shape[-1], scores.device, torch.float32
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=device)).view(1, 1, length, length)
        low = torch.tensor(-1e9, device=device, dtype=dtype)
        zero = torch.tensor(0.0, device=device, dtype=dtype)
        z = scores.to(dtype).masked_fill(~mask, low)
        ordered, _ = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        ranks = torch.arange(1, length + 1, device=device, dtype=dtype).view(1, 1, 1, length)
        is_positive = ordered > -1e8
        condition = (1 + ranks * ordered > sums) & is_positive
        count = torch.sum(condition, dim=-1, keepdim=True)
        safe = torch.max(count, torch.ones_like(count))
        chosen = torch.gather(sums, dim=-1, index=safe.long() - 1)
        threshold = (chosen - 1) / safe.to(dtype)
        threshold = torch.where(count == 0, torch.full_like(threshold, float("inf")), threshold)
        probs = torch.clamp(z - threshold, min=0)
        out = F.conv2d(probs, self.weight.to(dtype), self.bias.to(dtype), stride=1, padding=1)
        masked = out.masked_fill(~mask, zero)
        return masked.to(scores.dtype)


def sparse_multi_token_attention(L: int) -> Program:
    """Sparse multi-token attention over 2 x 4 matrices of scores in float32."""
    layers = {name: SparseMultiTokenAttention(torch.float32) for name in ("other", "norm")}
    return last_round(normalise_rows, x=leaf(2, 4, L, L), dy=meta(2, 4, L, L), **layers)


def embedding(V: int, *, B: int, T: int, D: int) -> Step:
    """An embedding of float32 rows with a random gradient."""

    def step(m: Any) -> None:
        out = m.embedding(m.ids)
        out.backward(torch.randn_like(out))

    tables = {name: nn.Embedding(V, D, device="meta") for name in ("embedding", "other")}
    return repeat_step(step, ids=meta(B, T, dtype=torch.int64), **tables)
