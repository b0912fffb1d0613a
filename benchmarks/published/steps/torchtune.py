"""Fine-tuning of Llama 3.2 3B with torchtune on one card, on packed rows, whole or with LoRA.

Source: pytorch/torchtune at 1814feb17, README.md ("Optimization flags": each row adds to the last) and
recipes/full_finetune_single_device.py: two rows of 4,096 tokens in bfloat16, fused AdamW, embeddings that are the head.
Layers are compiled by themselves, and so is the loss by chunks: of the whole loss the recipe drops what `compile_loss`
returns (line 292). Rows are packed, so that attention is flex attention, always compiled, which the graph of a layer
breaks for. With LoRA recipes/lora_finetune_single_device.py and recipes/configs/llama3_2/3B_lora_single_device.yaml:
rank 64 on queries, values, outputs and the MLP. Offloaded activations (torchtune/training/_activation_offloading.py)
go to the host while layers compute; those of the head stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

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
RANK, SCALE = 64, 2.0

Adapters = Literal["", "lora", "qlora"]
"""What is trained: everything, or adapters beside weights in bfloat16 or NF4."""

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


class Frozen(nn.Module):
    """A linear layer in NF4 that is not trained."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner, dtype=BF16, device="meta"), requires_grad=False)

    def quantise(self) -> None:
        """Put the weight into NF4."""
        from torchao.quantization import NF4Tensor

        self.weight = nn.Parameter(NF4Tensor.from_tensor(self.weight, 64, 256), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight in bfloat16, of which backward keeps the NF4 alone."""
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        output: Tensor = linear_nf4(input=x, weight=self.weight)
        return output


class Adapted(nn.Module):
    """A linear layer that is not trained beside two of rank 64 that are."""

    def __init__(self, base: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, linear(inner, RANK), linear(RANK, outer)

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        base: Tensor = self.base(x)
        return base + SCALE * self.b(self.a(x))


def project(inner: int, outer: int, adapters: Adapters, *, is_adapted: bool = True) -> nn.Module:
    """Make a linear layer, with an adapter where it has one."""
    base: nn.Module = Frozen(inner, outer) if adapters == "qlora" else linear(inner, outer)
    return Adapted(base, inner, outer) if adapters and is_adapted else base


class Attention(nn.Module):
    """Attention with rotary embeddings at the positions within each sample."""

    def __init__(self, turns: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self.q, self.out = project(WIDTH, HEADS * HEAD, adapters), project(HEADS * HEAD, WIDTH, adapters)
        self.k = project(WIDTH, GROUPS * HEAD, adapters, is_adapted=False)
        self.v = project(WIDTH, GROUPS * HEAD, adapters)
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

    def __init__(self, turns: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(turns, adapters), RootNorm(), RootNorm()
        self.w1, self.w3 = (project(WIDTH, INNER, adapters) for _ in range(2))
        self.w2 = project(INNER, WIDTH, adapters)

    def forward(self, x: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        """Apply both."""
        h = self.attention(self.norm1(x), mask, positions) + x
        normed = self.norm2(h)
        output: Tensor = h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return output


class Decoder(nn.Module):
    """The model; its logits are in float32, or in bfloat16 by chunks of tokens."""

    def __init__(self, *, chunked: bool, adapters: Adapters) -> None:
        super().__init__()
        turns = Turns()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=BF16, device="meta")
        self.layers = nn.ModuleList([Layer(turns, adapters) for _ in range(LAYERS)])
        self.norm, self.chunked = RootNorm(), chunked
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not adapters or name.endswith((".a.weight", ".b.weight")))

    def forward(self, tokens: Tensor, mask: BlockMask, positions: Tensor) -> Any:
        """Compute the logits."""
        h = self.words(tokens)
        for layer in self.layers:
            h = layer(h, mask=mask, positions=positions)
        h = self.norm(h)
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
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


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what is saved in pinned memory of the host; copies run on a stream of their own.

    The last five saved tensors stay on the card as well. In backward a tensor stays until the next node that fetches
    one is done.
    """

    def __init__(self) -> None:
        super().__init__(self.send, self.fetch)
        self.stream = torch.cuda.Stream()
        self.kept: list[Tensor] = []
        self.is_sent: list[bool] = []
        self.recent: dict[int, Tensor] = {}
        self.fetched: dict[int, Tensor] = {}
        self.node: Any = None

    def send(self, tensor: Tensor) -> int:
        """Copy a tensor to the host, unless it is small or a parameter; return its number."""
        index = len(self.kept)
        self.is_sent.append(tensor.nbytes >= 1024 and not isinstance(tensor, nn.Parameter))
        if not self.is_sent[index]:
            self.kept.append(tensor)
            return index
        for old in [each for each in self.recent if each <= index - 5]:
            del self.recent[old]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.kept.append(torch.empty_like(tensor, device="cpu", pin_memory=True))
            self.kept[index].copy_(tensor, non_blocking=True)
        self.recent[index] = tensor
        return index

    def fetch(self, index: int) -> Tensor:
        """Return a tensor, from the host where it is not on the card."""
        if not self.is_sent[index]:
            return self.kept[index]
        node: Any = torch._C._current_autograd_node()
        before = list(self.fetched) if node != self.node else []
        self.node = node
        found = self.recent.get(index)
        if found is None:
            with torch.cuda.stream(self.stream):
                found = self.kept[index].to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(self.stream)
            self.fetched[index] = found

        def finish(*_: Any) -> None:
            self.recent.clear()
            for each in before:
                self.fetched.pop(each, None)

        node.register_hook(finish)
        return found

    def clear(self) -> None:
        """Forget the last step."""
        self.kept, self.is_sent, self.node = [], [], None
        self.fetched.clear()


class Recipe:
    """The training loop of the recipe."""

    def __init__(
        self,
        *,
        compiled: bool,
        chunked: bool,
        checkpointed: bool,
        in_backward: bool,
        offloaded: bool,
        adapters: Adapters,
    ) -> None:
        self.model = Decoder(chunked=chunked, adapters=adapters).to_empty(device="cuda")
        for module in self.model.modules():
            if isinstance(module, Frozen):
                module.quantise()
        layers = self.model.layers
        for index in range(LAYERS):
            if compiled:
                layers[index].compile()
            if checkpointed:
                layers[index] = checkpoint_wrapper(layers[index])
        self.loss = Loss(compiled=compiled)
        self.ignored = torch.full((ROWS, 1), IGNORED, device="cuda")
        self.offload = Offload() if offloaded else None
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

    @contextlib.contextmanager
    def offloading(self) -> Iterator[None]:
        """Send what is saved to the host, where asked."""
        if self.offload is None:
            yield
            return
        self.offload.clear()
        with self.offload:
            yield

    def compute_loss(self, tokens: Tensor, labels: Tensor, mask: BlockMask, positions: Tensor) -> Tensor:
        """Compute the loss of a batch; the logits are deleted before backward."""
        with self.offloading():
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
                    if parameter.grad is not None:
                        parameter.grad *= scale
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


def finetune(
    *,
    compiled: bool = False,
    chunked: bool = False,
    checkpointed: bool = False,
    in_backward: bool = False,
    offloaded: bool = False,
    adapters: Adapters = "",
) -> Program:
    """Fine-tune on packed rows with these flags."""

    def run() -> dict[str, Peaks]:
        recipe = Recipe(
            compiled=compiled,
            chunked=chunked,
            checkpointed=checkpointed,
            in_backward=in_backward,
            offloaded=offloaded,
            adapters=adapters,
        )
        return {"": measure(recipe.train)}

    return Program(run, "", compile="as-is")
