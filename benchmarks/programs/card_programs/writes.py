"""Storages that grow, views that are written, hooks, an optimizer within backward, double backward."""

import torch
import torch.nn.functional as F
from torch import nn


def show(what: str) -> None:
    """The peaks since the last call."""
    print(what, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()


x = torch.randn(1024, 1024, device="cuda")
out = torch.empty(0, device="cuda")
torch.mul(x, 2, out=out)
show("out")
torch.matmul(x, x, out=out)
show("out again")
x.resize_(2048, 1024)
show("resized")
weight = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
for _ in range(2):
    h = torch.randn(512, 1024, device="cuda") @ weight
    h[:, ::2] = 0
    h[torch.arange(64, device="cuda")] = torch.ones(64, 1024, device="cuda")
    h.view(256, 2, 1024)[:, 0].mul_(2)
    h.square().mean().backward()
    weight.grad = None
    show("written")
layers = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
optimizers = {each: torch.optim.AdamW([each]) for each in layers.parameters()}


def step_now(parameter: torch.Tensor) -> None:
    """An optimizer's step as soon as the gradient is there."""
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for each in layers.parameters():
    each.register_post_accumulate_grad_hook(step_now)
for _ in range(3):
    layers(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
    show("step in backward")
y = torch.randn(256, 64, device="cuda", requires_grad=True)
net = nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 1)).cuda()
for _ in range(2):
    forces = torch.autograd.grad(net(y).sum(), y, create_graph=True)[0]
    F.mse_loss(forces, torch.zeros_like(forces)).backward()
    net.zero_grad()
    show("forces")
print(torch.func.hessian(lambda z: net(z).sum())(y[:8]).shape)
show("hessian")
per_sample = torch.func.vmap(
    torch.func.grad(lambda p, s: torch.func.functional_call(net, p, (s,)).sum()), in_dims=(None, 0)
)
per_sample(dict(net.named_parameters()), y.detach())
show("gradients of each sample")
