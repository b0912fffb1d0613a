"""Training steps and evaluations of image classifiers of torchvision and timm, as published scripts run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Step
from .loops import meta

CIFAR_CLASSES = 10


class Classifier(nn.Module):
    """A network with its cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        logits = self.network(images)
        return F.cross_entropy(logits, labels), logits


def make_torchvision(model: str, classes: int = 1000, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a network of torchvision on meta; a vision transformer gets a new head where `classes` says so."""
    import torchvision

    with torch.device("meta"):
        network: nn.Module = getattr(torchvision.models, model)()
        if classes != 1000:
            network.heads.head = nn.Linear(network.heads.head.in_features, classes)
    return network.to(dtype)


def train_classifier(
    network: nn.Module,
    batch: int,
    *,
    size: int = 224,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Step:
    """Make a training step over `batch` images."""
    inputs = (meta(batch, 3, size, size, dtype=dtype), meta(batch, dtype=torch.int64))
    return Step(Classifier(network), inputs, {"mode": "train", "loss": lambda out: out[0], **options})


def torch_preflight(batch: int, model: str) -> Step:
    """A training step of a torchvision model under autocast with AdamW.

    Source: highwaterlabs/torch-preflight, tests/calibration/measure_cuda.py. It takes bfloat16 where
    `torch.cuda.is_bf16_supported()`, which includes emulation and so is true on a T4.
    """
    return train_classifier(make_torchvision(model), batch, precision="bf16", optimizer="adamw")


PRECISIONS = {"32": torch.float32, "16-mixed": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}


def rasbt(
    model: str, batch: int, precision: str, *, optimizer: str = "adam", clears: bool = True, accumulate: int = 1
) -> Step:
    """A vision transformer fine-tuned on CIFAR-10: forward, loss, `zero_grad`, backward, optimizer.

    Source: rasbt/pytorch-memory-optim and rasbt/cvpr2023. With gradient accumulation (`accumulate`) the gradients are
    cleared after the optimizer's step.
    """
    dtype = PRECISIONS[precision]
    options: dict[str, Any] = {"optimizer": optimizer}
    if precision.endswith("mixed"):
        options["precision"] = {"16-mixed": "fp16", "bf16-mixed": "bf16"}[precision]
    if clears:
        options["zero_grad"] = "before-backward"
    if accumulate > 1:
        options["accumulate"] = accumulate
    return train_classifier(make_torchvision(model, CIFAR_CLASSES, dtype), batch, dtype=dtype, **options)


class NesterovSGD(torch.optim.SGD):
    """SGD with Nesterov momentum, parameter by parameter, as torch 1.12 runs it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)


def timm_benchmark(model: str, batch: int, size: int) -> Step:
    """A step of timm's training benchmark with AMP (huggingface/pytorch-image-models at 0dbd9352, benchmark.py).

    `zero_grad` of torch 1.12 keeps the gradients, which is the last of two micro-batches here. The models of that timm
    compute attention step by step.
    """
    import timm
    from timm.layers import set_fused_attn, use_fused_attn

    was_fused = use_fused_attn()
    set_fused_attn(False)
    try:
        with torch.device("meta"):
            network = timm.create_model(model)
    finally:
        set_fused_attn(bool(was_fused))
    options = {"precision": "fp16", "optimizer": NesterovSGD, "accumulate": 2}
    return train_classifier(network, batch, size=size, **options)
