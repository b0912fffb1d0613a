"""Which line of your own code takes the memory: every line of this file's `forward`s, with no GPU.

A library's inside counts for the line here that called it; a line in a loop has the sum over its turns. `kept` is what
is still alive after the line, `saved` what it keeps for backward. The whole source with these figures beside it:
`fxmem show --by line examples/lines_of_a_file.py:build --input 16x128x256`, and as a page with `--html FILE.html`.
"""

import torch
from torch import nn

import fxmem


class Block(nn.Module):
    """A feed-forward block that forgets nothing."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(x)
        y = nn.functional.gelu(self.up(y))
        return x + self.down(y)


class Net(nn.Module):
    """Six blocks and the mean over positions."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build(width=256):
    """The model."""
    return Net(width)


if __name__ == "__main__":
    report = fxmem.by_line(fxmem.analyze(build, torch.empty(16, 128, 256, device="meta"), target="cpu"))
    print(f"{'line':>4} {'calls':>5} {'allocated':>12} {'kept':>12} {'saved':>12}  code")
    for line in report.lines:
        print(
            f"{line.line:>4} {line.calls:>5} {line.allocated_bytes:>12,} {line.kept_bytes:>12,} "
            f"{line.saved_bytes:>12,}  {line.code}"
        )
    most = max(report.lines, key=lambda line: line.saved_bytes)
    for group in most.came:
        print(f"line {most.line} leaves {group.count} x {group.shape} {group.dtype}: {group.nbytes:,} bytes")
