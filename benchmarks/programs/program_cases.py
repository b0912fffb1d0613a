# ruff: noqa: D103  (the name of each program says what it is)
"""Programs of many kinds, each a few lines of plain PyTorch, for `benchmarks/programs/programs.py`.

Each is written as its kind is usually written, not for fxmem. `program` registers what makes it; what it makes is built
anew for every run.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint as checkpoints

ROWS, WIDTH = 512, 256
"""Of most tensors: half a MiB, so that single numbers do not count."""


@dataclasses.dataclass
class Case:
    """A program that one step runs."""

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Any = "adamw"
    precision: Any = None
    modes: tuple[str, ...] = ("train", "infer")


PROGRAMS: dict[str, Callable[[], Case]] = {}
"""What makes each program, by name."""


def program(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register what makes a program, by its name."""
    PROGRAMS[make.__name__] = make
    return make


class Net(nn.Module):
    """A module whose forward is a function of it and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = [forward]
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        """What the function returns."""
        return self.call[0](self, *inputs)


def mlp(*widths: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with activations between."""
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def rows(*shape: int) -> Tensor:
    """Random rows, or random numbers of this shape."""
    return torch.randn(*shape) if shape else torch.randn(ROWS, WIDTH)


def block() -> nn.Sequential:
    """A block of a feed-forward network."""
    return mlp(WIDTH, 2 * WIDTH, WIDTH)


TRAIN = ("train",)
INFER = ("infer",)

# --- gradients within the program -------------------------------------------------------------------------------------


@program
def force_field() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return -torch.autograd.grad(net.energy(x).sum(), x, create_graph=net.training)[0]

    return Case(Net(forward, energy=mlp(64, 512, 512, 1, act=nn.SiLU)), (rows(256, 64),))


@program
def stress_and_forces() -> Case:
    def forward(net: Net, x: Tensor, cell: Tensor) -> Any:
        with torch.enable_grad():
            x, cell = x.detach().requires_grad_(True), cell.detach().requires_grad_(True)
            energy = net.energy(x @ cell).sum()
            return torch.autograd.grad(energy, (x, cell), create_graph=net.training)

    return Case(Net(forward, energy=mlp(64, 512, 512, 1, act=nn.Tanh)), (rows(256, 64), rows(64, 64)))


@program
def gradient_penalty() -> Case:
    def forward(net: Net, real: Tensor, fake: Tensor) -> Tensor:
        mix = (0.3 * real + 0.7 * fake).requires_grad_(True)
        with torch.enable_grad():
            found = torch.autograd.grad(net.critic(mix).sum(), mix, create_graph=True)[0]
        return net.critic(fake).mean() - net.critic(real).mean() + 10 * ((found.norm(2, dim=1) - 1) ** 2).mean()

    return Case(Net(forward, critic=mlp(WIDTH, 512, 512, 1, act=nn.LeakyReLU)), (rows(), rows()))


@program
def r1_regulariser() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        logits = net.critic(x)
        found = torch.autograd.grad(logits.sum(), x, create_graph=True)[0]
        return F.softplus(-logits).mean() + 5 * found.square().sum(dim=(1, 2, 3)).mean()

    critic = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2), nn.LeakyReLU(), nn.Conv2d(32, 64, 3, 2), nn.Flatten(), nn.Linear(2304, 1)
    )
    return Case(Net(forward, critic=critic), (rows(16, 3, 28, 28),), modes=TRAIN)


@program
def heat_equation() -> Case:
    def forward(net: Net, at: Tensor) -> Tensor:
        at = at.detach().requires_grad_(True)
        u = net.u(at)
        first = torch.autograd.grad(u.sum(), at, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 1].sum(), at, create_graph=True)[0]
        return (first[:, 0] - second[:, 1]).square().mean()

    return Case(Net(forward, u=mlp(2, 256, 256, 256, 1, act=nn.Tanh)), (rows(1024, 2),), modes=TRAIN)


@program
def third_derivative() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x = x.detach().requires_grad_(True)
        y = net.f(x)
        for _ in range(3):
            y = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return y.square().mean()

    return Case(Net(forward, f=mlp(32, 128, 128, 1, act=nn.Softplus)), (rows(512, 32),), modes=TRAIN)


@program
def saliency() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(net.f(x)[:, 3].sum(), x)[0].abs()

    return Case(Net(forward, f=mlp(WIDTH, 1024, 1024, 10, act=nn.ReLU)), (rows(),), modes=INFER)


@program
def gradient_class_activation() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            features = net.body(x)
            features.retain_grad()
            net.head(features.mean((2, 3)))[:, 0].sum().backward()
        return F.relu((features.grad.mean((2, 3), keepdim=True) * features).sum(1))

    body = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU())
    return Case(Net(forward, body=body, head=nn.Linear(64, 10)), (rows(16, 3, 63, 63),), modes=INFER)


@program
def adversarial_training() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        noise = torch.zeros_like(x)
        for _ in range(2):
            with torch.enable_grad():
                noise = noise.detach().requires_grad_(True)
                found = torch.autograd.grad(net.f(x + noise).logsumexp(1).sum(), noise)[0]
            noise = (noise + 0.1 * found.sign()).clamp(-0.2, 0.2)
        return net.f(x + noise.detach())

    return Case(Net(forward, f=mlp(WIDTH, 1024, 10, act=nn.ReLU)), (rows(),))


@program
def virtual_adversarial() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        clean = F.log_softmax(net.f(x), 1).detach()
        noise = F.normalize(torch.randn_like(x)).requires_grad_(True)
        gap = F.kl_div(F.log_softmax(net.f(x + noise), 1), clean, log_target=True, reduction="batchmean")
        noise = F.normalize(torch.autograd.grad(gap, noise)[0])
        return F.kl_div(F.log_softmax(net.f(x + noise), 1), clean, log_target=True, reduction="batchmean")

    return Case(Net(forward, f=mlp(WIDTH, 512, 10)), (rows(),), modes=TRAIN)


@program
def batched_gradients() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            y = net.f(x).sum(0)
            return torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True)[0]

    return Case(Net(forward, f=mlp(64, 128, 8)), (rows(256, 64),), modes=INFER)


def _functional(take: Callable[..., Any], **settings: Any) -> Case:
    def forward(net: Net, x: Tensor) -> Any:
        return take(net.f, x, **settings)

    return Case(Net(forward, f=mlp(48, 96, 8, act=nn.Tanh)), (rows(16, 48),), modes=INFER)


@program
def jacobian() -> Case:
    return _functional(torch.autograd.functional.jacobian)


@program
def jacobian_vectorized() -> Case:
    return _functional(torch.autograd.functional.jacobian, vectorize=True)


@program
def jacobian_forward_mode() -> Case:
    return _functional(torch.autograd.functional.jacobian, vectorize=True, strategy="forward-mode")


def _scalar(take: Callable[..., Any], **settings: Any) -> Case:
    def forward(net: Net, x: Tensor) -> Any:
        return take(lambda at: net.f(at).square().sum(), x, **settings)

    return Case(Net(forward, f=mlp(24, 64, 1, act=nn.Tanh)), (rows(4, 24),), modes=INFER)


@program
def hessian() -> Case:
    return _scalar(torch.autograd.functional.hessian)


@program
def hessian_vectorized() -> Case:
    return _scalar(torch.autograd.functional.hessian, vectorize=True)


@program
def hessian_outer_forward_mode() -> Case:
    return _scalar(torch.autograd.functional.hessian, vectorize=True, outer_jacobian_strategy="forward-mode")


@program
def hessian_vector_product() -> Case:
    def forward(net: Net, x: Tensor) -> Any:
        return torch.autograd.functional.hvp(lambda at: net.f(at).square().sum(), x, torch.ones_like(x))[1]

    return Case(Net(forward, f=mlp(64, 512, 1, act=nn.Tanh)), (rows(256, 64),), modes=INFER)


@program
def vector_hessian_product() -> Case:
    def forward(net: Net, x: Tensor) -> Any:
        return torch.autograd.functional.vhp(lambda at: net.f(at).square().sum(), x, torch.ones_like(x))[1]

    return Case(Net(forward, f=mlp(64, 512, 1, act=nn.Tanh)), (rows(256, 64),), modes=INFER)


@program
def hutchinson_trace() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        velocity, noise = net.f(x), torch.randn_like(x)
        found = torch.autograd.grad(velocity, x, noise, create_graph=True)[0]
        return (velocity.square().sum(1) - (found * noise).sum(1)).mean()

    return Case(Net(forward, f=mlp(WIDTH, 512, WIDTH, act=nn.Tanh)), (rows(),), modes=TRAIN)


@program
def gradient_norms_of_two_losses() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        shared = net.body(x)
        losses = [head(shared).square().mean() for head in net.heads]
        weight = net.body[-1].weight
        norms = [torch.autograd.grad(loss, weight, retain_graph=True, create_graph=True)[0].norm() for loss in losses]
        return sum(losses) + (norms[0] - norms[1]).abs()

    heads = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5)])
    return Case(Net(forward, body=block(), heads=heads), (rows(),), modes=TRAIN)


