"""One step, eager and compiled: what `torch.compile` would save on an H100, found with no GPU.

Eager GELU and LayerNorm each write a tensor as large as their input. Inductor fuses them into one kernel that keeps the
product before them and two numbers for each row.
"""

import torch
from torch import nn

import fxmem

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 10))
rows = torch.empty(8192, 256, device="meta")
eager = fxmem.analyze(model, rows, mode="train", target="h100")
compiled = fxmem.analyze(model, rows, mode="train", target="h100", compile=True)
for name, analysis in (("eager", eager), ("compiled", compiled)):
    print(f"{name:8} saved {analysis.profile.saved_bytes:>12,}  peak {analysis.peak.requested_bytes:>12,} bytes")
for kernel in (op for op in compiled.profile.ops if op.name.startswith("triton_")):
    node = compiled.profile.nodes[kernel.node]
    print(f"{kernel.phase.value:8} {kernel.name} for {node.module_type}")
