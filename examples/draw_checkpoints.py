"""A vision transformer's training step at 80 % of its memory: the modules to checkpoint, framed in the graph with what
each frees and costs.

Writes `checkpoints.svg` into the current directory, or to the path given as the first argument. From the command line:
`fxmem plan torchvision:vit_b_16 --input 64x3x224x224 --target a100 --strategy modules --budget 80% --svg
checkpoints.svg`.
"""

import sys

import torch
import torchvision

import fxmem

path = sys.argv[1] if len(sys.argv) > 1 else "checkpoints.svg"
images = torch.empty(64, 3, 224, 224, device="meta")

analysis = fxmem.analyze(torchvision.models.vit_b_16, images, target="a100")
plan = fxmem.plan(analysis, "modules", budget=0.8)
analysis.save_svg(path, plan=plan, depth=4)

for region in plan.regions:
    print(f"{', '.join(region.modules):<36} frees {region.freed_bytes:>13,} bytes")
print(f"{path}: the peak falls from {plan.before.allocated_bytes:,} to {plan.after.allocated_bytes:,} bytes allocated")