@program
def deep_equilibrium() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = torch.tanh(net.f(z) + x)
        z = torch.tanh(net.f(z) + x)
        if net.training:
            start = z.clone().detach().requires_grad_()
            again = torch.tanh(net.f(start) + x)

            def solve(gradient: Tensor) -> Tensor:
                found = gradient
                for _ in range(3):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(solve)
        return z

    return Case(Net(forward, f=nn.Linear(WIDTH, WIDTH)), (rows(),))


@program
def inner_steps_of_autograd() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        w1, w2 = net.f[0].weight, net.f[2].weight
        for _ in range(2):
            loss = F.mse_loss(F.linear(F.relu(F.linear(x, w1)), w2), y)
            g1, g2 = torch.autograd.grad(loss, (w1, w2), create_graph=True)
            w1, w2 = w1 - 0.1 * g1, w2 - 0.1 * g2
        return F.mse_loss(F.linear(F.relu(F.linear(x, w1)), w2), y)

    return Case(Net(forward, f=mlp(WIDTH, 512, WIDTH, act=nn.ReLU)), (rows(), rows()), modes=TRAIN)


@program
def first_order_meta_learning() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        weight = net.f.weight
        for _ in range(3):
            found = torch.autograd.grad(F.mse_loss(F.linear(x, weight), y), weight)[0]
            weight = weight - 0.1 * found
        return F.mse_loss(F.linear(x, weight), y)

    return Case(Net(forward, f=nn.Linear(WIDTH, WIDTH, bias=False)), (rows(), rows()), modes=TRAIN)


@program
def sharpness_aware() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        weights = list(net.f.parameters())
        found = torch.autograd.grad(net.f(x).square().mean(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, found, strict=True):
                weight.add_(gradient, alpha=0.05)
        loss = net.f(x).square().mean()
        for weight, gradient in zip(weights, found, strict=True):
            loss = loss - 0 * (weight * gradient).sum()
        return loss

    return Case(Net(forward, f=block()), (rows(),), modes=TRAIN)


# --- torch.func -------------------------------------------------------------------------------------------------------


@program
def gradients_of_each_sample() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Any:
        weights = {name: weight.detach() for name, weight in net.f.named_parameters()}

        def loss(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(net.f, weights, (x[None],)), y[None])

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)

    return Case(Net(forward, f=mlp(64, 128, 32)), (rows(32, 64), rows(32, 32)), modes=INFER)


@program
def gradients_of_each_sample_in_chunks() -> Case:
    def forward(net: Net, x: Tensor) -> Any:
        weights = {name: weight.detach() for name, weight in net.f.named_parameters()}
        each = torch.func.grad(lambda weights, x: torch.func.functional_call(net.f, weights, (x,)).square().sum())
        return torch.func.vmap(each, in_dims=(None, 0), chunk_size=8)(weights, x)

    return Case(Net(forward, f=mlp(64, 128, 32)), (rows(32, 64),), modes=INFER)


@program
def ensemble_by_vmap() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        weights, buffers = torch.func.stack_module_state(list(net.models))
        one = net.base[0]
        return torch.func.vmap(lambda w, b: torch.func.functional_call(one, (w, b), (x,)))(weights, buffers)

    base = [copy.deepcopy(mlp(WIDTH, 128, 32)).to("meta")]
    return Case(Net(forward, models=nn.ModuleList([mlp(WIDTH, 128, 32) for _ in range(4)]), base=base), (rows(),))


@program
def vmap_of_what_was_computed() -> Case:
    return Case(
        Net(lambda net, x: torch.func.vmap(lambda row: torch.tanh(row) * row.sum())(net.f(x)), f=block()), (rows(),)
    )


@program
def vmap_over_two_axes() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x).view(ROWS, 16, 16)
        return torch.func.vmap(torch.func.vmap(torch.dot), in_dims=(1, 1), out_dims=1)(h, h * 2)

    return Case(Net(forward, f=block()), (rows(),))


@program
def vmap_with_random_masks() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        drop = torch.func.vmap(lambda row: F.dropout(row, 0.5, training=True), randomness="different")
        return net.g(drop(net.f(x)))

    return Case(Net(forward, f=block(), g=block()), (rows(),))


def _transform(take: Callable[[Any, Tensor], Any], modes: tuple[str, ...] = ("train", "infer")) -> Case:
    return Case(Net(lambda net, x: take(net.f, x), f=mlp(32, 128, 16, act=nn.Tanh)), (rows(24, 32),), modes=modes)


@program
def reverse_jacobian() -> Case:
    return _transform(lambda f, x: torch.func.vmap(torch.func.jacrev(f))(x))


@program
def reverse_jacobian_in_chunks() -> Case:
    return _transform(lambda f, x: torch.func.jacrev(f, chunk_size=4)(x[0]))


@program
def forward_jacobian() -> Case:
    return _transform(lambda f, x: torch.func.vmap(torch.func.jacfwd(f))(x))


@program
def hessian_of_func() -> Case:
    return _transform(lambda f, x: torch.func.hessian(lambda row: f(row).square().sum())(x[0]))


@program
def hessians_of_each_sample() -> Case:
    return _transform(lambda f, x: torch.func.vmap(torch.func.hessian(lambda row: f(row).square().sum()))(x))


@program
def laplacian_by_two_reverse_modes() -> Case:
    def take(f: Any, x: Tensor) -> Tensor:
        scalar = torch.func.jacrev(torch.func.jacrev(lambda row: f(row).sum()))
        return torch.func.vmap(scalar)(x).diagonal(dim1=1, dim2=2).sum(1)

    return _transform(take)


@program
def tangent_and_value() -> Case:
    return _transform(lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)))


@program
def pullback() -> Case:
    def take(f: Any, x: Tensor) -> Tensor:
        value, back = torch.func.vjp(f, x)
        return back(value)[0]

    return _transform(take)


@program
def linearized() -> Case:
    def take(f: Any, x: Tensor) -> Tensor:
        value, push = torch.func.linearize(f, x)
        return value + push(torch.ones_like(x))

    return _transform(take, INFER)


@program
def forward_over_reverse() -> Case:
    def take(f: Any, x: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(lambda at: f(at).square().sum()), (x,), (torch.ones_like(x),))[1]

    return _transform(take)


@program
def gradient_and_value() -> Case:
    return _transform(lambda f, x: torch.func.grad_and_value(lambda at: f(at).square().mean())(x))


@program
def dual_numbers() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            out = net.f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    return Case(Net(forward, f=block()), (rows(),))


@program
def meta_learning_by_func() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(net.f.named_parameters())

        def loss(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(net.f, weights, (x,)), y)

        def task(x: Tensor, y: Tensor) -> Tensor:
            found = torch.func.grad(loss)(weights, x, y)
            return loss({name: weights[name] - 0.1 * found[name] for name in weights}, x, y)

        return torch.func.vmap(task)(x, y).mean()

    return Case(Net(forward, f=mlp(32, 64, 32)), (rows(8, 64, 32), rows(8, 64, 32)), modes=TRAIN)


@program
def neural_tangent_kernel() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        weights = {name: weight.detach() for name, weight in net.f.named_parameters()}
        each = torch.func.jacrev(lambda weights, x: torch.func.functional_call(net.f, weights, (x[None],))[0])
        jacobians = torch.func.vmap(each, (None, 0))(weights, x)
        return sum(torch.einsum("naf,maf->nma", j.flatten(2), j.flatten(2)) for j in jacobians.values())

    return Case(Net(forward, f=mlp(32, 64, 4)), (rows(24, 32),), modes=INFER)


# --- parts of the backward --------------------------------------------------------------------------------------------


@program
def backward_for_some_inputs() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        loss = net.f(x).square().mean()
        loss.backward(inputs=[net.f[0].weight], retain_graph=True)
        return loss

    return Case(Net(forward, f=block()), (rows(),), modes=TRAIN, optimizer=None)


@program
def frozen_first_half() -> Case:
    return Case(Net(lambda net, x: net.g(net.f(x)), f=block().requires_grad_(False), g=block()), (rows(),))


@program
def only_biases() -> Case:
    f = nn.Sequential(block(), block())
    for name, weight in f.named_parameters():
        weight.requires_grad_(name.endswith("bias"))
    return Case(f, (rows(),))


@program
def encoder_without_gradients() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.f(x)
        return net.g(h)

    return Case(Net(forward, f=block(), g=block()), (rows(),))


@program
def detached_branch() -> Case:
    return Case(
        Net(lambda net, x: net.g(net.f(x)) + net.h(net.f(x).detach()), f=block(), g=block(), h=block()), (rows(),)
    )


@program
def local_losses() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = layer(x.detach())
            if net.training:
                x.square().mean().backward()
        return net.head(x.detach())

    return Case(Net(forward, layers=nn.ModuleList([block(), block()]), head=nn.Linear(WIDTH, 4)), (rows(),))


