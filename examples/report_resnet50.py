"""ResNet-50's training step as one HTML page to hand to others: numbers, timeline, graph, every node and every tensor
at the peak.

Writes `resnet50.html` into the current directory, or to the path given as the first argument. The page is one file and
loads nothing; open it in any browser. `fxmem report torchvision:resnet50 --input 32x3x224x224 --target rtx4090 -o
resnet50.html` does the same.
"""

import sys

import torch
import torchvision

import fxmem

path = sys.argv[1] if len(sys.argv) > 1 else "resnet50.html"
images = torch.empty(32, 3, 224, 224, device="meta")

analysis = fxmem.analyze(torchvision.models.resnet50, images, optimizer="sgd-momentum", target="rtx4090")
analysis.save_html(path, budget_bytes=2 << 30)

print(
    f"{path}: {len(analysis.profile.nodes)} nodes, the peak of {analysis.peak.requested_bytes:,} bytes is in "
    f"{analysis.peak.phase}"
)
