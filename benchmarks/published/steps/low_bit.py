"""Fine-tuning of vision transformers with torchao's low-bit optimizers, and with its optimizer on the CPU.

Source: pytorch/ao at 36027d82, benchmarks/benchmark_low_bit_adam.py with `--amp bf16 --compile`: the model is compiled,
not the loss; the optimizer compiles its own update of each parameter. For the optimizer on the CPU, the same script at
1b1e94c5 with `--full_bf16 --checkpoint_activations`, which crops images to 224 pixels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from . import Step
from .loops import meta
from .vision import Classifier, FusedAdamW


def fine_tune(model: str, batch: int, classes: int, optimizer: str) -> Step:
    """Make a training step with an optimizer of `torchao.optim`."""
    import timm

    with torch.device("meta"):
        network = Classifier(timm.create_model(model, num_classes=classes))
    network.network.compile(fullgraph=True)
    inputs = (meta(batch, 3, 224, 224), meta(batch, dtype=torch.int64))
    options = {"precision": "bf16", "optimizer": f"torchao:{optimizer}", "compile": "as-is"}
    return Step(network, inputs, {"mode": "train", "loss": lambda out: out[0], **options})


def fine_tune_checkpointed(
    model: str, batch: int, classes: int, *, compiled: bool = False, offload: Literal["no", "state", "gradients"] = "no"
) -> Step:
    """Make a training step in bfloat16, each block checkpointed; AdamW and gradients may be on the CPU."""
    import timm
    from torchao.optim import CPUOffloadOptimizer

    with torch.device("meta"):
        network = Classifier(timm.create_model(model, num_classes=classes, img_size=224).bfloat16())
    network.network.set_grad_checkpointing()
    if compiled:
        network.network.compile(fullgraph=True)
    inputs = (meta(batch, 3, 224, 224, dtype=torch.bfloat16), meta(batch, dtype=torch.int64))
    outside = partial(CPUOffloadOptimizer, minimal_size=0, offload_gradients=offload == "gradients")
    optimizer: Any = FusedAdamW if offload == "no" else outside
    options = {"optimizer": optimizer, "compile": "as-is" if compiled else None}
    return Step(network, inputs, {"mode": "train", "loss": lambda out: out[0], **options})
