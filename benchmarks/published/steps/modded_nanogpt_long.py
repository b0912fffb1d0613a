"""One of eight ranks of modded-nanogpt's records of early 2025, with a head in float8 and a long validation.

Source: KellerJordan/modded-nanogpt at f411b3d3, records/track_1_short/2025-01-26_BatchSize and 2025-02-01_RuleTweak:
each log begins with the whole script and ends with the peaks of the run. A step is one sequence of 49,152 tokens; a
sequence of validation has 262,144, whose head is in bfloat16. Gradients are reduced one by one. The later record trains
a few steps first and then loads what it has copied of model and optimizers, so both are there at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from . import Peaks, Program
from .loops import measure
from .modded_nanogpt import BLOCK, END, HEAD, HEADS, LAYERS, RANKS, WIDTH, WORDS, Cast, Layer, Muon, Rotary, load, norm

TOKENS, VALIDATED, ROWS = 49152, 262144, 50257
WINDOWS = "lssslsslsssl"
"""Which layers see a whole window, and which half of it."""
F8, WIDE_F8 = torch.float8_e4m3fn, torch.float8_e5m2

# --- the head ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("modded_nanogpt::multiply", mutates_args=())
def multiply(x: Tensor, weight: Tensor, x_scale: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply in float8; both factors in it are kept."""

    @torch.compile
    def compiled(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        small_x, small = x.mul(x_scale).to(F8), weight.mul(scale).to(F8)
        scales = {"scale_a": x.new_tensor(1 / x_scale, dtype=torch.float32)}
        scales["scale_b"] = x.new_tensor(1 / scale, dtype=torch.float32)
        y = torch._scaled_mm(small_x, small.t(), out_dtype=torch.bfloat16, use_fast_accum=True, **scales)
        return y, small_x, small

    return compiled(x, weight)


@multiply.register_fake
def _(x: Tensor, weight: Tensor, x_scale: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return x @ weight.t(), x.to(F8), weight.to(F8)


@torch.library.custom_op("modded_nanogpt::multiply_backward", mutates_args=())
def multiply_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, x_scale: float, scale: float, gradient_scale: float
) -> tuple[Tensor, Tensor]:
    """Multiply the gradient in float8 by both factors."""

    @torch.compile
    def compiled(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scales = [gradient.new_tensor(1 / each, dtype=torch.float32) for each in (x_scale, scale, gradient_scale)]
        small = gradient.mul(gradient_scale).to(WIDE_F8)
        of_x = torch._scaled_mm(
            small, weight.t().contiguous().t(), out_dtype=torch.bfloat16, scale_a=scales[2], scale_b=scales[1]
        )
        of_weight = torch._scaled_mm(
            x.t().contiguous(),
            small.t().contiguous().t(),
            out_dtype=torch.float32,
            scale_a=scales[0],
            scale_b=scales[2],
        )
        return of_x, of_weight.t()

    return compiled(gradient, x, weight)


@multiply_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, x_scale: float, scale: float, gradient_scale: float
) -> tuple[Tensor, Tensor]:
    return x.to(torch.bfloat16), weight.to(torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.scales = inputs[2:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_x, of_weight = multiply_backward(gradient, *ctx.saved_tensors, *ctx.scales, 2.0**19)
    return of_x, of_weight, None, None


multiply.register_autograd(_backward, setup_context=_keep)


class Head(Cast):
    """The head, in float8 while training."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        if not self.training:
            return super().forward(x)
        logits: Tensor = multiply(x.flatten(0, -2), self.weight, 2.0, 2.0**9)[0]
        return logits.reshape(*x.shape[:-1], -1)


# --- the model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention to the same document, values mixed with their embedding; one weight for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, WIDTH, WIDTH))
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.rotary = Rotary(VALIDATED)
        self.output = Cast(WIDTH, WIDTH)

    def forward(self, x: Tensor, value: Tensor | None, mask: BlockMask) -> Tensor:
        """Attend to what the mask leaves."""
        together = F.linear(x, self.weight.flatten(end_dim=1).type_as(x))
        q, k, v = together.view(1, x.size(1), 3 * HEADS, HEAD).chunk(3, dim=-2)
        q, k = norm(q), norm(k)
        q, k = self.rotary(q), self.rotary(k)
        v = self.lambdas[0] * v if value is None else self.lambdas[0] * v + self.lambdas[1] * value.view_as(v)
        y = flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, scale=0.12)
        assert isinstance(y, Tensor)
        output: Tensor = self.output(y.transpose(1, 2).contiguous().view(1, x.size(1), WIDTH))
        return output


class Block(Layer):
    """A layer, which adds the embedding once more; the eighth has no attention."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention = None if index == 7 else Attention()
        self.inner, self.outer = Cast(WIDTH, 4 * WIDTH), Cast(4 * WIDTH, WIDTH)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))


def order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Count the blocks of each row and list them, those of the mask first."""
    count = mask.sum(dim=-1, dtype=torch.int32)
    indices = mask.argsort(dim=-1, descending=False, stable=True).flip(-1).to(torch.int32)
    return count[None, None].contiguous(), indices[None, None].contiguous()


def make_masks(ids: Tensor, window: Tensor) -> dict[str, BlockMask]:
    """Let a token see its document before it, as far as a window of blocks or half of it."""
    documents = (ids == END).cumsum(0)

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[q] == documents[k])

    blocks = torch.arange(len(ids) // BLOCK, dtype=torch.int32, device="cuda")
    before, wholly_before = blocks[:, None] >= blocks, blocks[:, None] > blocks
    low, high = (documents.view(-1, BLOCK)[:, at].contiguous() for at in (0, -1))
    some = before & ((low[:, None] <= high) & (high[:, None] >= low))
    full = wholly_before & ((low[:, None] == high) & (high[:, None] == low))
    partial, partial_indices = order(some & ~full)
    count, indices = order(full)

    def make(size: Tensor) -> BlockMask:
        return BlockMask.from_kv_blocks(
            torch.clamp_max(partial, torch.clamp_min(size - count, 1)),
            partial_indices,
            torch.clamp_max(count, size - 1),
            indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
        )

    return {"l": make(window), "s": make(window // 2)}


class Model(nn.Module):
    """The model with its loss: the first half of the layers is added to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.values = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Block(index) for index in range(LAYERS))
        self.head = Head(WIDTH, WORDS)
        self.skips = nn.Parameter(torch.ones(LAYERS // 2))

    def forward(self, ids: Tensor, labels: Tensor, window: Tensor) -> Tensor:
        """Return the loss of a sequence."""
        found = [each(ids) for each in self.values]
        values = [*found, *[None] * (LAYERS - 2 * len(found)), *found]
        masks = make_masks(ids, window)
        x = first = norm(self.words(ids)[None])
        kept: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if index >= LAYERS // 2:
                x = x + self.skips[index - LAYERS // 2] * kept.pop()
            x = layer(x, values[index], first, masks[WINDOWS[index]])
            if index < LAYERS // 2:
                kept.append(x)
        logits = self.head(norm(x))
        logits = 30 * torch.sigmoid(logits.float() / 7.5)
        return F.cross_entropy(logits.view(-1, WORDS), labels)


# --- the run ----------------------------------------------------------------------------------------------------------


class Run:
    """A run of a record."""

    def __init__(self) -> None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        dist.barrier()
        model = Model().cuda()
        for each in model.modules():
            if isinstance(each, nn.Embedding):
                each.bfloat16()
        for param in model.parameters():
            dist.broadcast(param.detach(), 0)
        matrices = [each for each in model.layers.parameters() if each.ndim >= 2]
        tables = [*model.words.parameters(), *model.values.parameters()]
        numbers = [each for each in model.parameters() if each.ndim < 2]
        groups = [{"params": each} for each in ([model.head.weight], tables, numbers)]
        self.adam, self.muon = torch.optim.Adam(groups, fused=True), Muon(matrices, is_whole=True)
        self.module = model
        self.model = torch.compile(model, dynamic=False)
        self.window = torch.tensor(1, dtype=torch.int32, device="cuda")

    def warm(self) -> None:
        """Train, and go back to a copy of model and optimizers."""
        state = [each.clone() for each in self.module.state_dict().values()]
        buffers = [group["updates"][0]._base.clone().unbind() for group in self.muon.param_groups]
        self.train()
        for here, copied in zip(self.module.state_dict().values(), state, strict=True):
            here.copy_(copied)
        for optimizer in (self.adam, self.muon):
            optimizer.state.clear()
        for group, updates in zip(self.muon.param_groups, buffers, strict=True):
            group["updates"] = updates[0]._base.clone().unbind()  # what is loaded is copied once more

    def validate(self, batches: int = 2) -> None:
        """Sum the loss of other batches."""
        self.module.eval()
        self.loss: Any = 0.0  # stays for the whole run, as the last batch does
        with torch.no_grad():
            for _ in range(batches):
                self.checked = load(VALIDATED)
                self.loss += self.model(*self.checked, self.window)
        dist.all_reduce(self.loss, op=dist.ReduceOp.AVG)
        self.module.train()

    def train(self, steps: int = 3) -> None:
        """Train for a few steps."""
        for _ in range(steps):
            self.batch = load(TOKENS)
            self.model(*self.batch, self.window).backward()
            for param in self.module.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
            self.adam.step()
            self.muon.step()
            self.module.zero_grad(set_to_none=True)


def run_whole(*, warms: bool) -> None:
    """Validate, train and validate again, as the first and the last steps of a run do."""
    run = Run()
    if warms:
        run.warm()
    run.validate()
    run.train()
    run.validate()


def train(record: str) -> Program:
    """The run of one of eight ranks."""

    def run() -> dict[str, Peaks]:
        return {"": measure(lambda: run_whole(warms=record >= "2025-02"))}

    return Program(run, "", compile="as-is", ranks=RANKS)
