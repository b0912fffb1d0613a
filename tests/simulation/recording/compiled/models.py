"""The steps whose compiled form is run for real on the CPU and predicted: `benchmarks/programs/compiled_cpu.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, TOKENS = 128, 1009, (2, 64)


@dataclasses.dataclass
class Case:
    """A step, with what `torch.compile` is given."""

    model: nn.Module
    inputs: Any
    optimizer: str = "adamw"
    precision: str | None = None
    dynamic: bool | None = None


class Breaks(nn.Module):
    """A language model between whose body and head dynamo ends the graph."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model.transformer(input_ids).last_hidden_state
        torch._dynamo.graph_break()
        return F.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """Attention and an MLP, with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: torch.Tensor = x + self.mlp(x)
        return out


class Language(nn.Module):
    """A block between tied embeddings, with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.block = Block()
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(ids))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class UNet(nn.Module):
    """Two levels down and up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self._block(3, 16)
        self.deep = self._block(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Sequential(self._block(32, 16), nn.Conv2d(16, 2, 1))

    @staticmethod
    def _block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        out: torch.Tensor = self.last(torch.cat([skip, self.up(self.deep(F.max_pool2d(skip, 2)))], 1))
        return out


class Experts(nn.Module):
    """A mixture of experts whose shapes do not hang on the data: each expert takes its most probable tokens."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.zeros(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(experts, 2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x).softmax(-1).t().topk(len(x) // 2, dim=-1)
        out = torch.bmm(F.silu(torch.bmm(x[chosen], self.up)), self.down) * share.unsqueeze(-1)
        return x.index_add(0, chosen.flatten(), out.flatten(0, 1))


class Scaled(nn.Module):
    """Numbers that may vary where sizes may: of a norm, a dropout, the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1))
        self.scale = 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x) * self.scale
        return 0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * torch.pow(x, 3.0))))


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _language(name: str, **settings: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")
    kind = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    torch.manual_seed(0)
    return getattr(transformers, kind)(config(vocab_size=VOCABULARY, use_cache=False, **settings))


def _gpt2() -> Any:
    return _language("GPT2", n_layer=2, n_embd=WIDTH, n_head=4, n_positions=128)


def _bert() -> Any:
    shape = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    return _language("Bert", **shape)


def _llama() -> Any:
    shape = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _language("Llama", **shape, intermediate_size=3 * WIDTH)


def cnn() -> Case:
    """ResNet-18 of torchvision."""
    import torchvision

    return Case(torchvision.models.resnet18(), torch.zeros(2, 3, 64, 64), "sgd-momentum")


def vit(precision: str | None = None) -> Case:
    """A ViT of timm."""
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=64, patch_size=16, embed_dim=WIDTH, depth=2, num_heads=4, num_classes=100)
    return Case(model, torch.zeros(4, 3, 64, 64), precision=precision)


def convolutions() -> Case:
    """Convolutions with a batch norm."""
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten())
    return Case(nn.Sequential(*layers), torch.zeros(4, 3, 16, 16), "sgd-momentum")


CASES: dict[str, Callable[[], Case]] = {
    "cnn": cnn,
    "vit": vit,
    "vit, bf16 autocast": lambda: vit("bf16"),
    "gpt2: dropout, tied weights": lambda: Case(_gpt2(), _tokens()),
    "gpt2, a graph break": lambda: Case(Breaks(_gpt2()), _tokens()),
    "gpt2, dynamic=True": lambda: Case(_gpt2(), _tokens(), dynamic=True),
    "bert: dropout": lambda: Case(_bert(), _tokens()),
    "llama": lambda: Case(_llama(), _tokens(), "sgd"),
    "llama, bf16 autocast": lambda: Case(_llama(), _tokens(), precision="bf16"),
    "u-net": lambda: Case(UNet(), torch.zeros(2, 3, 32, 32)),
    "mixture of experts": lambda: Case(Experts(), torch.zeros(256, WIDTH), "sgd"),
    "attention, tied weights, a graph break": lambda: Case(Language(), torch.zeros(4, 32, dtype=torch.int64)),
    "convolutions": convolutions,
    "floats, dynamic=True": lambda: Case(Scaled(), torch.zeros(8, 64), "sgd", dynamic=True),
    "checkpointed": lambda: Case(Checkpointed(), torch.zeros(4, 64, WIDTH)),
}
"""By name; each is made anew for every run."""
