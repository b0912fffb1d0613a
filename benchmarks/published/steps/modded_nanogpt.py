"""One of eight ranks of modded-nanogpt's records around New Year 2025, with flex attention and Muon.

Source: KellerJordan/modded-nanogpt at f411b3d3, records/track_1_short/2024-12-10_MFUTweaks, 2024-12-17_SparsifyEmbeds
and 2025-01-04_SoftCap: each log begins with the whole script and ends with the peaks of the run. A step is one sequence
of 65,536 tokens; validation has sequences of the same length and comes first, so the peak is that of training. The
model is compiled, then wrapped in DDP; what is not a linear weight is in bfloat16, or the embeddings alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from . import Peaks, Program
from .loops import measure

WIDTH, LAYERS, HEADS, TOKENS, BLOCK, WORDS, END = 768, 12, 6, 65536, 128, 50304, 50256
HEAD = WIDTH // HEADS
RANKS = 8
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Recipe:
    """What differs between the records."""

    tables: int = 3
    """Embeddings of values: the first layers and the last ones have the same."""
    words: int = WORDS
    """The rows of an embedding; those of the head are a multiple of 128."""
    skipped: int | None = 7
    """The layer without attention."""
    caches_angles: bool = False
    """Whether the first call makes the angles, in bfloat16, or they are buffers and turn float32."""
    is_half: bool = True
    """Whether all that is not a linear weight is in bfloat16, or the embeddings alone."""
    groups: int = 4
    """Whether embeddings, head, matrices and numbers have four optimizers, or two."""
    cap: float = 30.0


RECIPES = {
    "2024-12-10": Recipe(tables=6, skipped=None, caches_angles=True),
    "2024-12-17": Recipe(words=50257),
    "2025-01-04": Recipe(is_half=False, groups=2, cap=15.0),
}


# --- the model --------------------------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """Divide by the root mean square."""
    return F.rms_norm(x, (x.size(-1),))


class Cast(nn.Linear):
    """A linear layer whose weight takes the input's dtype."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.weight.to(x.dtype))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, left * (-sin) + right * cos), 3)


class CachedRotary(nn.Module):
    """Rotary embeddings whose angles the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", (1 / 10000) ** (torch.arange(0, HEAD, 2) / HEAD))
        self.length = 0
        self.cos: Any = None
        self.sin: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Turn heads."""
        if x.shape[1] != self.length:
            angles = torch.outer(torch.arange(x.shape[1], device=x.device), self.frequencies)
            self.length, self.cos, self.sin = x.shape[1], angles.cos(), angles.sin()
        return turn(x, self.cos[None, :, None, :], self.sin[None, :, None, :]).type_as(x)


