"""What a setting is worth, and where: the same step in float32 and under bfloat16 autocast, and with a layer more.

Modules are matched by name, the numbered ones of a `Sequential` by what they are made of: a layer inserted in the
middle is one addition, and those after it, whose numbers moved, are recognised. `fxmem compare MODEL --with
precision=bf16` and `fxmem compare A.json B.json` do the same.
"""

import torch
from torch import nn

import fxmem


def build(normed=False):
    """A convolutional network, with or without a batch norm after its second convolution."""
    norms = [nn.BatchNorm2d(64)] if normed else []
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), *norms, nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


images = torch.empty(32, 3, 64, 64, device="meta")
plain = fxmem.analyze(build, images, target="h100")
autocast = fxmem.analyze(build, images, target="h100", precision="bf16")
normed = fxmem.analyze(lambda: build(normed=True), images, target="h100")

for name, other in (("bfloat16 autocast", autocast), ("a batch norm", normed)):
    comparison = fxmem.compare(plain, other)
    peak = comparison.requested_bytes
    print(f"{name}: peak {peak.before:,} -> {peak.after:,} bytes, {peak.delta:+,}")
    for kind, change in comparison.by_kind.items():
        if change.delta:
            print(f"  {kind.value:<12}{change.delta:>+15,}")
    for module in comparison.modules[1:]:
        if module.saved.delta:
            was = "added" if module.before_path is None else f"was {module.before_path}"
            print(f"  layer {module.after_path} ({was}, {module.after_type}): saves {module.saved.delta:+,}")
