"""ResNet-50's training step as files for other tools: PyTorch's memory viewer, Perfetto, speedscope, a spreadsheet, a
pull request.

Writes five files into the current directory, or into the folder given as the first argument.
`resnet50.PREDICTED.pickle` opens at pytorch.org/memory_viz, where a snapshot of a real run can be laid beside it. On
the command line, one file at a time:

    fxmem export torchvision:resnet50 --input 32x3x224x224 --optimizer sgd-momentum --target rtx4090 --to memory-viz \\
        -o resnet50.PREDICTED.pickle
"""

import sys
from pathlib import Path

import torch
import torchvision

import fxmem

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
images = torch.empty(32, 3, 224, 224, device="meta")

analysis = fxmem.analyze(torchvision.models.resnet50, images, optimizer="sgd-momentum", target="rtx4090")
for to, ending in (
    ("memory-viz", "PREDICTED.pickle"),
    ("perfetto", "perfetto.json"),
    ("speedscope", "speedscope.json"),
    ("csv", "csv"),
    ("markdown", "md"),
):
    path = folder / f"resnet50.{ending}"
    analysis.export(path, to=to)
    print(f"{to:<12}{path.name:<28}{path.stat().st_size:>10,} bytes")
print(f"the peak of {analysis.peak.requested_bytes:,} bytes is in {analysis.peak.phase} of {analysis.peak.node}")
