"""Full fine-tuning of Llama 3.2 3B with torchtune on one card, on packed rows.

Source: pytorch/torchtune at 1814feb17, README.md ("Optimization flags": each row adds to the last) and
recipes/full_finetune_single_device.py: two rows of 4,096 tokens in bfloat16, fused AdamW, embeddings that are the head.
Layers are compiled by themselves, and so is the loss by chunks: of the whole loss the recipe drops what `compile_loss`
returns (line 292). Rows are packed, so that attention is flex attention, always compiled, which the graph of a layer
breaks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from . import Peaks, Program
from .loops import leaf, linear, measure

BF16 = torch.bfloat16
WIDTH, LAYERS, HEADS, GROUPS, HEAD, INNER, WORDS, POSITIONS = 3072, 28, 24, 8, 128, 8192, 128256, 131072
ROWS, TOKENS, CHUNKS, IGNORED = 2, 4096, 8, -100

compiled_flex_attention = torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable(recursive=False)
def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attend within the samples of a row."""
    result: Tensor = compiled_flex_attention(q, k, v, block_mask=mask)
    return result


class RootNorm(nn.Module):
    """RMS norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = leaf(WIDTH, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Attention(nn.Module):
    """Attention with rotary embeddings at the positions within each sample."""

    def __init__(self, turns: nn.Module) -> None:
        super().__init__()
        self.q, self.out = linear(WIDTH, HEADS * HEAD), linear(HEADS * HEAD, WIDTH)
        self.k, self.v = (linear(WIDTH, GROUPS * HEAD) for _ in "kv")
        self.turns = turns

    def forward(self, x: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        """Attend; keys and values are repeated for the heads of queries."""
        rows, tokens, _ = x.shape
        q = self.turns(self.q(x).view(rows, tokens, HEADS, HEAD), positions).transpose(1, 2)
        k, v = self.k(x).view(rows, tokens, -1, HEAD), self.v(x).view(rows, tokens, -1, HEAD)
        k, v = self.turns(k, positions).transpose(1, 2), v.transpose(1, 2)
        shape = (rows, GROUPS, HEADS // GROUPS, -1, HEAD)
        k, v = (each.unsqueeze(2).expand(shape).flatten(1, 2) for each in (k, v))
        y = attend(q, k, v, mask)
        output: Tensor = self.out(y.transpose(1, 2).contiguous().view(rows, tokens, -1))
        return output


class Turns(nn.Module):
    """Turns pairs of channels in float32, by a table that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(POSITIONS, HEAD // 2, 2, device="meta"), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn queries or keys."""
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        table = self.table[positions].view(-1, pairs.size(1), 1, pairs.size(3), 2)
        first = pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1]
        second = pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1]
        return torch.stack([first, second], -1).flatten(3).type_as(x)


class Layer(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, turns: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(turns), RootNorm(), RootNorm()
        self.w1, self.w3, self.w2 = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        """Apply both."""
        h = self.attention(self.norm1(x), mask, positions) + x
        normed = self.norm2(h)
        output: Tensor = h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return output


class Decoder(nn.Module):
    """The model; its logits are in float32, or in bfloat16 by chunks of tokens."""

    def __init__(self, *, chunked: bool) -> None:
        super().__init__()
        turns = Turns()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=BF16, device="meta")
        self.layers = nn.ModuleList([Layer(turns) for _ in range(LAYERS)])
        self.norm, self.chunked = RootNorm(), chunked

    def forward(self, tokens: Tensor, mask: BlockMask, positions: Tensor) -> Any:
        """Compute the logits."""
        h = self.words(tokens)
        for layer in self.layers:
            h = layer(h, mask, positions)
        h = self.norm(h)
        if self.chunked:
            return [F.linear(chunk, self.words.weight) for chunk in h.chunk(CHUNKS, dim=1)]
        return F.linear(h, self.words.weight).float()


def add_up(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropies of a chunk."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


class Loss:
    """The cross entropy, of all logits or chunk by chunk."""

    def __init__(self, *, compiled: bool) -> None:
        self.whole = nn.CrossEntropyLoss(ignore_index=IGNORED)
        self.part: Any = torch.compile(add_up) if compiled else add_up

    def __call__(self, logits: Any, labels: Tensor) -> Tensor:
        """Compute it."""
        if not isinstance(logits, list):
            result: Tensor = self.whole(logits.reshape(-1, WORDS), labels.reshape(-1))
            return result
        count = (labels != IGNORED).sum()
        parts = [each.reshape(-1) for each in labels.chunk(CHUNKS, dim=1)]
        logits = [each.reshape(-1, WORDS) for each in logits]
        total: Any = 0.0
        for chunk, part in zip(logits, parts, strict=True):
            total += self.part(chunk, part)
        mean: Tensor = total / count
        return mean


def make_batch() -> tuple[Tensor, Tensor, BlockMask, Tensor]:
    """Make tokens, labels, mask and positions of two packed rows."""
    tokens, labels, samples, positions = (torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="cuda") for _ in range(4))

    def sees(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (samples[row, query] == samples[row, key])

    return tokens, labels, create_block_mask(sees, ROWS, None, TOKENS, TOKENS, device="cuda"), positions


class Recipe:
    """The training loop of the recipe."""

    def __init__(self, *, compiled: bool, chunked: bool, checkpointed: bool, in_backward: bool) -> None:
        self.model = Decoder(chunked=chunked).to_empty(device="cuda")
        layers = self.model.layers
        for index in range(LAYERS):
            if compiled:
                layers[index].compile()
            if checkpointed:
                layers[index] = checkpoint_wrapper(layers[index])
        self.loss = Loss(compiled=compiled)
        self.ignored = torch.full((ROWS, 1), IGNORED, device="cuda")
        self.optimizer = None if in_backward else torch.optim.AdamW(self.model.parameters(), fused=True)
        if in_backward:
            self._step_in_backward()

    def _step_in_backward(self) -> None:
        own = {each: torch.optim.AdamW([each], fused=True) for each in self.model.parameters()}

        def step(parameter: Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(step)

    def compute_loss(self, tokens: Tensor, labels: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        """Compute the loss of a batch; the logits are deleted before backward."""
        logits = self.model(tokens, mask, positions)
        labels = torch.hstack((labels[..., 1:], self.ignored))
        return self.loss(logits, labels)

    def train(self, steps: int = 3) -> None:
        """Train for a few steps."""
        for _ in range(steps):
            batch = make_batch()
            count = (batch[1] != IGNORED).sum()
            loss = self.compute_loss(*batch) * count
            loss.backward()
            if self.optimizer is not None:
                scale = 1 / count
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= scale
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


def finetune(
    *, compiled: bool = False, chunked: bool = False, checkpointed: bool = False, in_backward: bool = False
) -> Program:
    """Fine-tune on packed rows with these flags."""

    def run() -> dict[str, Peaks]:
        recipe = Recipe(compiled=compiled, chunked=chunked, checkpointed=checkpointed, in_backward=in_backward)
        return {"": measure(recipe.train)}

    return Program(run, "", compile="as-is")