class Rotary(nn.Module):
    """Rotary embeddings of half of the channels, whose angles are buffers."""

    def __init__(self, tokens: int = TOKENS) -> None:
        super().__init__()
        frequencies = (1 / 1024) ** torch.linspace(0, 1, steps=HEAD // 4)
        angles = torch.outer(torch.arange(tokens).float(), F.pad(frequencies, (0, HEAD // 4)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn heads in float32."""
        cos, sin = (each[None, : x.size(1), None, :] for each in (self.cos, self.sin))
        return turn(x.float(), cos, sin).type_as(x)


class Attention(nn.Module):
    """Attention to the same document, values mixed with their embedding."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.q, self.k, self.v = (Cast(WIDTH, WIDTH) for _ in "qkv")
        self.rotary = CachedRotary() if recipe.caches_angles else Rotary()
        self.output = Cast(WIDTH, WIDTH)

    def forward(self, x: Tensor, value: Tensor | None, mask: BlockMask) -> Tensor:
        """Attend to what the mask leaves."""
        q, k, v = (each(x).view(1, x.size(1), HEADS, -1) for each in (self.q, self.k, self.v))
        v = self.lambdas[0] * v if value is None else self.lambdas[0] * v + self.lambdas[1] * value.view_as(v)
        q, k = norm(q), norm(k)
        q, k = self.rotary(q), self.rotary(k)
        y = flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask)
        assert isinstance(y, Tensor)
        output: Tensor = self.output(y.transpose(1, 2).contiguous().view_as(x))
        return output


class Layer(nn.Module):
    """A layer, which adds the embedding once more. Records differ in the order of its parameters."""

    lambdas: nn.Parameter
    attention: nn.Module | None
    inner: nn.Module
    outer: nn.Module

    def forward(self, x: Tensor, value: Tensor | None, first: Tensor, mask: BlockMask) -> Tensor:
        """Apply attention and the MLP of a squared ReLU."""
        x = self.lambdas[0] * x + self.lambdas[1] * first
        if self.attention is not None:
            x = x + self.attention(norm(x), value, mask)
        output: Tensor = x + self.outer(F.relu(self.inner(norm(x))).square())
        return output


class Block(Layer):
    """A layer with the parameters of these records."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attention = None if index == recipe.skipped else Attention(recipe)
        self.inner, self.outer = Cast(WIDTH, 4 * WIDTH), Cast(4 * WIDTH, WIDTH)


def order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Count the blocks of each row and list them, those of the mask first."""
    count = mask.sum(dim=-1, dtype=torch.int32)
    indices = mask.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None].contiguous(), indices[None, None].contiguous()


def make_mask(ids: Tensor, window: Tensor) -> BlockMask:
    """Let a token see its document before it, as far as a window of blocks."""
    documents = (ids == END).cumsum(0)
    low, high = (documents.view(-1, BLOCK)[:, at].contiguous() for at in (0, -1))

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[q] == documents[k])

    k = torch.arange(len(ids) // BLOCK, dtype=torch.int32, device="cuda")
    q = k[:, None]
    in_window = q - k < window
    some = (q >= k) & in_window & ((low[:, None] <= high) & (low <= high[:, None]))
    full = (q > k) & in_window & ((low[:, None] == high) & (low == high[:, None]))
    found: BlockMask = BlockMask.from_kv_blocks(*order(some & ~full), *order(full), BLOCK_SIZE=BLOCK, mask_mod=sees)
    return found


class Model(nn.Module):
    """The model with its loss: the first half of the layers is added to the second."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.skips = nn.Parameter(torch.ones(LAYERS // 2))
        self.words = nn.Embedding(recipe.words, WIDTH)
        self.layers = nn.ModuleList(Block(recipe, index) for index in range(LAYERS))
        self.values = nn.ModuleList(nn.Embedding(recipe.words, WIDTH) for _ in range(recipe.tables))
        self.head = Cast(WIDTH, WORDS)

    def _value(self, ids: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = [each(ids) for each in self.values]
        if self.recipe.tables == LAYERS // 2:
            return [*found, *reversed(found)]
        return [*found, *[None] * (LAYERS - 2 * len(found)), *found]

    def forward(self, ids: Tensor, labels: Tensor, window: Tensor) -> Tensor:
        """Return the loss of a sequence."""
        mask = make_mask(ids, window)
        x = first = norm(self.words(ids[None]))
        values = self._value(ids)
        kept: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if index >= LAYERS // 2:
                x = x + self.skips[index - LAYERS // 2] * kept.pop()
            x = layer(x, values[index], first, mask)
            if index < LAYERS // 2:
                kept.append(x)
        logits = self.head(norm(x))
        logits = self.recipe.cap * torch.tanh(logits / self.recipe.cap)
        return F.cross_entropy(logits.float().view(-1, WORDS), labels)


# --- the optimizer ----------------------------------------------------------------------------------------------------


@torch.compile
def orthogonalise(gradient: Tensor, steps: int) -> Tensor:
    """Bring the singular values of a gradient near one by Newton and Schulz's iteration, in bfloat16."""
    x = gradient.bfloat16()
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal: each rank makes the update of every eighth matrix, all gather them."""

    def __init__(self, params: Sequence[nn.Parameter], *, is_whole: bool = False) -> None:
        sizes = {each.numel() for each in params}
        groups = [
            {"params": [each for each in params if each.numel() == size], "updates": self._make(size, is_whole)}
            for size in sizes
        ]
        super().__init__(groups, {})
        self.is_whole = is_whole
        """Whether the updates of all ranks are one tensor."""

    def _make(self, size: int, is_whole: bool) -> Sequence[Tensor]:
        if is_whole:
            return torch.empty(RANKS, size, device="cuda", dtype=BF16).unbind()
        return [torch.empty(size, device="cuda", dtype=BF16) for _ in range(RANKS)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix; the last round's updates are added while the next are made."""
        rank = dist.get_rank()
        for group in self.param_groups:
            params, updates = group["params"], group["updates"]
            handle: Any = None
            before: Sequence[nn.Parameter] = ()
            for base in range(0, len(params), RANKS):
                update = self._update(params[base + rank]) if base + rank < len(params) else updates[rank]
                add(before, updates, handle)
                if self.is_whole:
                    handle = dist.all_gather_into_tensor(updates[0]._base, update, async_op=True)
                else:
                    handle = dist.all_gather(updates, update, async_op=True)
                before = params[base : base + RANKS]
            add(before, updates, handle)

    def _update(self, param: nn.Parameter) -> Tensor:
        gradient, state = param.grad, self.state[param]
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 0.05)
        return orthogonalise(gradient.lerp_(state["momentum"], 0.95), 5).flatten()


def add(params: Sequence[nn.Parameter], updates: Sequence[Tensor], handle: Any) -> None:
    """Wait for what is gathered and add it."""
    if params:
        handle.wait()
    for param, update in zip(params, updates, strict=False):
        param.add_(update.view_as(param), alpha=-0.05)


# --- the run ----------------------------------------------------------------------------------------------------------


def load(count: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Bring tokens and what follows them to the card."""
    tokens = torch.zeros(count + 1, dtype=torch.uint16, pin_memory=True)
    return tokens[:-1].to("cuda", torch.int32, non_blocking=True), tokens[1:].to("cuda", torch.int64, non_blocking=True)


def build(recipe: Recipe) -> Model:
    """Make the model on the card, in the dtypes of the record."""
    model = Model(recipe).cuda()
    if recipe.is_half:
        model.bfloat16()
        for each in model.modules():
            if isinstance(each, Cast):
                each.float()
    else:
        for each in model.modules():
            if isinstance(each, nn.Embedding):
                each.bfloat16()
    return model


def make_optimizers(model: Model, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Make Adam for embeddings, head and numbers, Muon for matrices, in the order in which they step."""
    matrices = [each for each in model.layers.parameters() if each.ndim == 2]
    numbers = [each for each in model.layers.parameters() if each.ndim < 2]
    tables = [*model.words.parameters(), *model.values.parameters()]
    if recipe.groups == 4:
        adams = [torch.optim.Adam(each, fused=True) for each in (tables, [model.head.weight])]
        muon = Muon(matrices)
        return [*adams, muon, torch.optim.Adam([*numbers, model.skips], fused=True)]
    groups = [{"params": each} for each in (tables, [model.head.weight], [model.skips, *numbers])]
    return [torch.optim.Adam(groups, fused=True), Muon(matrices)]


class Run:
    """A run of a record."""

    def __init__(self, recipe: Recipe) -> None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        dist.barrier()
        self.loads_ahead = recipe.groups == 4
        self.batch = load() if self.loads_ahead else ()
        model = build(recipe)
        self.model = DistributedDataParallel(
            torch.compile(model), device_ids=[0], broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.optimizers = make_optimizers(model, recipe)
        self.window = torch.tensor(1, dtype=torch.int32, device="cuda")

    def validate(self, batches: int = 2) -> None:
        """Sum the loss of other batches."""
        self.model.eval()
        self.loss: Any = 0.0  # stays for the whole run, as the last batch does
        with torch.no_grad():
            for _ in range(batches):
                self.checked = load()
                self.loss += self.model(*self.checked, self.window)
        dist.all_reduce(self.loss, op=dist.ReduceOp.AVG)

    def train(self, steps: int = 4) -> None:
        """Validate, then train for a few steps."""
        self.validate()
        self.model.train()
        for _ in range(steps):
            if not self.loads_ahead:
                self.batch = load()
            self.model(*self.batch, self.window).backward()
            if self.loads_ahead:
                self.batch = load()
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)


def train(record: str) -> Program:
    """The run of one of eight ranks."""

    def run() -> dict[str, Peaks]:
        return {"": measure(lambda: Run(RECIPES[record]).train())}

    return Program(run, "", compile="as-is", ranks=RANKS)