@program
def two_backwards_of_one_graph() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x)
        if net.training:
            h.square().mean().backward(retain_graph=True)
        return net.g(h)

    return Case(Net(forward, f=block(), g=block()), (rows(),))


@program
def low_rank_adapters() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.g(F.gelu(net.f(x) + x @ net.a @ net.b))

    f, g = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 8).requires_grad_(False)
    a, b = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.zeros(8, WIDTH))
    return Case(Net(forward, f=f, g=g, a=a, b=b), (rows(),))


# --- teachers, averages and other models in the step ------------------------------------------------------------------


@program
def teacher_of_the_loss() -> Case:
    teacher, x = mlp(WIDTH, 1024, 10).requires_grad_(False), rows()

    def loss(out: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(teacher(x), 1)
        return F.kl_div(F.log_softmax(out, 1), wanted, reduction="batchmean")

    return Case(mlp(WIDTH, 64, 10), (x,), loss, modes=TRAIN)


@program
def perceptual_loss() -> Case:
    features = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()).requires_grad_(False)
    wanted = rows(8, 3, 48, 48)

    def loss(out: Tensor) -> Tensor:
        return F.l1_loss(features(out), features(wanted))

    return Case(nn.Conv2d(3, 3, 3, padding=1), (rows(8, 3, 48, 48),), loss, modes=TRAIN)


@program
def teacher_in_a_list() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = net.teacher[0](x)
        return F.mse_loss(net.f(x), wanted)

    return Case(Net(forward, f=block(), teacher=[block()]), (rows(),), modes=TRAIN)


@program
def average_of_weights() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, weight in zip(net.target.parameters(), net.f.parameters(), strict=True):
                mean.mul_(0.99).add_(weight, alpha=0.01)
            wanted = net.target(x)
        return 2 - 2 * F.cosine_similarity(net.f(x), wanted).mean()

    return Case(Net(forward, f=block(), target=block().requires_grad_(False)), (rows(),), modes=TRAIN)


@program
def queue_of_keys() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        query = F.normalize(net.f(x))
        with torch.no_grad():
            key = F.normalize(net.k(y))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ net.queue.clone().detach()], 1) / 0.07
        net.queue[:, :ROWS] = key.T
        return F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long))

    net = Net(forward, f=block(), k=block().requires_grad_(False))
    net.register_buffer("queue", F.normalize(rows(WIDTH, 2048), dim=0))
    return Case(net, (rows(), rows()), modes=TRAIN)


@program
def generator_and_critic() -> Case:
    def forward(net: Net, z: Tensor, real: Tensor) -> Tensor:
        made = net.generator(z)
        critic = F.softplus(-net.critic(real)).mean() + F.softplus(net.critic(made.detach())).mean()
        return critic + F.softplus(-net.critic(made)).mean()

    parts = {"generator": mlp(64, 512, WIDTH), "critic": mlp(WIDTH, 512, 1, act=nn.LeakyReLU)}
    return Case(Net(forward, **parts), (rows(ROWS, 64), rows()), modes=TRAIN)


@program
def actor_and_two_critics() -> Case:
    def forward(net: Net, state: Tensor, action: Tensor) -> Tensor:
        with torch.no_grad():
            following = torch.tanh(net.actor(state))
            wanted = torch.minimum(*(q(torch.cat([state, following], 1)) for q in net.targets))
        now = [q(torch.cat([state, action], 1)) for q in net.critics]
        return sum(F.mse_loss(q, wanted) for q in now) - net.critics[0](torch.cat([state, net.actor(state)], 1)).mean()

    critics = nn.ModuleList([mlp(WIDTH + 8, 256, 1) for _ in range(2)])
    parts = {"actor": mlp(WIDTH, 256, 8), "critics": critics, "targets": copy.deepcopy(critics).requires_grad_(False)}
    return Case(Net(forward, **parts), (rows(), rows(ROWS, 8)), modes=TRAIN)


# --- losses -----------------------------------------------------------------------------------------------------------


def _loss(loss: Callable[[Tensor], Tensor], classes: int = 256, optimizer: Any = "adamw") -> Case:
    return Case(mlp(WIDTH, 64, classes), (rows(),), loss, optimizer, modes=TRAIN)


def _in_model(loss: Callable[[Tensor], Tensor]) -> Case:
    return Case(Net(lambda net, x: loss(net.f(x)), f=mlp(WIDTH, 64, 1024)), (rows(),))


@program
def cross_entropy_smoothed() -> Case:
    labels = torch.randint(256, (ROWS,))
    return _loss(lambda out: F.cross_entropy(out, labels, label_smoothing=0.1))


@program
def cross_entropy_weighted() -> Case:
    labels, weight = torch.randint(256, (ROWS,)), torch.rand(256)
    return _loss(lambda out: F.cross_entropy(out, labels, weight=weight, ignore_index=3))


@program
def cross_entropy_of_probabilities() -> Case:
    wanted = torch.rand(ROWS, 256).softmax(1)
    return _loss(lambda out: F.cross_entropy(out, wanted))


@program
def binary_with_logits() -> Case:
    wanted, weight = torch.rand(ROWS, 256), torch.rand(256)
    return _loss(lambda out: F.binary_cross_entropy_with_logits(out, wanted, pos_weight=weight))


@program
def binary_cross_entropy() -> Case:
    wanted = torch.rand(ROWS, 256)
    return _loss(lambda out: F.binary_cross_entropy(out.sigmoid(), wanted))


@program
def focal() -> Case:
    wanted = torch.rand(ROWS, 256).round()

    def loss(out: Tensor) -> Tensor:
        p = out.sigmoid()
        each = F.binary_cross_entropy_with_logits(out, wanted, reduction="none")
        return (each * (1 - (p * wanted + (1 - p) * (1 - wanted))) ** 2).mean()

    return _loss(loss)


@program
def dice() -> Case:
    wanted = torch.rand(ROWS, 256).round()

    def loss(out: Tensor) -> Tensor:
        p = out.sigmoid()
        return 1 - (2 * (p * wanted).sum(1) + 1).div(p.sum(1) + wanted.sum(1) + 1).mean()

    return _loss(loss)


@program
def robust_regression() -> Case:
    wanted = rows()
    return _loss(lambda out: F.huber_loss(out, wanted) + F.smooth_l1_loss(out, wanted) + F.l1_loss(out, wanted))


@program
def squared_error_at_inference() -> Case:
    return _in_model(lambda out: F.mse_loss(out, out * 0.5))


@program
def energy_of_logits() -> Case:
    return _in_model(lambda out: out.logsumexp(1).mean() - out.max(1).values.mean())


@program
def negative_likelihoods() -> Case:
    wanted = torch.rand(ROWS, 128)

    def loss(out: Tensor) -> Tensor:
        mean, variance = out.chunk(2, 1)
        return F.gaussian_nll_loss(mean, wanted, F.softplus(variance)) + F.poisson_nll_loss(mean, wanted)

    return _loss(loss)


@program
def mixture_of_gaussians() -> Case:
    wanted = torch.randn(ROWS, 1)

    def loss(out: Tensor) -> Tensor:
        weight, mean, scale = out.chunk(3, 1)
        each = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3, validate_args=False).log_prob(wanted)
        return -(F.log_softmax(weight, 1) + each).logsumexp(1).mean()

    return _loss(loss, 240)


@program
def margins() -> Case:
    labels = torch.randint(256, (ROWS,))
    return _loss(lambda out: F.multi_margin_loss(out, labels) + F.soft_margin_loss(out, out.detach().sign()))


@program
def triplets() -> Case:
    def loss(out: Tensor) -> Tensor:
        a, p, n = out.chunk(3)
        return F.triplet_margin_loss(a, p, n) + F.margin_ranking_loss(a, p, torch.ones_like(a))

    return Case(mlp(WIDTH, 64, 256), (rows(510, WIDTH),), loss, modes=TRAIN)


@program
def cosine_pairs() -> Case:
    def loss(out: Tensor) -> Tensor:
        a, b = out.chunk(2)
        return F.cosine_embedding_loss(a, b, torch.ones(len(a)))

    return _loss(loss)


@program
def contrastive_pairs() -> Case:
    def loss(out: Tensor) -> Tensor:
        z = F.normalize(out)
        similar = (z @ z.T / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))

    return _loss(loss)


@program
def contrastive_of_images_and_texts() -> Case:
    def forward(net: Net, images: Tensor, texts: Tensor) -> Tensor:
        a, b = F.normalize(net.image(images), dim=-1), F.normalize(net.text(texts), dim=-1)
        logits = net.scale.exp() * a @ b.T
        labels = torch.arange(len(a))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    net = Net(forward, image=block(), text=block(), scale=nn.Parameter(torch.tensor(2.0)))
    return Case(net, (rows(), rows()), modes=TRAIN)


