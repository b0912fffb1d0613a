"""Fine-tuning of a vision transformer with torchao's low-bit optimizers.

Source: pytorch/ao at 36027d82, benchmarks/benchmark_low_bit_adam.py with `--amp bf16 --compile`: the model is compiled,
not the loss; the optimizer compiles its own update of each parameter.
"""

from __future__ import annotations

import torch

from . import Step
from .loops import meta
from .vision import Classifier


def fine_tune(model: str, batch: int, classes: int, optimizer: str) -> Step:
    """Make a training step with an optimizer of `torchao.optim`."""
    import timm

    with torch.device("meta"):
        network = Classifier(timm.create_model(model, num_classes=classes))
    network.network.compile(fullgraph=True)
    inputs = (meta(batch, 3, 224, 224), meta(batch, dtype=torch.int64))
    options = {"precision": "bf16", "optimizer": f"torchao:{optimizer}", "compile": "as-is"}
    return Step(network, inputs, {"mode": "train", "loss": lambda out: out[0], **options})
