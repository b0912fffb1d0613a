"""A thousand linear layers in a row: how the bytes alive rise through forward and fall through backward.

The analysis takes seconds and no memory to speak of; the 1000 weights of 1024 x 1024 alone would fill 3.9 GiB.
"""

import torch
from torch import nn

import fxmem

LAYERS, WIDTH, BATCH, COLUMNS = 1000, 1024, 4096, 60


def build():
    """The layers, without anything between them."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


analysis = fxmem.analyze(build, torch.empty(BATCH, WIDTH, device="meta"), optimizer="sgd", target="cpu")

# A linear layer keeps its input for backward; the first one's is the step's own input and is counted as that.
saved = [node.saved_bytes for node in analysis.profile.nodes if node.op == "call_module"]
print(f"saved by the first layers: {saved[:3]}, in all {analysis.profile.saved_bytes:,} bytes")

profile, live = analysis.profile, analysis.timeline.live_bytes
print(f"peak: {analysis.peak.requested_bytes:,} bytes in {analysis.peak.phase}, while {analysis.peak.node} runs\n")
for row in range(24):
    tick = row * (profile.ticks - 1) // 23
    phase = next(span.phase for span in profile.phases if tick < span.end)
    bar = "#" * round(COLUMNS * live[tick] / analysis.peak.requested_bytes)
    print(f"{phase:<10}{live[tick] / 2**30:>6.2f} GiB {bar}")
