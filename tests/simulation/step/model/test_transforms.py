"""Steps with torch.func's transforms and forward-mode derivatives, against real CPU runs."""

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad

from fxmem import analyze
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate

WIDTH = 48


class Doing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def net(self, x):
        return self.second(torch.tanh(self.first(x)))

    def energy(self, x):
        return self.net(x).square().sum()

    def forward(self, x):
        return self.function(self, x)


def pull_back(m, x):
    out, vjp = func.vjp(m.net, x)
    return vjp(torch.ones_like(out))[0]


def pull_back_to_weights(m, x):
    weights = dict(m.first.named_parameters())
    out, vjp = func.vjp(lambda p: func.functional_call(m.first, p, (x,)).tanh(), weights)
    return vjp(torch.ones_like(out))[0]["weight"].sum() + out.sum()


def tangent_of_input(m, x):
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(m.net(forward_ad.make_dual(x, torch.ones_like(x))))
        return value + tangent


def tangent_of_weight(m, x):
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(m.first.weight, torch.ones_like(m.first.weight))
        return forward_ad.unpack_dual(nn.functional.linear(x, weight).tanh()).tangent


def batched_gradients(m, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = m.net(x).sum(0)
        found = torch.autograd.grad(out, x, torch.eye(WIDTH), is_grads_batched=True, create_graph=m.training)
    return found[0].sum(1)


def batched_gradients_beside(m, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        found = torch.autograd.grad(m.net(x).sum(0), x, torch.eye(WIDTH)[:8], is_grads_batched=True)
    return m.net(x) + found[0].sum(0)


PROGRAMS = {
    "jacrev": lambda m, x: func.jacrev(m.net)(x[0]),
    "jacrev in chunks": lambda m, x: func.jacrev(m.net, chunk_size=16)(x[0]),
    "jacrev of each row": lambda m, x: func.vmap(func.jacrev(m.net))(x[:4]),
    "jacrev of jacrev": lambda m, x: func.jacrev(func.jacrev(m.energy))(x[0]),
    "jacfwd": lambda m, x: func.jacfwd(m.net)(x[0]),
    "hessian": lambda m, x: func.hessian(m.energy)(x[0]),
    "vjp": pull_back,
    "vjp of weights": pull_back_to_weights,
    "vjp of grad": lambda m, x: func.vjp(func.grad(m.energy), x)[1](x)[0],
    "jvp": lambda m, x: func.jvp(m.net, (x,), (torch.ones_like(x),))[1],
    "jvp of grad": lambda m, x: func.jvp(func.grad(m.energy), (x,), (x,))[1],
    "grad": lambda m, x: func.grad(m.energy)(x),
    "grad of grad": lambda m, x: func.grad(lambda v: func.grad(m.energy)(v).square().sum())(x),
    "grad of each row": lambda m, x: func.vmap(func.grad(m.energy))(x),
    "tangent of the input": tangent_of_input,
    "tangent of a weight": tangent_of_weight,
    "is_grads_batched": batched_gradients,
    "is_grads_batched beside a step": batched_gradients_beside,
    "hessian of each row": lambda m, x: func.vmap(func.hessian(m.energy))(x[:4]),
    "functional.jacobian": lambda m, x: torch.autograd.functional.jacobian(
        m.net, x[0], create_graph=m.training, vectorize=True
    ),
}


@pytest.mark.truth
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("function", PROGRAMS.values(), ids=PROGRAMS)
def test_transforms_take_what_a_real_run_takes(function, mode):
    batch = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    found = validate(Doing(function), batch, mode=mode)
    peak = next(c for c in found.comparisons if c.quantity is Quantity.REQUESTED)
    assert abs(peak.predicted_bytes - peak.measured_bytes) <= 16, peak


UNKNOWN = {
    "make_fx": (Doing(lambda m, x: func.linearize(m.net, x)[1](x)), {}),
    "oneDNN's copies of aten.addmm": (nn.Linear(WIDTH, WIDTH), {"precision": "bf16"}),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_differs_on_real_tensors_or_machines_is_listed_as_unknown(what):
    model, step = UNKNOWN[what]
    profile = analyze(model, torch.zeros(32, WIDTH), mode="infer", target="cpu", **step).profile
    assert any(what in unknown.what for unknown in profile.unknowns if unknown.topic == "memory")
