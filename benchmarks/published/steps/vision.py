"""Training steps and evaluations of image classifiers of torchvision and timm, as published scripts run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from . import Peaks, Program, Step
from .loops import measure, meta

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


def train_classifier(network: nn.Module, batch: int, *, size: int, **options: Any) -> Step:
    """Make a training step over `batch` images."""
    inputs = (meta(batch, 3, size, size), meta(batch, dtype=torch.int64))
    return Step(Classifier(network), inputs, {"mode": "train", "loss": lambda out: out[0], **options})


# --- torch of June 2023 -----------------------------------------------------------------------------------------------


class EarlyAdam(torch.optim.Adam):
    """Adam until pytorch/pytorch#104898 and its kind (July 2023): the root and the denominator are there at once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        params = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        for each in params:
            if not self.state[each]:
                self.state[each] = {"exp_avg": torch.zeros_like(each), "exp_avg_sq": torch.zeros_like(each)}
        means, squares = ([self.state[each][name] for each in params] for name in ("exp_avg", "exp_avg_sq"))
        grads = [each.grad for each in params]
        torch._foreach_lerp_(means, grads, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, grads, grads, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 1.0)
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(params, means, denominators, -1e-3)


class EarlyAttention(nn.Module):
    """Runs a network whose attention in half precision is that of FlashAttention 1.

    It reads and writes batch x tokens x heads (`_scaled_dot_product_flash_attention_cuda` in attention.cu before torch
    2.2), where FlashAttention 2 keeps the layout of its query.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        attend = F.scaled_dot_product_attention

        def attend_early(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **settings: Any) -> Tensor:
            if q.dtype != torch.float32:
                q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v))
            return attend(q, k, v, *arguments, **settings)

        with mock.patch.object(F, "scaled_dot_product_attention", attend_early):
            logits: Tensor = self.network(images)
        return logits


VALIDATED = 5000
"""Images. The first batch of them and the last are run."""
BATCHES = 3
"""Or as many more as two further steps of the optimizer take. Then no round reserves more."""


def rasbt(model: str, batch: int, precision: str | None, *, optimizer: str = "adam", accumulate: int = 0) -> Program:
    """A vision transformer fine-tuned on CIFAR-10, by the scripts' own loop with a few batches, and validated after it.

    Source: rasbt/pytorch-memory-optim and rasbt/cvpr2023. What is reserved is read when all is over.

    Args:
        model: one of torchvision's.
        batch: images.
        precision: Fabric's; None where the script does without Fabric.
        optimizer: `adam` or `sgd`.
        accumulate: the optimizer steps at the first batch, and at each that comes so many after. Gradients are cleared
            after its step, and otherwise (0) before backward.
    """

    def run() -> dict[str, Peaks]:
        return {"": measure(partial(_fine_tune, model, batch, precision, optimizer, accumulate))}

    return Program(run, "")


def _fine_tune(model: str, batch: int, precision: str | None, optimizer: str, accumulate: int) -> None:
    import lightning
    import torchvision

    network = getattr(torchvision.models, model)()
    network.heads.head = nn.Linear(network.heads.head.in_features, CIFAR_CLASSES)
    batches = 2 * accumulate + 1 if accumulate else BATCHES
    loaders = (_load(batches * batch, batch), _load(batch + VALIDATED % batch, batch))
    if precision is None:
        device = torch.device("cuda")
        network.to(device)
    make = {"adam": EarlyAdam, "sgd": partial(torch.optim.SGD, lr=0.01)}[optimizer]
    updates, backward = make(network.parameters()), Tensor.backward
    network = EarlyAttention(network)
    if precision is not None:
        fabric = lightning.Fabric(accelerator="cuda", devices=1, precision=precision)
        fabric.launch()
        loaders = fabric.setup_dataloaders(*loaders)
        network, updates = fabric.setup(network, updates)
        device, backward = fabric.device, fabric.backward
    _train_and_validate(network, updates, backward, loaders, device, accumulate)


def _load(images: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(images, 3, 224, 224), torch.zeros(images, dtype=torch.int64)), batch)


def _train_and_validate(
    network: nn.Module,
    updates: torch.optim.Optimizer,
    backward: Callable[[Tensor], None],
    loaders: Sequence[DataLoader[Any]],
    device: torch.device,
    accumulate: int,
) -> None:
    """The loop of the scripts; what moves a batch to the card is nothing where Fabric's loader has done it."""
    import torchmetrics

    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CIFAR_CLASSES).to(device)
    for index, (features, targets) in enumerate(loaders[0]):
        network.train()
        features = features.to(device)
        targets = targets.to(device)
        logits = network(features)
        loss = F.cross_entropy(logits, targets)
        if accumulate:
            loss = loss / accumulate
        else:
            updates.zero_grad()
        backward(loss)
        if not accumulate:
            updates.step()
        elif index % accumulate == 0:
            updates.step()
            updates.zero_grad()
        network.eval()
        with torch.no_grad():
            accuracy.update(logits.argmax(1), targets)
    validation = torchmetrics.Accuracy(task="multiclass", num_classes=CIFAR_CLASSES).to(device)
    with torch.no_grad():
        for features, targets in loaders[1]:
            features = features.to(device)
            targets = targets.to(device)
            validation.update(network(features).argmax(1), targets)


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


class FusedAdamW(torch.optim.AdamW):
    """One kernel for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-4, weight_decay=0, fused=True)


def low_bit_benchmark(model: str, batch: int, classes: int) -> Step:
    """A step of benchmarks/benchmark_low_bit_adam.py of pytorch/ao with `--amp bf16 --compile`.

    The model is compiled, not the loss and the optimizer.
    """
    import timm

    with torch.device("meta"):
        network = Classifier(timm.create_model(model, num_classes=classes))
    network.network.compile(fullgraph=True)
    inputs = (meta(batch, 3, 224, 224), meta(batch, dtype=torch.int64))
    options = {"precision": "bf16", "optimizer": FusedAdamW, "compile": "as-is"}
    return Step(network, inputs, {"mode": "train", "loss": lambda out: out[0], **options})
