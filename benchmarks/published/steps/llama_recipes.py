"""One rank of Llama 2 7B with LoRA and FSDP1, as llama-recipes had it in July 2023.

Source: meta-llama/llama-cookbook (then llama-recipes) at 71fdc492 and the commit before, llama_finetuning.py,
utils/train_utils.py, policies, configs: bfloat16, 4 rows of 2,048 tokens, every layer and every adapter a flat
parameter of its own, every layer a checkpoint. The model is transformers 4.31's, whose attention writes its scores and
whose keys and values are kept for generation; the adapters are peft 0.4's: float32, of rank 8, beside queries and
values.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import functional as F

from . import Peaks, Program
from .loops import leaf, linear, measure, meta

BF16 = torch.bfloat16
WIDTH, LAYERS, HEADS, INNER, WORDS = 4096, 32, 32, 11008, 32000
ROWS, TOKENS, RANKS = 4, 2048, 4
HEAD = WIDTH // HEADS


class Adapted(nn.Linear):
    """A frozen linear layer, and what its adapter adds in place."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False, dtype=BF16, device="meta")
        self.dropout = nn.Dropout(0.05)
        self.down, self.up = linear(WIDTH, 8, torch.float32), linear(8, WIDTH, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in bfloat16, adapt in float32."""
        result = F.linear(x, self.weight)
        x = x.to(torch.float32)
        result += self.up(self.down(self.dropout(x))) * 4.0
        return result


class RootNorm(nn.Module):
    """RMS norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = leaf(WIDTH, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(BF16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn halves of channels."""
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


class Attention(nn.Module):
    """Attention whose scores are written, in float32 for the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = Adapted(), linear(WIDTH, WIDTH), Adapted(), linear(WIDTH, WIDTH)
        for name in ("cos", "sin"):
            self.register_buffer(name, meta(TOKENS, HEAD, dtype=BF16))

    def forward(self, x: Tensor, mask: Tensor, places: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend; return keys and values, too."""
        q, k, v = (each(x).view(ROWS, TOKENS, HEADS, HEAD).transpose(1, 2) for each in (self.q, self.k, self.v))
        cos, sin = self.cos[places].unsqueeze(1), self.sin[places].unsqueeze(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(HEAD)
        scores = scores + mask
        scores = F.softmax(scores, dim=-1, dtype=torch.float32).to(BF16)
        output = torch.matmul(scores, v).transpose(1, 2).contiguous().reshape(ROWS, TOKENS, WIDTH)
        return self.o(output), (k, v)


class Block(nn.Module):
    """A layer; what it returns has its keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp_norm = Attention(), RootNorm(), RootNorm()
        self.gate, self.into, self.out = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, places: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Apply attention and the gated MLP, each beside its input."""
        attended, kept = self.attention(self.norm(x), mask, places)
        x = x + attended
        y = self.mlp_norm(x)
        return x + self.out(F.silu(self.gate(y)) * self.into(y)), kept


class Llama(nn.Module):
    """The model; all but the adapters is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=BF16, device="meta")
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = RootNorm(), linear(WIDTH, WORDS)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = ".down." in name or ".up." in name

    def run_layers(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """The last layer's output, normalised, and the keys and values of all."""
        places = torch.arange(TOKENS, device=ids.device).unsqueeze(0)
        x, kept, mask = self.words(ids), (), join_masks(mask)
        for layer in self.layers:
            x, pair = layer(x, mask, places)
            kept += (pair,)
        return self.norm(x), kept

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Any]:
        """The loss, the logits in float32, and the keys and values."""
        x, kept = self.run_layers(ids, mask)
        logits = self.head(x)
        logits = logits.float()
        shifted = logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(shifted.view(-1, WORDS), labels[..., 1:].contiguous().view(-1))
        return {"loss": loss, "logits": logits, "kept": kept}


def join_masks(mask: Tensor) -> Tensor:
    """What is added to the scores: a causal mask, and one of the padding."""
    least = torch.finfo(BF16).min
    causal = torch.full((TOKENS, TOKENS), least, device=mask.device)
    at = torch.arange(TOKENS, device=mask.device)
    causal.masked_fill_(at < (at + 1).view(TOKENS, 1), 0)
    kept = mask[:, None, None, :].expand(ROWS, 1, TOKENS, TOKENS).to(BF16)
    padding = (1.0 - kept).masked_fill((1.0 - kept).to(torch.bool), least)
    return padding + causal.to(BF16)[None, None].expand(ROWS, 1, TOKENS, TOKENS)


def shard(model: nn.Module) -> FullyShardedDataParallel:
    """Make layers and adapters flat parameters, and layers checkpoints."""

    def is_adapter(module: nn.Module) -> bool:
        return not [*module.children()] and getattr(module, "weight", None) is not None and module.weight.requires_grad

    adapters = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_adapter)
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(_or_policy, policies=[adapters, layers]),
        device_id=torch.cuda.current_device(),
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        limit_all_gathers=True,
    )
    apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, Block))
    return sharded


def train(*, keeps: bool = False) -> Program:
    """The training of one of four ranks.

    Args:
        keeps: what the model returned before is there until it returns again, as until 71fdc492.
    """

    def run() -> dict[str, Peaks]:
        torch.distributed.init_process_group("nccl")
        model = shard(Llama())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
        torch.cuda.empty_cache()
        return {"": measure(functools.partial(loop, model, optimizer, keeps))}

    return Program(run, "", ranks=RANKS)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, keeps: bool, steps: int = 3) -> None:
    """Train for a few steps."""
    for _ in range(steps):
        batch = [torch.zeros(ROWS, TOKENS, dtype=torch.int64).to("cuda") for _ in range(3)]
        outputs = model(*batch)
        loss = outputs["loss"]
        if not keeps:
            del outputs
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
