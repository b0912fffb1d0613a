"""A small CNN for 28x28 digits: what the parameters and the activations of each call take, and where the step peaks.

`params` is what the call is the first to read, `output` the new memory its result takes (a view such as flatten brings
none), and `saved` what autograd keeps of it until backward, unless an earlier call kept the same tensor already. The
model is built on meta and the step runs on tensors without data: nothing is allocated.
"""

import torch
import torch.nn.functional as F
from torch import nn

import fxmem


class Net(nn.Module):
    """Two convolutions, a pooling, two fully connected layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))  # 28x28 -> 26x26
        x = F.relu(self.conv2(x))  # 26x26 -> 24x24
        x = F.max_pool2d(x, 2)  # 24x24 -> 12x12
        x = torch.flatten(x, 1)  # 64 x 12 x 12 = 9216
        x = F.relu(self.fc1(x))
        return self.fc2(x)


batch = torch.empty(64, 1, 28, 28, device="meta")
analysis = fxmem.analyze(Net, batch, optimizer="adam", target="t4")

print(f"{'call':<12}{'shape':<14}{'params':>12}{'output':>12}{'saved':>12}   bytes")
for node in analysis.profile.nodes:
    if node.op in ("call_module", "call_function"):
        shape = "x".join(map(str, node.outputs[0].shape))
        print(f"{node.name:<12}{shape:<14}{node.params_bytes:>12,}{node.output_bytes:>12,}{node.saved_bytes:>12,}")

peak = analysis.peak
print(f"\npeak: {peak.requested_bytes:,} bytes in {peak.phase}, while {peak.node} runs; of these")
for kind, nbytes in sorted(peak.by_kind.items(), key=lambda item: -item[1]):
    print(f"  {kind:<16}{nbytes:>12,}")
