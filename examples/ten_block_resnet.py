"""A ResNet of ten blocks written here: the table by module, and what one more block costs.

Equal blocks are folded into one line of the table (`1-4 x4`), and its figures are those of each. The addition at the
end of a block saves nothing for backward, so a block's cost is that of its convolutions, normalisations and ReLUs.
"""

import torch
from torch import nn

import fxmem


class Block(nn.Module):
    """Two convolutions around a shortcut, which halves the image where the channels double."""

    def __init__(self, channels_in, channels):
        super().__init__()
        stride = channels // channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Ten blocks: five of 64 channels at 32x32, five of 128 at 16x16."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            *(Block(64, 64) for _ in range(5)), Block(64, 128), *(Block(128, 128) for _ in range(4))
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


analysis = fxmem.analyze(ResNet, torch.empty(128, 3, 32, 32, device="meta"), optimizer="sgd-momentum", target="cpu")
print(analysis.table(width=80, depth=2))

print(f"{'block':>5}{'parameters and buffers':>25}{'saved':>15}   bytes")
for block in range(10):
    nodes = [node for node in analysis.profile.nodes if f"{node.module}.".startswith(f"blocks.{block}.")]
    print(f"{block:>5}{sum(node.params_bytes for node in nodes):>25,}{sum(node.saved_bytes for node in nodes):>15,}")
