"""ResNet-50 in 60 % of the memory: a plan, what it promises, the model that keeps it, and the same gradients.

The plan is made for batches of 32 images of 224x224 on the CPU's sizes; nothing of that size is allocated. Then the
checkpointed model takes a real step, on a batch of another size, beside a copy without checkpoints.
"""

import copy

import torch
import torchvision

import fxmem

torch.manual_seed(0)
model = torchvision.models.resnet50()
images = torch.empty(32, 3, 224, 224, device="meta")
analysis = fxmem.analyze(model, images, optimizer="sgd-momentum", target="cpu")
plan = fxmem.plan(analysis, budget=0.6)
print(f"without plan {plan.before.requested_bytes:>14,} bytes")
print(
    f"promised     {plan.after.requested_bytes:>14,} bytes, {len(plan.regions)} regions, {plan.extra_fraction:.0%} "
    f"of the forward's FLOPs run again"
)

plain = copy.deepcopy(model)
fxmem.checkpoint(model, plan)
after = fxmem.analyze(model, images, optimizer="sgd-momentum", target="cpu")
print(f"with plan    {after.peak.requested_bytes:>14,} bytes")

batch = torch.randn(2, 3, 64, 64)
for one in (plain, model):
    one(batch).square().sum().backward()
equal = all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
statistics = all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
print(f"gradients equal: {equal}, batch norm's statistics equal: {statistics}")

fxmem.uncheckpoint(model)
print(f"a {type(model).__name__} again, of {sum(p.numel() for p in model.parameters()):,} parameters")
