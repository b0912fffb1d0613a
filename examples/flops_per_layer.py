"""FLOPs of each layer of a small CIFAR CNN, forward and backward. One multiply-add counts as 2.

The first convolution's backward costs as much as its forward, every other layer's twice as much: the gradient of the
weight and the gradient of the input, which for the first layer nobody asks for. What has no formula is not counted as
zero: it is `None` here, and listed under `unknowns`.
"""

import torch
from torch import nn

import fxmem


def build():
    """Three convolutions, three fully connected layers, for 32x32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # 32x32 -> 16x16
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # 16x16 -> 8x8
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # 8x8 -> 4x4
        nn.Flatten(),  # 128 x 4 x 4 = 2048
        nn.Linear(2048, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def written(count):
    """A count with separators, or what `None` means."""
    return "unknown" if count is None else f"{count:,}"


analysis = fxmem.analyze(build, torch.empty(1, 3, 32, 32, device="meta"))

print(f"{'layer':<6}{'type':<12}{'shape':<14}{'forward':>14}{'backward':>14}   FLOPs")
for node in analysis.profile.nodes:
    if node.op == "call_module":
        shape = "x".join(map(str, node.outputs[0].shape))
        print(f"{node.module:<6}{node.module_type:<12}{shape:<14}{written(node.forward_flops):>14}{written(node.backward_flops):>14}")

layers = [node for node in analysis.profile.nodes if node.module_type in ("Conv2d", "Linear")]
print(f"\nconvolutions and linear layers: {sum(node.forward_flops for node in layers):,} forward, {sum(node.backward_flops for node in layers):,} backward")
for unknown in analysis.profile.unknowns:
    print(f"not counted: {unknown.what}, {unknown.count} times")
