"""ResNet-50's training step as a figure: every bottleneck a box, coloured by the bytes it keeps for backward.

Writes `resnet50.svg` into the current directory, or to the path given as the first argument. Without a Graphviz to be
found the built-in layout draws it; `fxmem graph torchvision:resnet50 --input 32x3x224x224 --depth 2 -o resnet50.svg`
does the same.
"""

import sys

import torch
import torchvision

import fxmem

path = sys.argv[1] if len(sys.argv) > 1 else "resnet50.svg"
images = torch.empty(32, 3, 224, 224, device="meta")

analysis = fxmem.analyze(torchvision.models.resnet50, images, optimizer="sgd-momentum", target="a100")
analysis.save_svg(path, depth=2)

print(
    f"{path}: the peak of {analysis.peak.requested_bytes:,} bytes is in {analysis.peak.phase} of {analysis.peak.node}"
)
