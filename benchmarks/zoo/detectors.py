"""Detectors of torchvision, decided by a real run (`values="real"`), against real steps on the CPU.

python -m benchmarks.zoo.detectors      writes benchmarks/results/detectors-<date>.md
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torchvision.models import detection

import fxmem
from benchmarks import RESULTS
from fxmem.records.validation import Quantity

DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn",
    "fcos_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
)


def loss(losses: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of a detector's losses, as torchvision's reference script has it."""
    return torch.stack(list(losses.values())).sum()


def measure(name: str, mode: Any) -> tuple[int, int]:
    """Bytes of the peak, kernels' scratch set aside: predicted and measured."""
    torch.manual_seed(0)
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=5)
    images = [torch.rand(3, 224, 224)]
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 100.0, 120.0]]), "labels": torch.tensor([1])}]
    inputs = (images, targets) if mode == "train" else (images,)
    verdict = fxmem.validate(
        model, inputs, mode=mode, values="real", optimizer=None, loss=loss if mode == "train" else None
    )
    found = next(each for each in verdict.comparisons if each.quantity is Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH)
    return found.predicted_bytes, found.measured_bytes


def main() -> None:
    """Measure all of them, and write the table."""
    today = datetime.date.today().isoformat()
    lines = [
        f"# Detectors, {today}",
        "",
        f"`python -m benchmarks.zoo.detectors`: one picture of 224x224, torch {torch.__version__}, this machine's CPU.",
        "Peak of requested bytes, what kernels allocate for themselves set aside.",
        "",
        "| detector | step | predicted | measured | difference |",
        "|---|---|---:|---:|---:|",
    ]
    for name in DETECTORS:
        for mode in ("infer", "train"):
            predicted, measured = measure(name, mode)
            lines.append(f"| {name} | {mode} | {predicted:,} | {measured:,} | {predicted - measured:+,} |")
            print(lines[-1], flush=True)
    (RESULTS / f"detectors-{today}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
