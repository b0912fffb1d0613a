"""FLOPs of each layer of a small CIFAR CNN, forward and backward. One multiply-add counts as 2.

A layer's backward costs twice its forward: the gradient of its weight and the gradient of its input. The first
convolution's costs only as much as its forward, because nobody asks for the gradient of the image. `None` stands for
what has no formula; it is never written as 0, and is listed under `unknowns`.
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
    """A count with separators."""
    return "-" if count is None else f"{count:,}"


analysis = fxmem.analyze(build, torch.empty(4, 3, 32, 32, device="meta"), target="rtx4090")

print(f"{'layer':<6}{'type':<12}{'shape':<14}{'forward':>14}{'backward':>14}   FLOPs")
for node in analysis.profile.nodes:
    if node.op == "call_module":
        shape = "x".join(map(str, node.outputs[0].shape))
        print(
            f"{node.module:<6}{node.module_type:<12}{shape:<14}{written(node.forward_flops):>14}{written(node.backward_flops):>14}"
        )

layers = [node for node in analysis.profile.nodes if node.module_type in ("Conv2d", "Linear")]
forward, backward = sum(node.forward_flops for node in layers), sum(node.backward_flops for node in layers)
print(f"\nconvolutions and linear layers: {forward:,} forward, {backward:,} backward")
for unknown in analysis.profile.unknowns:
    if unknown.topic == "flops":
        print(f"not counted: {unknown.what}, {unknown.count} times")
