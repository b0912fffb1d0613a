"""The models of `plans.py`, with inputs small enough that a real step on the CPU takes a second or two."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torchvision
from torch import nn

__all__ = ["CASES", "Case"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its step."""

    text: str
    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    stages: Callable[[Any], list[nn.Module]] | None = None
    """The model as stages of which each needs the result of the one before and nothing else; None where it is no such
    chain."""
    efficient: Callable[[], nn.Module] | None = None
    """The library's own variant of the model that checkpoints."""


class _Apply(nn.Module):
    """A stage that is a function of modules the model has."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.modules_used = function, nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _resnet(m: Any) -> list[nn.Module]:
    return _joined(
        [m.conv1, m.bn1, m.relu, m.maxpool, *m.layer1, *m.layer2, *m.layer3, *m.layer4, m.avgpool, nn.Flatten(1), m.fc]
    )


def _vgg(m: Any) -> list[nn.Module]:
    return _joined([*m.features, m.avgpool, nn.Flatten(1), *m.classifier])


def _densenet(m: Any) -> list[nn.Module]:
    return _joined([*m.features, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), m.classifier])


def _inception(m: Any) -> list[nn.Module]:
    return [*(child for name, child in m.named_children() if name != "fc"), nn.Flatten(1), m.fc]


def _vit(m: Any) -> list[nn.Module]:
    stem = _Apply(lambda x: m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(x)))), m.patch_embed)
    return [stem, *m.blocks, _Apply(lambda x: m.forward_head(m.norm(x)), m.norm, m.head)]


def _swin(m: Any) -> list[nn.Module]:
    inner = itertools.chain.from_iterable((layer.downsample, *layer.blocks) for layer in m.layers)
    return [m.patch_embed, *inner, m.norm, m.head]


def _joined(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """The stages, each ReLU that works in place put together with the stage before it: a segment must not overwrite
    what it is recomputed from."""
    found: list[nn.Module] = []
    for stage in stages:
        if found and isinstance(stage, nn.ReLU) and stage.inplace:
            found[-1] = nn.Sequential(found[-1], stage)
        else:
            found.append(stage)
    return found


def _image(batch: int, pixels: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)),)


class _Labelled(nn.Module):
    """A language model whose labels are its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=tokens).loss


def _text(batch: int, length: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0)),)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _Labelled(GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1000, use_cache=False)))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return _Labelled(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000, use_cache=False)))


def _timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, **settings)
        return model

    return build


def _inception_v3() -> nn.Module:
    return torchvision.models.inception_v3(aux_logits=False, init_weights=False)


CASES: Mapping[str, Case] = {
    "resnet50": Case("torchvision ResNet-50, 8 x 3 x 128 x 128", torchvision.models.resnet50, _image(8, 128), _resnet),
    "gpt2": Case("transformers GPT-2, 4 layers of width 256, 4 x 256 tokens, dropout on", _gpt2, _text(4, 256)),
    "llama": Case("transformers Llama, 4 layers of width 256, 4 x 256 tokens", _llama, _text(4, 256)),
    "vit_b_16": Case(
        "timm vit_base_patch16_224, 4 of its 12 blocks, 4 x 3 x 224 x 224",
        _timm("vit_base_patch16_224", depth=4),
        _image(4, 224),
        _vit,
    ),
    "resnet18": Case("torchvision ResNet-18, 8 x 3 x 192 x 192", torchvision.models.resnet18, _image(8, 192), _resnet),
    "densenet121": Case(
        "torchvision DenseNet-121, 8 x 3 x 96 x 96",
        torchvision.models.densenet121,
        _image(8, 96),
        _densenet,
        functools.partial(torchvision.models.densenet121, memory_efficient=True),
    ),
    "swin_t": Case(
        "timm swin_tiny_patch4_window7_224, 2 x 3 x 224 x 224",
        _timm("swin_tiny_patch4_window7_224"),
        _image(2, 224),
        _swin,
    ),
    "inception_v3": Case(
        "torchvision Inception-v3 without its auxiliary head, 8 x 3 x 139 x 139",
        _inception_v3,
        _image(8, 139),
        _inception,
    ),
    "vgg16": Case("torchvision VGG-16, 4 x 3 x 128 x 128", torchvision.models.vgg16, _image(4, 128), _vgg),
    "resnet101": Case("torchvision ResNet-101, 8 x 3 x 96 x 96", torchvision.models.resnet101, _image(8, 96), _resnet),
    "resnet152": Case("torchvision ResNet-152, 8 x 3 x 96 x 96", torchvision.models.resnet152, _image(8, 96), _resnet),
}
"""By name, in the order they are run."""
