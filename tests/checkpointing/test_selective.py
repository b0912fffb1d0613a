"""Regions that keep results of their products: nothing of the step changes but what is run again and what is held."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxmem
from fxmem import analyze
from fxmem.checkpointing import apply, recompute
from fxmem.checkpointing.recompute import Recomputation
from fxmem.hardware.op_classes import is_product
from fxmem.records.plan import Region
from fxmem.records.units import Application
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu

WIDTH, ROWS = 64, 256


class Block(nn.Module):
    """Four products, and much that is cheap between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(torch.sin(self.mix(self.norm1(x)))))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Products(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_product(str(func))
        return func(*args, **(kwargs or {}))


def stepped(model: nn.Module, *, backwards: int = 1) -> tuple[list[Tensor], int]:
    """What steps leave behind, and how many products ran."""
    torch.manual_seed(5)
    with Products() as products:
        loss = model(X).square().sum()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, torch.get_rng_state()], products.count


def regions(keeps: tuple[int, ...], application: Application) -> list[Region]:
    """Every block, as modules; in a graph, of its nodes."""
    if application is Application.MODULES:
        return [Region(first_node=0, last_node=1, modules=(f"blocks.{block}",), keeps=keeps) for block in range(3)]
    nodes = ("norm1", "mix", "sin", "out", "drop", "add", "norm2", "up", "gelu", "down", "drop_1", "add_1")
    return [
        Region(first_node=0, last_node=1, nodes=tuple(node_of(block, name) for name in nodes), keeps=keeps)
        for block in range(3)
    ]


def node_of(block: int, name: str) -> str:
    """How symbolic_trace names it."""
    if name.startswith("add"):
        number = 2 * block + (name == "add_1")
        return f"add_{number}" if number else "add"
    if name in ("sin", "gelu"):
        return f"{name}_{block}" if block else name
    return f"blocks_{block}_{name}"


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
@pytest.mark.parametrize("keeps", [(0, 1, 2, 3), (1, 2), (3,), (0, 7)], ids=str)
def test_gradients_are_the_same_and_what_is_kept_does_not_run_again(
    model: nn.Module, keeps: tuple[int, ...], application: Application
) -> None:
    plain, (_, whole) = (
        stepped(copy.deepcopy(model))[0],
        stepped(apply(copy.deepcopy(model), regions((), application), application)),
    )
    found, ran = stepped(apply(copy.deepcopy(model), regions(keeps, application), application))
    assert all(map(torch.equal, plain, found))
    assert len(plain) == len(found)
    assert whole - ran == 3 * len([number for number in keeps if number < 4])


def test_a_second_backward_runs_what_the_first_took(model: nn.Module) -> None:
    plain, _ = stepped(copy.deepcopy(model), backwards=2)
    found, _ = stepped(
        apply(copy.deepcopy(model), regions((0, 1, 2), Application.MODULES), Application.MODULES), backwards=2
    )
    assert all(map(torch.equal, plain, found))


@pytest.fixture
def dropouts_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU no product draws, as attention with dropout does on a card."""
    monkeypatch.setattr(recompute, "is_product", lambda name: name == "aten.native_dropout.default")


def _two_dropouts(x: Tensor, weight: Tensor) -> Tensor:
    once = torch.native_dropout(x @ weight, 0.5, True)[0]
    return (torch.native_dropout(once.sin(), 0.5, True)[0] @ weight).sum()


def _gradient(run: Any) -> Tensor:
    weight = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    torch.manual_seed(0)
    run(_two_dropouts, X[:8, :8], weight).backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.usefixtures("dropouts_are_products")
def test_what_draws_after_a_kept_result_draws_the_same_again() -> None:
    plain = _gradient(lambda function, *args: function(*args))
    assert torch.equal(
        plain,
        _gradient(lambda function, *args: Recomputation("region", random=True, keeps=(0,))(list, function, args, {})),
    )

    def first_only() -> Any:
        seen = [0, 0]

        def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> bool:
            seen[ctx.is_recompute] += op is torch.ops.aten.native_dropout.default
            return op is torch.ops.aten.native_dropout.default and seen[ctx.is_recompute] == 1

        return create_selective_checkpoint_contexts(policy)

    # The care is needed: torch's own leaves the generator where it was before the kept result.
    assert not torch.equal(
        plain,
        _gradient(lambda function, *args: checkpoint(function, *args, use_reentrant=False, context_fn=first_only)),
    )


class Overwrites(nn.Module):
    """Writes to a product's result once somebody has kept it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(3)
        return self.last(torch.sin(y)).sin()