@program
def supervised_contrast() -> Case:
    labels = torch.randint(8, (ROWS,))

    def loss(out: Tensor) -> Tensor:
        z = F.normalize(out)
        logits = z @ z.T / 0.1
        same = (labels[:, None] == labels[None]).float()
        logits = logits - logits.max(1, keepdim=True).values.detach()
        return -((logits - logits.exp().sum(1, keepdim=True).log()) * same).sum(1).div(same.sum(1)).mean()

    return _loss(loss)


@program
def angular_margin() -> Case:
    labels = torch.randint(512, (ROWS,))

    def forward(net: Net, x: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(net.f(x)), F.normalize(net.w))
        sine = (1 - cosine.square()).clamp(0, 1).sqrt()
        hot = F.one_hot(labels, 512).float()
        phi = cosine * math.cos(0.5) - sine * math.sin(0.5)
        return F.cross_entropy(30 * (hot * phi + (1 - hot) * cosine), labels)

    return Case(Net(forward, f=block(), w=nn.Parameter(rows(512, WIDTH))), (rows(),), modes=TRAIN)


@program
def redundancy_reduction() -> Case:
    def forward(net: Net, a: Tensor, b: Tensor) -> Tensor:
        c = net.bn(net.f(a)).T @ net.bn(net.f(b)) / ROWS
        on = torch.diagonal(c).add(-1).pow(2).sum()
        off = c.flatten()[:-1].view(WIDTH - 1, WIDTH + 1)[:, 1:].pow(2).sum()
        return on + 0.005 * off

    return Case(Net(forward, f=block(), bn=nn.BatchNorm1d(WIDTH, affine=False)), (rows(), rows()), modes=TRAIN)


@program
def connectionist_temporal() -> Case:
    def loss(out: Tensor) -> Tensor:
        steps = F.log_softmax(out.view(64, 8, 256), 2)
        return F.ctc_loss(steps, torch.randint(1, 256, (8, 16)), (64,) * 8, (16,) * 8)

    return _loss(loss)


@program
def optimal_transport() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(net.f(x), net.f(y))
        logp = -cost / 0.1
        for _ in range(5):
            logp = logp - logp.logsumexp(1, keepdim=True)
            logp = logp - logp.logsumexp(0, keepdim=True)
        return (logp.exp() * cost).sum()

    return Case(Net(forward, f=block()), (rows(), rows()))


@program
def preference_optimization() -> Case:
    def forward(net: Net, ids: Tensor) -> Tensor:
        def likelihood(model: nn.Module) -> Tensor:
            return F.log_softmax(model(ids)[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2).sum(1)

        mine = likelihood(net.policy)
        with torch.no_grad():
            theirs = likelihood(net.reference)
        chosen, rejected = (mine - theirs).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    policy = nn.Sequential(nn.Embedding(500, 64), block_of(64), nn.Linear(64, 500))
    net = Net(forward, policy=policy, reference=copy.deepcopy(policy).requires_grad_(False))
    return Case(net, (torch.randint(500, (8, 64)),), modes=TRAIN)


def block_of(width: int) -> nn.Sequential:
    """A feed-forward block of this width."""
    return mlp(width, 2 * width, width)


# --- recurrent --------------------------------------------------------------------------------------------------------


@program
def lstm() -> Case:
    return Case(Net(lambda net, x: net.f(x)[0], f=nn.LSTM(64, 128, 2, batch_first=True)), (rows(32, 40, 64),))


@program
def gru_in_both_directions() -> Case:
    return Case(Net(lambda net, x: net.f(x)[0], f=nn.GRU(64, 128, bidirectional=True)), (rows(40, 32, 64),))


@program
def plain_recurrence() -> Case:
    return Case(Net(lambda net, x: net.f(x)[1], f=nn.RNN(64, 128, 2, nonlinearity="relu")), (rows(40, 32, 64),))


@program
def cells_in_a_loop() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 128)
        out = []
        for step in x:
            h, c = net.cell(step, (h, c))
            out.append(h)
        return torch.stack(out)

    return Case(Net(forward, cell=nn.LSTMCell(64, 128)), (rows(30, 64, 64),))


@program
def gru_cells_in_a_loop() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 128)
        for step in x:
            h = net.cell(step, h)
        return h

    return Case(Net(forward, cell=nn.GRUCell(64, 128)), (rows(30, 64, 64),))


@program
def truncated_backward_through_time() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        state, total = None, 0
        for part in x.chunk(4):
            out, state = net.f(part, state)
            state = tuple(each.detach() for each in state)
            total = total + net.head(out).square().mean()
        return total

    return Case(Net(forward, f=nn.LSTM(64, 128), head=nn.Linear(128, 8)), (rows(40, 32, 64),))


@program
def sequence_to_sequence() -> Case:
    def forward(net: Net, source: Tensor, target: Tensor) -> Tensor:
        keys, h = net.encoder(net.embed(source))
        out, h = [], h[0]
        for step in net.embed(target).unbind(1):
            weight = F.softmax(torch.bmm(keys, h[:, :, None]), 1)
            h = net.cell(torch.cat([step, (weight * keys).sum(1)], 1), h)
            out.append(net.head(h))
        return F.cross_entropy(torch.stack(out, 1).flatten(0, 1), target.flatten())

    parts = {"embed": nn.Embedding(400, 64), "encoder": nn.GRU(64, 128, batch_first=True)}
    net = Net(forward, **parts, cell=nn.GRUCell(192, 128), head=nn.Linear(128, 400))
    return Case(net, (torch.randint(400, (32, 20)), torch.randint(400, (32, 20))), modes=TRAIN)


@program
def selective_scan() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        dt, b, c = F.softplus(net.dt(x)), net.b(x), net.c(x)
        decay = torch.exp(dt.unsqueeze(-1) * -net.a.exp())
        drive = dt.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        h, out = x.new_zeros(x.shape[0], 64, 16), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            out.append((h * c[:, t, None]).sum(-1))
        return torch.stack(out, 1)

    parts = {"dt": nn.Linear(64, 64), "b": nn.Linear(64, 16), "c": nn.Linear(64, 16)}
    return Case(Net(forward, **parts, a=nn.Parameter(rows(64, 16))), (rows(8, 32, 64),))


@program
def linear_attention() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
        return torch.einsum("btd,btde->bte", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)

    return Case(Net(forward, qkv=nn.Linear(32, 96)), (rows(8, 64, 32),))


# --- checkpointing ----------------------------------------------------------------------------------------------------


def _layers(forward: Callable[..., Tensor], make: Callable[[], nn.Module] = block) -> Case:
    return Case(Net(forward, layers=nn.ModuleList([make() for _ in range(4)])), (rows(),))


@program
def checkpoint_each_block() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = x + checkpoints.checkpoint(layer, x, use_reentrant=False)
        return x

    return _layers(forward)


@program
def checkpoint_reentrant() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = net.layers[0](x)
        for layer in net.layers[1:]:
            x = checkpoints.checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
        return x

    return _layers(forward)


@program
def checkpoint_nested() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return net.layers[1](checkpoints.checkpoint(net.layers[0], x, use_reentrant=False))

        x = checkpoints.checkpoint(inner, x, use_reentrant=False)
        return net.layers[3](net.layers[2](x))

    return _layers(forward)


@program
def checkpoint_sequential() -> Case:
    return _layers(lambda net, x: checkpoints.checkpoint_sequential(list(net.layers), 2, x, use_reentrant=False))


