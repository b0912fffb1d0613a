"""Gradients of some tensors only, `autograd.grad(y, x)` and `backward(inputs=)` in a step, against real CPU runs."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxmem import analyze
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate


def layers(*sizes: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        made += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*made[:-1])


class Doing(nn.Module):
    def __init__(self, function, body):
        super().__init__()
        self.function, self.body = function, body

    def forward(self, x):
        with torch.enable_grad():
            return self.function(self.body, x)


def force(body, x):
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(body(x).sum(), x)[0]


def gradient_penalty(body, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(body(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def attack(body, x):
    """Projected gradient descent on the input, then the step itself."""
    changed = x.detach()
    for _ in range(2):
        changed.requires_grad_()
        (slope,) = torch.autograd.grad(body(changed).square().sum(), changed)
        changed = (changed + 0.01 * slope.sign()).detach()
    return body(changed)


def attack_by_inputs(body, x):
    changed = x.detach().requires_grad_()
    body(changed).square().sum().backward(inputs=[changed])
    return body((changed + 0.01 * changed.grad.sign()).detach())


def equilibrium(body, x):
    """A fixed point whose gradient a hook solves for."""
    with torch.no_grad():
        z = body(x)
    z = body(z + x)
    start = z.detach().requires_grad_()
    f = body(start + x)

    def solve(gradient):
        total = gradient
        for _ in range(3):
            total = torch.autograd.grad(f, start, total, retain_graph=True)[0] + gradient
        return total

    if z.requires_grad and torch.is_grad_enabled():
        z.register_hook(solve)
    return z


def gradient_norm(body, x):
    """The gradient of one weight, weighed into the loss."""
    out = body(x)
    (slope,) = torch.autograd.grad(out.square().mean(), body[-1].weight, retain_graph=True, create_graph=True)
    return out.sum() * slope.norm()


def activation_map(body, x):
    """Grad-CAM: the gradient of features within the network."""
    features = body[:4](x)
    (slope,) = torch.autograd.grad(body[4:](features).sum(), features)
    return F.relu((features * slope.mean((2, 3), keepdim=True)).sum(1))


def half_gradient(body, x):
    """A gradient of another dtype than the root's."""
    y = body(x)
    return torch.autograd.grad(y, body[0].weight, torch.ones_like(y, dtype=torch.bfloat16), retain_graph=True)[0]


def jacobian(body, x):
    return torch.autograd.functional.jacobian(body, x[0])


def product_with_hessian(body, x):
    return torch.autograd.functional.hvp(lambda z: body(z).sum(), x, torch.ones_like(x))[1]


ENERGY = (64, 512, 512, 1)
SAME = (64, 512, 64)
CASES = [
    (force, lambda: layers(*ENERGY), torch.ones(16, 64), "infer"),
    (force, lambda: layers(*ENERGY), torch.ones(256, 64), "infer"),
    (gradient_penalty, lambda: layers(*ENERGY), torch.ones(32, 64), "infer"),
    (gradient_penalty, lambda: layers(*ENERGY), torch.ones(32, 64), "train"),
    (attack, lambda: layers(*SAME), torch.ones(256, 64), "train"),
    (attack_by_inputs, lambda: layers(*SAME), torch.ones(256, 64), "train"),
    (equilibrium, lambda: layers(*SAME), torch.ones(32, 64), "train"),
    (gradient_norm, lambda: layers(*SAME), torch.ones(32, 64), "train"),
    (half_gradient, lambda: layers(*SAME), torch.ones(256, 64), "infer"),
    (jacobian, lambda: layers(*SAME), torch.ones(1, 64), "infer"),
    (product_with_hessian, lambda: layers(*SAME), torch.ones(32, 64), "infer"),
]


@pytest.mark.parametrize(("function", "make", "x", "mode"), CASES)
def test_the_peak_is_a_real_run_s(function, make, x, mode):
    loss = torch.Tensor.sum if mode == "train" else None
    found = validate(Doing(function, make()), x, mode=mode, optimizer=None, loss=loss)
    held = next(each for each in found.comparisons if each.quantity is Quantity.REQUESTED_WITHOUT_SCRATCH)
    assert abs(held.predicted_bytes - held.measured_bytes) <= 1e-4 * held.measured_bytes, held


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_flops_are_those_of_the_gradients_that_are_asked_for(target):
    """Two products forward; backward the gradient of each input, and of no weight."""
    model = Doing(force, nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False)))
    profile = analyze(model, torch.ones(16, 64), mode="infer", target=target).profile
    products = [op.flops for op in profile.ops if op.name.startswith("aten.mm")]
    assert products == [2 * 16 * 64 * 128, 2 * 16 * 128 * 32, 2 * 16 * 128 * 32, 2 * 16 * 64 * 128]


def test_a_convolution_is_asked_for_its_input_s_gradient_only():
    model = Doing(force, nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    profile = analyze(model, torch.ones(2, 3, 16, 16), mode="infer", target="h100").profile
    for storage in profile.storages:
        made = storage.op is not None and profile.ops[storage.op].name
        assert not (made == "aten.convolution_backward.default" and storage.nbytes == 8 * 8 * 9 * 4)


def test_a_backward_within_one_of_some_gradients_computes_all_of_its_own():

    def slope(bodies, x):
        body, other = bodies
        x = x.detach().requires_grad_()

        def train(gradient):
            with torch.enable_grad():
                other(gradient.detach()).sum().backward()
            other.zero_grad()

        x.register_hook(train)
        (found,) = torch.autograd.grad(body(x).sum(), x)
        return found

    found = validate(
        Doing(slope, nn.ModuleList([layers(64, 64, 64), nn.Linear(64, 256)])), torch.ones(32, 64), mode="infer"
    )
    held = next(each for each in found.comparisons if each.quantity is Quantity.REQUESTED_WITHOUT_SCRATCH)
    assert abs(held.predicted_bytes - held.measured_bytes) <= 1e-4 * held.measured_bytes, held


def rounded(body, x):
    """A root whose gradient is given in half precision, and comes to its node in float32."""
    y = body(x)
    (slope,) = torch.autograd.grad(y, body[-1].bias, torch.ones_like(y, dtype=torch.bfloat16))
    return slope


@pytest.mark.parametrize("width", [64, 4096])
def test_a_gradient_given_in_another_dtype_is_cast(width):
    found = validate(Doing(rounded, layers(64, width)), torch.ones(512, 64), mode="infer")
    held = next(each for each in found.comparisons if each.quantity is Quantity.REQUESTED_WITHOUT_SCRATCH)
    assert abs(held.predicted_bytes - held.measured_bytes) <= 1e-4 * held.measured_bytes, held
