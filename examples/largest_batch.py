"""The largest batch of a small ResNet on a card, and the longest text of a small transformer in 1 GiB.

    python examples/largest_batch.py

No size comes from a formula: each is analysed, and so is the next one, which does not fit. The line through the sizes
near the largest says what a sample takes and what is there without any.
"""

import torch
from torch import nn

import fxmem


class Block(nn.Module):
    """Two convolutions around which the input is added back."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def resnet():
    """Three blocks of 64 channels, and a classifier of ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2),
        *(Block(64) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def transformer():
    """Two layers of width 256 over a vocabulary of 8000."""
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    return nn.Sequential(
        nn.Embedding(8000, 256), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(256, 8000)
    )


if __name__ == "__main__":
    images = torch.empty(16, 3, 224, 224, device="meta")
    curve = fxmem.max_batch(resnet, images, target="rtx4090", optimizer="sgd-momentum")
    print(
        f"rtx4090: batch {curve.largest} fits, {curve.next_above.size} does not; found by {len(curve.points)} analyses"
    )
    print(f"  {curve.per_sample_bytes:,} bytes a sample, {curve.constant_bytes:,} without any")

    tokens = torch.empty(4, 128, dtype=torch.int64, device="meta")
    curve = fxmem.max_batch(transformer, tokens, target="cpu", budget="1GiB", dim="seq")
    print(f"within 1 GiB on the CPU: batches of 4 texts of {curve.largest} tokens")
    for point in curve.points:
        print(f"  {point.size:>5} {point.requested_bytes:>15,} {'fits' if point.fits else 'too much'}")