def test_a_result_that_was_written_to_is_computed_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Overwrites(), nn.Linear(WIDTH, 1))
    plain, _ = stepped(copy.deepcopy(model))
    region = Region(first_node=0, last_node=1, modules=("0",), keeps=(0, 1))
    found, ran = stepped(apply(copy.deepcopy(model), [region], Application.MODULES))
    assert all(map(torch.equal, plain, found))
    whole = stepped(apply(copy.deepcopy(model), [region.model_copy(update={"keeps": ()})], Application.MODULES))[1]
    assert whole - ran == 1
    # A planner does not count on it, either.
    profile = analyze(model, X, target="cpu", optimizer=None).profile
    from fxmem.planning import Planner

    known = Planner(profile, Application.MODULES).tables.selection.products
    assert [profile.nodes[product.node].module for product in known] == ["0.last", "1"]


@pytest.mark.truth
def test_a_plan_of_blocks_keeps_products_and_what_is_promised_is_what_a_run_takes() -> None:
    model = Stack(6)
    analysis = analyze(model, X.repeat(8, 1), target="cpu", optimizer=None)
    plan = fxmem.plan(analysis, budget=0.6, application="modules")
    assert any(region.keeps for region in plan.regions)
    assert plan.extra_fraction is not None
    assert plan.extra_fraction < 0.2  # two thirds of a block's FLOPs are its products
    planned = fxmem.checkpoint(copy.deepcopy(model), plan)
    assert (
        analyze(planned, X.repeat(8, 1), target="cpu", optimizer=None).peak.requested_bytes
        == plan.after.requested_bytes
    )
    measured = measure_cpu(planned, StepRequest(args=(X.repeat(8, 1),), optimizer=None))
    states = 5056 * (1 + len(plan.regions))
    assert (
        plan.after.requested_bytes
        <= measured.peak_without_scratch_bytes
        <= plan.after.requested_bytes * 1.0001 + states
    )


@pytest.mark.truth
def test_flops_of_a_plan_are_those_of_its_analysis() -> None:
    analysis = analyze(Stack(6), X, target="cpu", optimizer=None)
    for budget in (0.8, 0.65, 0.5):
        plan = fxmem.plan(analysis, budget=budget, application="modules")
        assert plan.extra_flops == sum(region.extra_flops or 0 for region in plan.regions)


def test_the_code_of_a_plan_does_what_the_plan_does(model: nn.Module) -> None:
    plan = fxmem.plan(
        analyze(Named(), X.repeat(8, 1), target="cpu", optimizer=None),
        budget=0.8,
        edits_only=True,
    )
    code = plan.to_code()
    assert "\nimport fxmem\n" in code
    region = next(region for region in plan.regions if region.keeps)
    numbers = ", ".join(map(str, region.keeps))
    assert f"checkpoint(self.{region.modules[0]}, x, use_reentrant=False, context_fn=fxmem.keep({numbers}))" in code
    block = copy.deepcopy(model.blocks[0])
    plain, _ = stepped(block)
    block.zero_grad()
    found, _ = stepped(
        Through(functools.partial(checkpoint, block, use_reentrant=False, context_fn=fxmem.keep(*region.keeps)), block)
    )
    assert all(map(torch.equal, plain, found))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x)
        x = self.third(x)
        return x.sin()


class Through(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any, block: nn.Module) -> None:
        super().__init__()
        self.function, self.block = function, block

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(x)
        return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.addmm.default", True),
        ("aten.convolution.default", True),
        ("aten.convolution_backward.default", False),
        ("aten._scaled_dot_product_flash_attention.default", True),
        ("aten._scaled_dot_product_flash_attention_backward.default", False),
        ("aten.mul.Tensor", False),
        ("mylib.mm.default", False),
    ],
)
def test_what_a_product_is(name: str, expected: bool) -> None:
    assert is_product(name) is expected