@program
def checkpoint_selective() -> Case:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        keeps = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return checkpoints.CheckpointPolicy.MUST_SAVE if keeps else checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    def forward(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = checkpoints.checkpoint(
                layer,
                x,
                use_reentrant=False,
                context_fn=lambda: checkpoints.create_selective_checkpoint_contexts(policy),
            )
        return x

    return _layers(forward)


@program
def checkpoint_with_dropout() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = checkpoints.checkpoint(
                lambda x, layer=layer: F.dropout(layer(x), 0.1, net.training),
                x,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return x

    return _layers(forward)


# --- hooks ------------------------------------------------------------------------------------------------------------


@program
def features_by_forward_hooks() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        handles = [layer.register_forward_hook(lambda m, i, out: found.append(out)) for layer in net.layers]
        for layer in net.layers:
            x = layer(x)
        for handle in handles:
            handle.remove()
        return sum(each.square().mean() for each in found)

    return _layers(forward)


@program
def full_backward_hooks() -> Case:
    case = _layers(lambda net, x: net.layers[1](net.layers[0](x)))
    for layer in case.model.layers:
        layer.register_full_backward_hook(
            lambda m, given, received: (given[0] * 0.5,) if given[0] is not None else None
        )
    return case


@program
def gradient_clipped_by_hook() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return net.layers[1](h)

    return _layers(forward)


@program
def retained_gradients() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        if h.requires_grad:
            h.retain_grad()
        return net.layers[1](h)

    return _layers(forward)


@program
def optimizer_in_backward() -> Case:
    case = _layers(lambda net, x: net.layers[1](net.layers[0](x)))

    def update(weight: Tensor) -> None:
        with torch.no_grad():
            weight.add_(weight.grad, alpha=-0.01)
        weight.grad = None

    for weight in case.model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    return dataclasses.replace(case, optimizer=None, modes=TRAIN)


@program
def saved_in_half_precision() -> Case:
    def pack(tensor: Tensor) -> Any:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return net.layers[2](net.layers[1](net.layers[0](x)))

    return _layers(forward)


@program
def clipped_norm_in_a_hook_of_the_optimizer() -> Case:
    def make(weights: Any) -> torch.optim.Optimizer:
        weights = list(weights)
        optimizer = torch.optim.AdamW(weights)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(weights, 1.0) and None)
        return optimizer

    return Case(nn.Sequential(block(), block()), (rows(),), optimizer=make, modes=TRAIN)


# --- Functions of one's own -------------------------------------------------------------------------------------------


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s * (1 + x * (1 - s)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w, x.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sum: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.T + of_sum[:, None], x.T @ gradient


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        out = torch.cat([a, b], 1)
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(out.detach())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors[0].chunk(2, 1)
        ga, gb = gradient.chunk(2, 1)
        with torch.enable_grad():
            at = a.detach().requires_grad_(True)
            made = ctx.g(at)
            made.backward(gb)
        with torch.no_grad():
            b = b - made
            ga = ga + at.grad
        with torch.enable_grad():
            at = b.detach().requires_grad_(True)
            ctx.f(at).backward(ga)
        return torch.cat([ga, gb + at.grad], 1), None, None


@program
def straight_through() -> Case:
    return Case(Net(lambda net, x: net.g(_Round.apply(net.f(x))), f=block(), g=block()), (rows(),))


@program
def swish_that_recomputes() -> Case:
    return Case(Net(lambda net, x: net.g(_Swish.apply(net.f(x))), f=block(), g=block()), (rows(),))


@program
def product_with_two_results() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        out, total = _Product.apply(net.f(x), net.w)
        return net.g(out) + total[:, None]

    return Case(Net(forward, f=block(), w=nn.Parameter(rows(WIDTH, WIDTH)), g=block()), (rows(),))


@program
def domain_adversarial() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x)
        return net.label(h).square().mean() + net.domain(_Reverse.apply(h)).square().mean()

    return Case(Net(forward, f=block(), label=nn.Linear(WIDTH, 10), domain=nn.Linear(WIDTH, 2)), (rows(),))


@program
def reversible_blocks() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        for f, g in zip(net.f, net.g, strict=True):
            x = _Reversible.apply(x, f, g)
        return x

    def halves() -> nn.ModuleList:
        return nn.ModuleList([block_of(WIDTH // 2) for _ in range(3)])

    return Case(nn.Sequential(nn.Linear(WIDTH, WIDTH), Net(forward, f=halves(), g=halves())), (rows(),), modes=TRAIN)


@program
def vector_quantization() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        z = net.f(x)
        near = torch.cdist(z, net.codes.weight).argmin(1)
        q = net.codes(near)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return F.mse_loss(net.g(z + (q - z).detach()), x) + loss

    return Case(Net(forward, f=block(), g=block(), codes=nn.Embedding(512, WIDTH)), (rows(),))


# --- written in place -------------------------------------------------------------------------------------------------


@program
def activations_in_place() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = F.relu_(net.f(x))
        return F.leaky_relu_(net.g(h).add_(h), 0.1)

    return Case(Net(forward, f=nn.Linear(WIDTH, WIDTH), g=nn.Linear(WIDTH, WIDTH)), (rows(),))


@program
def slices_written() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        out = x.new_zeros(ROWS, 4 * WIDTH)
        for index, layer in enumerate(net.layers):
            out[:, index * WIDTH : (index + 1) * WIDTH] = layer(x)
        return out

    return _layers(forward)


@program
def cache_of_keys() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        keys = x.new_zeros(32, 64, WIDTH)
        out = []
        for t in range(8):
            keys[:, t] = net.f(x[:, t])
            out.append(torch.einsum("bd,btd->bt", x[:, t], keys[:, : t + 1]).softmax(-1).sum(-1))
        return torch.stack(out)

    return Case(Net(forward, f=nn.Linear(WIDTH, WIDTH)), (rows(32, 8, WIDTH),), modes=INFER)


@program
def scattered_messages() -> Case:
    def forward(net: Net, x: Tensor, edges: Tensor) -> Tensor:
        for layer in net.layers:
            source, target = edges
            sent = layer(x)[source]
            x = x + torch.zeros_like(x).index_add_(0, target, sent)
        return x

    edges = torch.randint(ROWS, (2, 2048))
    return dataclasses.replace(_layers(forward), inputs=(rows(), edges))


@program
def scattered_by_gather() -> Case:
    def forward(net: Net, x: Tensor, index: Tensor) -> Tensor:
        h = net.f(x)
        picked = h.gather(1, index)
        return torch.zeros_like(h).scatter_add(1, index, picked) + h.index_select(0, index[:, 0])

    return Case(Net(forward, f=block()), (rows(), torch.randint(WIDTH, (ROWS, 64))))


@program
def elements_put() -> Case:
    def forward(net: Net, x: Tensor, index: Tensor) -> Tensor:
        h = net.f(x).clone()
        h[index, index % WIDTH] = 0.5
        h.index_fill_(0, index[:8], 0)
        return net.g(h)

    return Case(Net(forward, f=block(), g=block()), (rows(), torch.randint(ROWS, (64,))))


@program
def running_statistics() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x)
        with torch.no_grad():
            net.mean.lerp_(h.mean(0), 0.1)
        return net.g((h - net.mean) * 2)

    net = Net(forward, f=block(), g=block())
    net.register_buffer("mean", torch.zeros(WIDTH))
    return Case(net, (rows(),))


# --- embeddings, graphs and sparse ------------------------------------------------------------------------------------


@program
def sparse_embedding() -> Case:
    net = nn.Sequential(nn.Embedding(4000, 64, sparse=True), nn.Flatten(), nn.Linear(512, 8))
    return Case(net, (torch.randint(4000, (256, 8)),), optimizer=lambda w: torch.optim.SGD(list(w), 0.1), modes=TRAIN)


@program
def sparse_adam() -> Case:
    net = nn.Embedding(4000, 64, sparse=True)
    make = lambda w: torch.optim.SparseAdam(list(w))  # noqa: E731
    return Case(net, (torch.randint(4000, (256, 8)),), optimizer=make, modes=TRAIN)


@program
def bags_of_words() -> Case:
    net = nn.Sequential(nn.EmbeddingBag(4000, 64, mode="mean"), nn.Linear(64, 8))
    return Case(net, (torch.randint(4000, (256, 16)),))


@program
def factorization_machine() -> Case:
    def forward(net: Net, ids: Tensor) -> Tensor:
        e = net.embed(ids)
        return net.bias(ids).sum(1) + 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1, keepdim=True)

    return Case(
        Net(forward, embed=nn.Embedding(5000, 32), bias=nn.Embedding(5000, 1)), (torch.randint(5000, (512, 20)),)
    )


@program
def graph_convolution() -> Case:
    def forward(net: Net, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(1).clamp(min=1).rsqrt()
        norm = degree[:, None] * adjacency * degree
        for layer in net.layers:
            x = F.relu(norm @ layer(x))
        return x

    return dataclasses.replace(_layers(forward), inputs=(rows(), torch.rand(ROWS, ROWS).round()))


@program
def graph_attention() -> Case:
    def forward(net: Net, x: Tensor, edges: Tensor) -> Tensor:
        h = net.f(x)
        source, target = edges
        score = F.leaky_relu((net.a(h)[source] + net.b(h)[target]).squeeze(1)).exp()
        total = x.new_zeros(ROWS).scatter_add(0, target, score)
        return x.new_zeros(ROWS, WIDTH).index_add(0, target, h[source] * (score / total[target])[:, None])

    parts = {"f": nn.Linear(WIDTH, WIDTH), "a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 1)}
    return Case(Net(forward, **parts), (rows(), torch.randint(ROWS, (2, 4096))))


@program
def point_cloud() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(8, largest=False).indices
        around = x.gather(1, near.flatten(1)[..., None].expand(-1, -1, 3)).view(*near.shape, 3)
        return net.f(around - x[:, :, None]).max(2).values

    return Case(Net(forward, f=mlp(3, 32, 64)), (rows(4, 256, 3),))


# --- attention --------------------------------------------------------------------------------------------------------


@program
def causal_attention() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (t.view(4, 128, 4, 32).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
        return net.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return Case(Net(forward, qkv=nn.Linear(128, 384), out=nn.Linear(128, 128)), (rows(4, 128, 128),))


@program
def attention_with_mask() -> Case:
    def forward(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.view(4, 128, 4, 32).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], dropout_p=0.0)

    return Case(Net(forward, qkv=nn.Linear(128, 384)), (rows(4, 128, 128), torch.rand(4, 128) > 0.2))


@program
def attention_by_hand() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).view(4, 128, 3, 4, 32).permute(2, 0, 3, 1, 4)
        score = (q @ k.transpose(-2, -1)) / 32**0.5
        score = score.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), float("-inf"))
        return F.dropout(score.softmax(-1), 0.1, net.training) @ v

    return Case(Net(forward, qkv=nn.Linear(128, 384)), (rows(4, 128, 128),))


@program
def attention_by_einsum() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhe->bthe", x, w) for w in (net.q, net.k, net.v))
        return torch.einsum("bhts,bshe->bthe", torch.einsum("bthe,bshe->bhts", q, k).softmax(-1), v)

    parts = {name: nn.Parameter(rows(128, 4, 32)) for name in "qkv"}
    return Case(Net(forward, **parts), (rows(4, 128, 128),))


@program
def multihead_attention() -> Case:
    net = Net(lambda net, x: net.f(x, x, x, need_weights=False)[0], f=nn.MultiheadAttention(128, 4, batch_first=True))
    return Case(net, (rows(8, 64, 128),))


@program
def multihead_attention_with_weights() -> Case:
    net = Net(lambda net, x: net.f(x, x, x), f=nn.MultiheadAttention(128, 4, batch_first=True))
    return Case(net, (rows(8, 64, 128),))


@program
def multihead_attention_padded() -> Case:
    def forward(net: Net, x: Tensor, padding: Tensor) -> Tensor:
        return net.f(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    padding = torch.arange(64)[None] >= torch.randint(32, 64, (8, 1))
    return Case(Net(forward, f=nn.MultiheadAttention(128, 4, batch_first=True)), (rows(8, 64, 128), padding))


@program
def cross_attention() -> Case:
    net = Net(lambda net, x, y: net.f(x, y, y)[0], f=nn.MultiheadAttention(128, 4, kdim=64, vdim=64))
    return Case(net, (rows(64, 8, 128), rows(32, 8, 64)))


@program
def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 2), (rows(8, 64, 128),))


