"""A small CNN for 28x28 digits: what the parameters and the activations of each layer take, and where the step peaks.

`params` is what the layer owns, `output` the new memory its result takes (a view such as flatten brings none), and
`saved` what autograd keeps of the call until backward. Nothing is allocated: the model is built on meta.
"""

import torch
from torch import nn

import fxmem


def build():
    """Two convolutions, a pooling, two fully connected layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),  # 28x28 -> 26x26
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),  # 26x26 -> 24x24
        nn.ReLU(),
        nn.MaxPool2d(2),  # 24x24 -> 12x12
        nn.Flatten(),  # 64 x 12 x 12 = 9216
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


batch = torch.empty(64, 1, 28, 28, device="meta")
analysis = fxmem.analyze(build, batch, optimizer="adam", target="t4")

print(f"{'layer':<12}{'shape':<18}{'params':>12}{'output':>12}{'saved':>12}   bytes")
for node in analysis.profile.nodes:
    if node.op == "call_module":
        shape = "x".join(map(str, node.outputs[0].shape))
        print(f"{node.module_type:<12}{shape:<18}{node.params_bytes:>12,}{node.output_bytes:>12,}{node.saved_bytes:>12,}")

peak = analysis.peak
print(f"\npeak: {peak.requested_bytes:,} bytes in {peak.phase}, while {peak.node} runs; of these")
for kind, nbytes in sorted(peak.by_kind.items(), key=lambda item: -item[1]):
    print(f"  {kind:<16}{nbytes:>12,}")
