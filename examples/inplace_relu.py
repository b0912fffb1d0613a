"""In-place ReLU against out-of-place ReLU: which bytes it saves, and which it does not.

ReLU keeps its *result* for backward, so a convolution's own output can go as soon as ReLU has run. Out of place, both
are there for a moment; in place there is only one. So a ReLU's `output_bytes` falls to 0 and the peak of inference
falls to the next highest moment, the pooling. In training neither `saved_bytes` nor the peak moves: the results are
kept either way.
"""

import functools

import torch
from torch import nn

import fxmem


def build(inplace):
    """Two rounds of convolution, ReLU and pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
    )


images = torch.empty(16, 3, 128, 128, device="meta")

print(f"{'mode':<8}{'ReLU':<14}{'output of ReLUs':>18}{'saved by ReLUs':>18}{'saved in all':>16}{'peak':>16}   bytes")
for mode in ("train", "infer"):
    for inplace in (False, True):
        step = {"mode": mode, "optimizer": None, "target": "cpu", "keep_outputs": False}
        analysis = fxmem.analyze(functools.partial(build, inplace), images, **step)
        relus = [node for node in analysis.profile.nodes if node.module_type == "ReLU"]
        output, saved = sum(node.output_bytes for node in relus), sum(node.saved_bytes for node in relus)
        how = "in place" if inplace else "out of place"
        print(
            f"{mode:<8}{how:<14}{output:>18,}{saved:>18,}{analysis.profile.saved_bytes:>16,}{analysis.peak.requested_bytes:>16,}"
        )

print("\nWhose memory an in-place result is, the graph says:")
nodes = analysis.profile.nodes
for node in nodes:
    if node.view_of is not None and node.module_type == "ReLU":
        print(
            f"  {node.name} ({node.module_type}) writes into the output of {nodes[node.view_of].name} "
            f"({nodes[node.view_of].module_type})"
        )