@program
def transformer_encoder_masked() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.f(x, mask=nn.Transformer.generate_square_subsequent_mask(64), is_causal=True)

    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=True)
    return Case(Net(forward, f=nn.TransformerEncoder(layer, 2)), (rows(8, 64, 128),))


@program
def transformer() -> Case:
    return Case(nn.Transformer(128, 4, 1, 1, 256, batch_first=True), (rows(8, 64, 128), rows(8, 32, 128)))


@program
def rotary_positions() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        at = torch.outer(torch.arange(128).float(), 10000 ** (-torch.arange(16).float() / 16))
        turn = torch.polar(torch.ones_like(at), at)[None, :, None]
        q, k, v = net.qkv(x).view(4, 128, 3, 4, 32).unbind(2)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(4, 128, 4, 16, 2)) * turn).flatten(3) for t in (q, k)
        )
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))

    return Case(Net(forward, qkv=nn.Linear(128, 384)), (rows(4, 128, 128),))


@program
def shifted_windows() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = torch.roll(x, (-4, -4), (1, 2))
        w = x.view(4, 4, 8, 4, 8, 64).permute(0, 1, 3, 2, 4, 5).reshape(64, 64, 64)
        w = net.f(w, w, w, need_weights=False)[0].view(4, 4, 4, 8, 8, 64)
        return torch.roll(w.permute(0, 1, 3, 2, 4, 5).reshape(4, 32, 32, 64), (4, 4), (1, 2))

    return Case(Net(forward, f=nn.MultiheadAttention(64, 2, batch_first=True)), (rows(4, 32, 32, 64),))


@program
def tied_language_model() -> Case:
    def forward(net: Net, ids: Tensor) -> Tensor:
        h = net.layer(net.embed(ids) + net.at[: ids.shape[1]])
        return F.cross_entropy(F.linear(h, net.embed.weight)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    parts = {"embed": nn.Embedding(1000, 128), "at": nn.Parameter(rows(64, 128))}
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return Case(Net(forward, **parts, layer=layer), (torch.randint(1000, (8, 64)),))


@program
def mixture_of_experts() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        weight, chosen = net.gate(x).softmax(-1).topk(2, -1)
        dense = torch.zeros(ROWS, 4).scatter(1, chosen, weight)
        out = torch.stack([expert(x) for expert in net.experts], 1)
        return (out * dense[..., None]).sum(1)

    return Case(Net(forward, gate=nn.Linear(WIDTH, 4), experts=nn.ModuleList([block() for _ in range(4)])), (rows(),))


@program
def generation_with_a_cache() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        keys = values = None
        for _ in range(6):
            q, k, v = net.qkv(x[:, -1:]).chunk(3, -1)
            keys = k if keys is None else torch.cat([keys, k], 1)
            values = v if values is None else torch.cat([values, v], 1)
            x = torch.cat([x, F.scaled_dot_product_attention(q, keys, values)], 1)
        return x

    return Case(Net(forward, qkv=nn.Linear(128, 384)), (rows(32, 16, 128),), modes=INFER)


# --- complex numbers and transforms -----------------------------------------------------------------------------------


@program
def complex_layers() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        z = torch.complex(net.a(x), net.b(x))
        return (z @ net.w).abs()

    w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
    return Case(Net(forward, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH), w=w), (rows(),))


@program
def fourier_operator() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :8, :8] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :8, :8], net.w)
        return torch.fft.irfft2(out, s=x.shape[-2:]) + net.f(x)

    w = nn.Parameter(torch.randn(16, 16, 8, 8, dtype=torch.complex64))
    return Case(Net(forward, w=w, f=nn.Conv2d(16, 16, 1)), (rows(8, 16, 32, 32),))


@program
def spectrogram_loss() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        def spectrum(y: Tensor) -> Tensor:
            return torch.stft(y, 256, 64, window=torch.hann_window(256), return_complex=True).abs()

        made = net.f(x[:, None])[:, 0]
        return F.l1_loss(spectrum(made), spectrum(x)) + (spectrum(made) + 1e-5).log().mean()

    return Case(Net(forward, f=nn.Conv1d(1, 1, 9, padding=4)), (rows(8, 8192),))


@program
def inverse_spectrogram() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        window = torch.hann_window(256)
        z = torch.stft(x, 256, 64, window=window, return_complex=True)
        return torch.istft(z * net.f(z.abs().transpose(1, 2)).transpose(1, 2).sigmoid(), 256, 64, window=window)

    return Case(Net(forward, f=nn.Linear(129, 129)), (rows(8, 8192),))


@program
def convolution_by_fourier() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        n = 2 * x.shape[-1]
        return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(net.k, n), n)[..., : x.shape[-1]]

    return Case(Net(forward, k=nn.Parameter(rows(64, 512))), (rows(8, 64, 512),))


@program
def phase_and_magnitude() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        z = torch.fft.fft(net.f(x))
        return torch.polar(z.abs(), z.angle()).real.square().mean() + z.imag.mean()

    return Case(Net(forward, f=nn.Linear(WIDTH, WIDTH)), (rows(),))


@program
def mixing_by_fourier() -> Case:
    return Case(
        Net(lambda net, x: net.f(torch.fft.fft2(x, dim=(-2, -1)).real), f=nn.Linear(64, 64)), (rows(8, 64, 64),)
    )


# --- linear algebra and sums of products ------------------------------------------------------------------------------


@program
def tensor_train() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        return torch.einsum("bijk,iap,pjcq,qkd->bacd", x.view(ROWS, 8, 8, 4), net.a, net.b, net.c)

    parts = {"a": rows(8, 8, 6), "b": rows(6, 8, 8, 6), "c": rows(6, 4, 4)}
    return Case(Net(forward, **{name: nn.Parameter(part) for name, part in parts.items()}), (rows(),))


@program
def bilinear() -> Case:
    return Case(nn.Bilinear(64, 64, 32), (rows(256, 64), rows(256, 64)))


@program
def gaussian_process() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        k = torch.exp(-torch.cdist(net.f(x), net.f(x)).square()) + 0.1 * torch.eye(256)
        factor = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y[:, None], factor)
        return 0.5 * y @ alpha[:, 0] + factor.diagonal().log().sum()

    return Case(Net(forward, f=mlp(32, 64, 16)), (rows(256, 32), rows(256)), modes=TRAIN)


@program
def ridge_regression_head() -> Case:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        h = net.f(x)
        w = torch.linalg.solve(h.T @ h + torch.eye(WIDTH), h.T @ y)
        return F.mse_loss(h @ w, y)

    return Case(Net(forward, f=block()), (rows(), rows(ROWS, 8)))


@program
def spectral_clusters() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x)
        values, vectors = torch.linalg.eigh(h.T @ h / ROWS)
        return values[-4:].sum() + vectors[:, 0].square().sum()

    return Case(Net(forward, f=mlp(WIDTH, 128)), (rows(),))


@program
def low_rank_by_svd() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(net.f(x), full_matrices=False)
        return (u[:, :8] * s[:8]) @ v[:8]

    return Case(Net(forward, f=mlp(WIDTH, 128)), (rows(256, WIDTH),))


@program
def orthogonal_by_qr() -> Case:
    return Case(Net(lambda net, x: x @ torch.linalg.qr(net.w)[0], w=nn.Parameter(rows(WIDTH, WIDTH))), (rows(),))


@program
def rotation_by_matrix_exponential() -> Case:
    net = Net(lambda net, x: x @ torch.matrix_exp(net.w - net.w.T), w=nn.Parameter(rows(64, 64) / 100))
    return Case(net, (rows(2048, 64),))


@program
def pseudo_inverse() -> Case:
    return Case(Net(lambda net, x: torch.linalg.pinv(net.f(x)), f=mlp(64, 128, 32)), (rows(256, 64),))


@program
def log_determinant() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x).view(-1, 16, 16) + 20 * torch.eye(16)
        return torch.linalg.slogdet(h).logabsdet.mean() + torch.linalg.inv(h).diagonal(dim1=1, dim2=2).sum(1).mean()

    return Case(Net(forward, f=mlp(64, 128, 256)), (rows(256, 64),))


@program
def newton_schulz() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        w = net.w / net.w.norm()
        for _ in range(5):
            a = w @ w.T
            w = 3.4445 * w + (-4.775 * a + 2.0315 * a @ a) @ w
        return x @ w

    return Case(Net(forward, w=nn.Parameter(rows(WIDTH, WIDTH))), (rows(),))


@program
def pairwise_distances() -> Case:
    return Case(Net(lambda net, x: torch.cdist(net.f(x), net.f(x), p=1).mean(), f=mlp(64, 64, 32)), (rows(256, 64),))


# --- images -----------------------------------------------------------------------------------------------------------


@program
def residual_network() -> Case:
    def unit(a: int, b: int, stride: int) -> nn.Sequential:
        convolutions = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
        return nn.Sequential(*convolutions, nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b))

    def forward(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        x = F.relu(x + net.one(x), inplace=True)
        x = F.relu(net.short(x) + net.two(x), inplace=True)
        return net.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    parts = {"stem": nn.Conv2d(3, 32, 3, 2, 1), "one": unit(32, 32, 1), "two": unit(32, 64, 2)}
    return Case(Net(forward, **parts, short=nn.Conv2d(32, 64, 1, 2), head=nn.Linear(64, 10)), (rows(8, 3, 64, 64),))


@program
def u_net() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        a = F.silu(net.a(x))
        b = F.silu(net.b(F.max_pool2d(a, 2)))
        up = F.interpolate(net.up(b), scale_factor=2, mode="nearest")
        return net.out(torch.cat([a, up], 1))

    parts = {"a": nn.Conv2d(3, 16, 3, 1, 1), "b": nn.Conv2d(16, 32, 3, 1, 1), "up": nn.Conv2d(32, 16, 1)}
    return Case(Net(forward, **parts, out=nn.Conv2d(32, 3, 1)), (rows(8, 3, 64, 64),))


@program
def transposed_convolutions() -> Case:
    net = nn.Sequential(
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    return Case(net, (rows(16, 64, 8, 8),))


@program
def separable_convolutions() -> Case:
    net = nn.Sequential(
        nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.BatchNorm2d(32), nn.Hardswish(), nn.Conv2d(32, 64, 1), nn.SiLU()
    )
    return Case(net, (rows(8, 32, 32, 32),))


@program
def channels_last() -> Case:
    net = nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, 8, 3, 1, 1))
    images = rows(8, 8, 48, 48).to(memory_format=torch.channels_last)
    return Case(net.to(memory_format=torch.channels_last), (images,))  # type: ignore[call-overload]


@program
def dilated_audio() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        for layer in net.layers:
            a, b = layer(F.pad(x, (layer.dilation[0], 0))).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return x

    layers = nn.ModuleList([nn.Conv1d(32, 64, 2, dilation=2**n) for n in range(4)])
    return Case(Net(forward, layers=layers), (rows(8, 32, 512),))


@program
def video() -> Case:
    net = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.ReLU(), nn.AdaptiveAvgPool3d(4))
    return Case(net, (rows(2, 3, 8, 32, 32),))


@program
def patches_of_images() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        patches = F.unfold(x, 8, stride=8).transpose(1, 2)
        return F.fold(net.f(patches).transpose(1, 2), 64, 8, stride=8)

    return Case(Net(forward, f=nn.Linear(192, 192)), (rows(8, 3, 64, 64),))


@program
def overlapping_patches() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        return F.fold(F.unfold(net.f(x), 3, padding=1), 32, 3, padding=1)

    return Case(Net(forward, f=nn.Conv2d(8, 8, 1)), (rows(4, 8, 32, 32),))


@program
def masked_patches() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        order = torch.rand(8, 64).argsort(1)
        keep, back = order[:, :16], order.argsort(1)
        h = net.f(x.gather(1, keep[..., None].expand(-1, -1, WIDTH)))
        h = torch.cat([h, net.mask.expand(8, 48, -1)], 1)
        return F.mse_loss(net.g(h.gather(1, back[..., None].expand(-1, -1, WIDTH))), x)

    return Case(Net(forward, f=block(), g=block(), mask=nn.Parameter(rows(1, 1, WIDTH))), (rows(8, 64, WIDTH),))


@program
def sub_pixels() -> Case:
    net = nn.Sequential(nn.Conv2d(3, 48, 3, 1, 1), nn.PixelShuffle(4), nn.Conv2d(3, 12, 3, 1, 1), nn.PixelUnshuffle(2))
    return Case(net, (rows(8, 3, 24, 24),))


@program
def spatial_transformer() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        theta = net.f(x.flatten(1)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    return Case(Net(forward, f=nn.Linear(3072, 6)), (rows(16, 3, 32, 32),))


@program
def feature_pyramid() -> Case:
    def forward(net: Net, x: Tensor) -> Any:
        c3 = net.c3(x)
        c4 = net.c4(F.relu(c3))
        p4 = net.l4(c4)
        p3 = net.l3(c3) + F.interpolate(p4, size=c3.shape[-2:], mode="bilinear", align_corners=False)
        flat = [p.permute(0, 2, 3, 1).reshape(4, -1, 16) for p in (p3, p4)]
        return net.head(torch.cat(flat, 1)).split((4, 12), -1)

    parts = {"c3": nn.Conv2d(3, 16, 3, 2, 1), "c4": nn.Conv2d(16, 32, 3, 2, 1)}
    laterals = {"l3": nn.Conv2d(16, 16, 1), "l4": nn.Conv2d(32, 16, 1)}
    return Case(Net(forward, **parts, **laterals, head=nn.Linear(16, 16)), (rows(4, 3, 64, 64),))


@program
def boxes_matched() -> Case:
    def forward(net: Net, x: Tensor, wanted: Tensor) -> Tensor:
        boxes = net.f(x).sigmoid().cumsum(-1)
        low = torch.maximum(boxes[:, None, :2], wanted[None, :, :2])
        high = torch.minimum(boxes[:, None, 2:], wanted[None, :, 2:])
        both = (high - low).clamp(min=0).prod(-1)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)[:, None] + (wanted[:, 2:] - wanted[:, :2]).prod(-1) - both
        best, which = (both / area).max(1)
        return (F.smooth_l1_loss(boxes, wanted[which], reduction="none").sum(1) * (best > 0.3)).mean()

    return Case(Net(forward, f=nn.Linear(WIDTH, 4)), (rows(1024, WIDTH), torch.rand(32, 4).cumsum(1)))


@program
def best_proposals() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        score = net.score(x).squeeze(-1)
        top, which = score.topk(64, 1)
        picked = x.gather(1, which[..., None].expand(-1, -1, WIDTH))
        order = top.sigmoid().sort(1, descending=True).values
        return net.f(picked) * order[..., None]

    return Case(Net(forward, score=nn.Linear(WIDTH, 1), f=block()), (rows(4, 512, WIDTH),))


@program
def squeeze_and_excitation() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.c(x)
        return h * net.f(h.mean((2, 3))).sigmoid()[:, :, None, None]

    return Case(Net(forward, c=nn.Conv2d(8, 32, 3), f=mlp(32, 8, 32, act=nn.ReLU)), (rows(8, 8, 32, 32),))


@program
def texture_by_gram_matrices() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.c(x).flatten(2)
        return (h @ h.transpose(1, 2) / h.shape[2]).square().mean()

    return Case(Net(forward, c=nn.Conv2d(3, 32, 3)), (rows(8, 3, 48, 48),))


@program
def mixed_pooling() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = F.local_response_norm(net.c(x), 5)
        return F.max_pool2d(h, 3, 2) + F.avg_pool2d(h, 3, 2) + F.lp_pool2d(h.abs(), 2.0, 3, 2)

    return Case(Net(forward, c=nn.Conv2d(3, 16, 3)), (rows(8, 3, 41, 41),))


# --- generative models and solvers ------------------------------------------------------------------------------------


@program
def variational_autoencoder() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        mean, log = net.f(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        loss = F.binary_cross_entropy_with_logits(net.g(z), x.sigmoid(), reduction="sum")
        return loss - 0.5 * (1 + log - mean.square() - log.exp()).sum()

    return Case(Net(forward, f=mlp(WIDTH, 512, 128), g=mlp(64, 512, WIDTH)), (rows(),))


@program
def diffusion() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        t = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        level = torch.cos(t * math.pi / 2).square()
        return F.mse_loss(net.f(torch.cat([level.sqrt() * x + (1 - level).sqrt() * noise, t], 1)), noise)

    return Case(Net(forward, f=mlp(WIDTH + 1, 512, WIDTH, act=nn.SiLU)), (rows(),))


@program
def flow_matching() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        noise, t = torch.randn_like(x), torch.rand(len(x), 1)
        return F.mse_loss(net.f(torch.lerp(noise, x, t)), x - noise)

    return Case(Net(forward, f=block()), (rows(),))


@program
def coupling_flow() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        total = 0
        for layer in net.layers:
            a, b = x.chunk(2, 1)
            scale, shift = layer(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            total = total + scale.sum(1)
        return 0.5 * x.square().sum(1).mean() - total.mean()

    return _layers(forward, lambda: mlp(WIDTH // 2, 256, WIDTH))


@program
def invertible_convolution() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        z = F.conv2d((x + net.b) * net.s.exp(), net.w[:, :, None, None])
        return z.square().mean() - torch.slogdet(net.w)[1] - net.s.sum()

    w = nn.Parameter(torch.linalg.qr(rows(16, 16))[0])
    scales = {name: nn.Parameter(torch.zeros(1, 16, 1, 1)) for name in "bs"}
    return Case(Net(forward, w=w, **scales), (rows(8, 16, 32, 32),))


@program
def planar_flow() -> Case:
    def forward(net: Net, z: Tensor) -> Tensor:
        total = 0
        for w, u, b in zip(net.w, net.u, net.b, strict=True):
            h = torch.tanh(z @ w + b)
            total = total + (1 + (1 - h.square()) * (w @ u)).abs().log()
            z = z + u * h[:, None]
        return (0.5 * z.square().sum(1) - total).mean()

    parts = {"w": rows(4, WIDTH), "u": rows(4, WIDTH), "b": rows(4)}
    return Case(Net(forward, **{name: nn.Parameter(part / 50) for name, part in parts.items()}), (rows(),))


@program
def rational_spline() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        widths = F.softmax(net.f(x).view(ROWS, 32, 8), -1)
        edges = F.pad(widths.cumsum(-1), (1, 0))
        at = x[:, :32].sigmoid()[..., None]
        bin_ = torch.searchsorted(edges.detach(), at).clamp(1, 8) - 1
        return (at - edges.gather(-1, bin_)) / widths.gather(-1, bin_)

    return Case(Net(forward, f=mlp(WIDTH, 256)), (rows(),))


@program
def differential_equation() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = 0.1
        for _ in range(3):
            a = net.f(x)
            b = net.f(x + h / 2 * a)
            c = net.f(x + h / 2 * b)
            d = net.f(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x

    return Case(Net(forward, f=mlp(WIDTH, 128, WIDTH, act=nn.Tanh)), (rows(),))


@program
def radiance_field() -> Case:
    def forward(net: Net, rays: Tensor) -> Tensor:
        at = rays[:, None] * torch.linspace(1, 4, 32)[None, :, None]
        code = torch.cat([f(at * 2.0**n) for n in range(4) for f in (torch.sin, torch.cos)], -1)
        rgb, density = net.f(code).split((3, 1), -1)
        alpha = 1 - torch.exp(-F.relu(density.squeeze(-1)) * 0.1)
        through = torch.cumprod(F.pad(1 - alpha + 1e-10, (1, 0), value=1.0), -1)[:, :-1]
        return ((alpha * through)[..., None] * rgb.sigmoid()).sum(1)

    return Case(Net(forward, f=mlp(24, 128, 128, 4, act=nn.ReLU)), (rows(128, 3),))


@program
def discrete_by_gumbel() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.g(F.gumbel_softmax(net.f(x), tau=0.5, hard=True))

    return Case(Net(forward, f=block(), g=block()), (rows(),))


@program
def langevin_samples() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        made = torch.randn_like(x)
        for _ in range(3):
            with torch.enable_grad():
                made = made.detach().requires_grad_(True)
                made = made - 0.1 * torch.autograd.grad(net.f(made).sum(), made)[0] + 0.01 * torch.randn_like(made)
        return net.f(x).mean() - net.f(made.detach()).mean()

    return Case(Net(forward, f=mlp(WIDTH, 256, 1, act=nn.SiLU)), (rows(),))


@program
def hyper_network() -> Case:
    def forward(net: Net, x: Tensor, code: Tensor) -> Tensor:
        w = net.h(code).view(64, 64)
        return F.relu(x @ w)

    return Case(Net(forward, h=mlp(16, 64, 4096)), (rows(1024, 64), rows(16)))


@program
def capsules() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,ijde->bije", x, net.w)
        logits = x.new_zeros(*votes.shape[:3])
        for _ in range(3):
            out = (logits.softmax(2)[..., None] * votes).sum(1)
            norm = out.square().sum(-1, keepdim=True)
            out = norm / (1 + norm) * out / (norm + 1e-8).sqrt()
            logits = logits + (votes * out[:, None]).sum(-1)
        return out

    return Case(Net(forward, w=nn.Parameter(rows(32, 10, 8, 16))), (rows(64, 32, 8),))


# --- precision, parametrizations and optimizers -----------------------------------------------------------------------


@program
def autocast_layers() -> Case:
    return Case(nn.Sequential(block(), nn.LayerNorm(WIDTH), block()), (rows(),), precision="bf16")


@program
def autocast_convolutions() -> Case:
    net = nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3))
    return Case(net, (rows(8, 8, 32, 32),), precision="bf16")


@program
def autocast_off_within() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.f(x)
        with torch.autocast("cpu", enabled=False):
            return net.g(h.float()).softmax(1)

    return Case(Net(forward, f=block(), g=block()), (rows(),), precision="bf16")


@program
def model_in_bfloat16() -> Case:
    return Case(nn.Sequential(block(), nn.LayerNorm(WIDTH), block()).bfloat16(), (rows().bfloat16(),))


@program
def double_precision() -> Case:
    return Case(block().double(), (rows().double(),))


@program
def spectral_norm() -> Case:
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, 4))
    return Case(net, (rows(),))


@program
def weight_norm() -> Case:
    return Case(nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()), (rows(),))


@program
def orthogonal_weights() -> Case:
    return Case(nn.Sequential(parametrizations.orthogonal(nn.Linear(64, 64)), nn.Tanh()), (rows(2048, 64),))


@program
def fake_quantization() -> Case:
    def forward(net: Net, x: Tensor) -> Tensor:
        w = torch.fake_quantize_per_channel_affine(
            net.f.weight, torch.full((WIDTH,), 0.1), torch.zeros(WIDTH, dtype=torch.int32), 0, -128, 127
        )
        return torch.fake_quantize_per_tensor_affine(F.linear(x, w), 0.1, 0, -128, 127)

    return Case(Net(forward, f=nn.Linear(WIDTH, WIDTH)), (rows(),))


def _optimizer(optimizer: Any) -> Case:
    return Case(nn.Sequential(block(), block()), (rows(64, WIDTH),), optimizer=optimizer, modes=TRAIN)


@program
def with_adafactor() -> Case:
    return _optimizer("adafactor")


@program
def with_nesterov() -> Case:
    return _optimizer(lambda w: torch.optim.SGD(list(w), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01))


@program
def with_amsgrad() -> Case:
    return _optimizer(lambda w: torch.optim.Adam(list(w), amsgrad=True))


@program
def with_fused_adam() -> Case:
    return _optimizer("adamw:fused")


@program
def with_rmsprop() -> Case:
    return _optimizer(lambda w: torch.optim.RMSprop(list(w), centered=True, momentum=0.9))


@program
def with_groups_of_parameters() -> Case:
    def make(weights: Any) -> torch.optim.Optimizer:
        weights = list(weights)
        plain = [w for w in weights if w.ndim < 2]
        rest = [w for w in weights if w.ndim > 1]
        return torch.optim.AdamW([{"params": rest}, {"params": plain, "weight_decay": 0.0}])

    return _optimizer(make)


@program
def with_muon() -> Case:
    return Case(
        nn.Linear(WIDTH, WIDTH, bias=False), (rows(),), optimizer=lambda w: torch.optim.Muon(list(w)), modes=TRAIN
    )
