"""What recomputation could get wrong, each case with its care and, where the care can be switched off, without it."""

import contextlib
import copy
import dataclasses
import pickle
import random
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from fxmem import analyze
from fxmem.checkpointing import apply, fx_rewrite, graph_names, recompute, uncheckpoint
from fxmem.checkpointing import checkpoint as carry_out
from fxmem.errors import UsageError
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Peak, Phase, Step, Target
from fxmem.records.units import Application

MODULES, GRAPH = Application.MODULES, Application.GRAPH


def region(*names, of=MODULES, inside=(), **fields):
    return Region(
        first_node=0, last_node=1, regions=inside, **{"modules" if of is MODULES else "nodes": names}, **fields
    )


def trained(model, *args, steps=2, loss=None, **kwargs):
    """Everything that steps leave behind, gradients accumulated."""
    torch.manual_seed(7)
    found = {}
    for index in range(steps):
        out = model(*args, **kwargs)
        (out.square().sum() if loss is None else loss(out)).backward()
        found[f"output {index}"] = out.detach() if isinstance(out, torch.Tensor) else None
    found |= {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }
    return (
        found | {name: buffer.clone() for name, buffer in model.named_buffers()} | {"generator": torch.get_rng_state()}
    )


def same(one, other):
    assert list(one) == list(other)
    return all(
        torch.equal(one[name], other[name])
        if isinstance(one[name], torch.Tensor) and isinstance(other[name], torch.Tensor)
        else one[name] is other[name]
        for name in one
    )


def compare(model, regions, *args, application=MODULES, **kwargs):
    """Whether a checkpointed copy of a model leaves behind what the model does."""
    plain, checkpointed = copy.deepcopy(model), copy.deepcopy(model)
    apply(checkpointed, regions, application)
    return same(trained(plain, *args, **kwargs), trained(checkpointed, *args, **kwargs))


def blocks(*layers):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *layers),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 2),
    )


IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))

# --- statistics, random numbers, modes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(4),
        lambda: nn.BatchNorm2d(4, momentum=None),
        lambda: nn.SyncBatchNorm(4),
        lambda: BatchNormAct2d(4),
        lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    ],
    ids=["batch", "cumulative", "sync", "timm", "instance"],
)
@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_running_statistics_are_updated_once(norm, application, monkeypatch):
    model = blocks(norm(), nn.Tanh(), nn.Conv2d(4, 4, 1))
    regions = [region("1") if application is MODULES else region("_1_0", "_1_1", "_1_2", "_1_3", of=GRAPH)]
    assert compare(model, regions, IMAGES, application=application)
    monkeypatch.setattr(recompute, "keep_statistics", lambda _: contextlib.nullcontext())
    assert not compare(model, regions, IMAGES, application=application)


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_dropout_draws_the_same_numbers_again(application):
    model = blocks(nn.Dropout(0.5), nn.Conv2d(4, 4, 1))
    names = ("1",) if application is MODULES else ("_1_0", "_1_1", "_1_2")
    assert compare(model, [region(*names, of=application)], IMAGES, application=application)
    with pytest.raises(
        UsageError,
        match=r"region .* must not be recomputed: it draws random numbers, and their generator's state is not kept",
    ):
        compare(model, [region(*names, of=application, random=False)], IMAGES, application=application)


def test_the_random_state_is_kept_only_where_the_plan_says_so(monkeypatch):
    asked = []
    real = recompute.checkpoint
    monkeypatch.setattr(
        recompute,
        "checkpoint",
        lambda *args, **options: asked.append(options["preserve_rng_state"]) or real(*args, **options),
    )
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert compare(model, [region("0"), region("1", random=False)], torch.randn(2, 4), steps=1)
    assert asked == [True, False]


class Seen(nn.Module):
    """Counts its runs."""

    runs = 0

    def forward(self, x):
        Seen.runs += 1
        return x.tanh().sin()


@pytest.mark.parametrize(
    ("application", "names"),
    [(MODULES, ("1",)), (MODULES, ("0", "1")), (GRAPH, ("tanh", "sin"))],
    ids=["module", "slice", "graph"],
)
def test_nothing_is_added_in_eval_or_without_gradients(application, names, monkeypatch):
    model = apply(nn.Sequential(nn.Linear(4, 4), Seen()), [region(*names, of=application)], application)
    x = torch.randn(2, 4)
    with monkeypatch.context() as patch:
        patch.setattr(recompute.Recomputation, "__call__", None)
        model.eval()(x)
        with torch.no_grad():
            model.train()(x)
        with pytest.raises(TypeError):
            model(x)
    before = Seen.runs
    model(x).sum().backward()
    assert Seen.runs - before == (0 if application is GRAPH else 2)  # a graph runs the calls, not the module


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_a_mode_changed_between_forward_and_backward_is_as_it_was(application, monkeypatch):
    model = blocks(nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1))
    regions = [region("1") if application is MODULES else region("_1_0", "_1_1", "_1_2", "_1_3", of=GRAPH)]

    def loss(model):
        def then_eval(out):
            model.eval()
            return out.square().sum()

        return then_eval

    def run():
        plain, checkpointed = copy.deepcopy(model), apply(copy.deepcopy(model), regions, application)
        return same(
            trained(plain, IMAGES, steps=1, loss=loss(plain)),
            trained(checkpointed, IMAGES, steps=1, loss=loss(checkpointed)),
        )

    assert run()
    monkeypatch.setattr(recompute, "_contexts", lambda *_: (contextlib.nullcontext(), contextlib.nullcontext()))
    with pytest.raises(CheckpointError):
        run()


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_modes_toggled_afterwards(application):
    model = blocks(nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1))
    regions = [region("1") if application is MODULES else region("_1_0", "_1_1", "_1_2", "_1_3", of=GRAPH)]
    plain, checkpointed = copy.deepcopy(model), apply(copy.deepcopy(model).eval(), regions, application)
    for training in (False, True, False, True):
        assert same(trained(plain.train(training), IMAGES), trained(checkpointed.train(training), IMAGES))


# --- in place ---------------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        y = self.norm(self.conv2(x))
        y += x
        return F.hardswish(self.relu(y).add(1), inplace=True)


@pytest.mark.parametrize(
    "names",
    [
        ("conv1", "relu"),
        ("relu", "conv2", "norm"),
        ("conv2", "norm"),
        ("iadd", "relu_1"),
        ("relu_1", "add"),
        ("relu_1", "add", "hardswish"),
        ("hardswish",),
    ],
    ids=" ".join,
)
def test_a_region_may_begin_and_end_at_a_write_in_place(names):
    assert compare(InPlace(), [region(*names, of=GRAPH)], IMAGES, application=GRAPH)


def test_without_care_a_write_to_a_regions_input_is_refused(monkeypatch):
    monkeypatch.setattr(fx_rewrite._Cutter, "_out_of_place", lambda *_: None)
    with pytest.raises(
        UsageError,
        match=r"region relu to conv2 must not be recomputed: aten\.relu_\.default writes in place to its input 0",
    ):
        compare(InPlace(), [region("relu", "conv2", of=GRAPH)], IMAGES, application=GRAPH)


class Aliased(nn.Module):
    """Reads through another name what a write in place has changed."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.linear(x)
        seen = x.view(-1)
        return self.relu(x).sin() + seen.view(2, 4)


def test_a_write_that_somebody_else_sees_stays_one():
    with pytest.raises(UsageError, match="writes in place to its input 0"):
        compare(Aliased(), [region("relu", "sin", of=GRAPH)], torch.randn(2, 4), application=GRAPH)
    assert compare(Aliased(), [region("linear", "view", "relu", "sin", of=GRAPH)], torch.randn(2, 4), application=GRAPH)


# --- what goes in and comes out ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0, others=(), by_name=None):
        x = self.linear(x).tanh() * scale
        for other in others:
            x = x + other.sin()
        if by_name is not None:
            x = x * by_name["w"].exp()
        return {"x": x, "pair": Pair(x.cos(), None), "several": [x.exp(), None, 3], "unused": x.sin()}


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Linear(4, 4), Block()

    def forward(self, x):
        x = self.stem(x)
        others = [x]
        named = {"w": x.cos()}
        out = self.block(x, scale=2.0, others=others, by_name=named)
        others.append(out["x"])
        named["w"] = None
        again = self.block(others[-1], others=others)
        return out["pair"].first.exp() + out["several"][0] + again["x"]


def test_containers_keyword_arguments_and_all_kinds_of_results():
    x = torch.randn(2, 4)
    assert compare(Caller(), [region("block")], x)
    naive = Caller()
    naive.block.forward = lambda *args, **kwargs: checkpoint(
        Block.forward, naive.block, *args, use_reentrant=False, **kwargs
    )
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'exp'"):
        trained(naive, x)  # torch's own holds the very dict that the caller changes later


def test_a_tensor_among_keyword_arguments_does_not_outlive_a_region_around_it():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x, by_name={"w": x.sin()})["x"].exp()

    x = torch.randn(64, 4)
    outer = [region("0"), region("1")]
    saved = [
        analyze(apply(nn.Sequential(Outer(), Outer()), regions, MODULES), x, target="cpu").profile.saved_bytes
        for regions in (outer, [*outer, region("0.block"), region("1.block")])
    ]
    assert saved == [64 * 4 * 4] * 2  # what the second is given; the first is given the step's own input


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_frozen_parameters_inputs_without_gradient_and_tied_weights(application):
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
    )
    model[0].requires_grad_(False)
    model[2].weight = model[1][0].weight
    regions = (
        [region("0"), region("1")]
        if application is MODULES
        else [region("_0_0", "_0_1", of=GRAPH), region("_1_0", "_1_1", of=GRAPH)]
    )
    assert compare(model, regions, torch.randn(2, 4), application=application)
    assert compare(model, regions, torch.randn(2, 4, requires_grad=True), application=application)
    checkpointed = apply(model, regions, application)
    assert checkpointed[2].weight is checkpointed[1][0].weight


class Shaped(nn.Module):
    """Its sizes come from its input's, within and across regions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.position = nn.Parameter(torch.randn(1, 8))
        self.register_buffer("order", torch.arange(7, -1, -1))

    def forward(self, x, mask=None):
        batch, width = x.shape
        x = self.linear(x)[:, self.order]
        left, right = x.view(batch, 2, width).unbind(1)
        y = torch.cat([left * right.sin(), right], 1).view(batch, width * 2) + self.position
        half = y.size(1) // 2
        return y[:, :half].exp() * y[:, half:] + (2.0 + torch.full((batch, 1), 2.0)).tanh() + self.position.sum()


NODES = ["linear", "getitem_2", "view", "unbind", "sin", "mul", "cat", "view_1", "add", "exp", "mul_2", "tanh", "add_1"]


@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 6), (3, 9), (4, 5), (8, 13), (0, 13)])
def test_numbers_tuples_parameters_and_buffers_cross_borders(first, last):
    model = Shaped()
    inside = (region(*NODES[(first + last) // 2 : last], of=GRAPH),)
    checkpointed = apply(copy.deepcopy(model), [region(*NODES[first:last], of=GRAPH, inside=inside)], GRAPH)
    for batch in (2, 5):
        x = torch.randn(batch, 4)
        assert same(trained(model, x), trained(checkpointed, x))
    assert list(checkpointed.state_dict()) == list(model.state_dict())


def test_a_region_is_recomputed_up_to_the_last_tensor_that_backward_reads():
    """Of two linear layers the second one's result is read by nobody: its product does not run again."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 1))
    apply(model, [region("0")], MODULES)

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    trained(model, torch.randn(2, 4), steps=1)  # the first step also audits the region
    with Products() as products:
        trained(model, torch.randn(2, 4), steps=1)
    assert products.count == 3 + 1


def test_a_shared_module_and_one_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
            self.other = nn.Sequential(self.one, nn.Linear(4, 4))

        def forward(self, x):
            return self.other(self.one(self.one(x)))

    assert compare(
        Twice(), [region("one"), region("one"), region("other", inside=(region("other.0"),))], torch.randn(2, 4)
    )


@pytest.mark.parametrize(
    ("dtype", "application"), [(torch.bfloat16, MODULES), (torch.bfloat16, GRAPH), (torch.float16, MODULES)]
)
def test_recomputed_under_the_same_autocast(dtype, application):
    model = blocks(nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 1))
    checkpointed = apply(
        copy.deepcopy(model),
        [region("1") if application is MODULES else region("_1_0", "_1_1", "_1_2", "_1_3", of=GRAPH)],
        application,
    )
    found = []
    for one in (model, checkpointed):
        with torch.autocast("cpu", dtype):
            loss = one(IMAGES).float().square().sum()
        loss.backward()
        found.append({name: parameter.grad for name, parameter in one.named_parameters()})
    assert same(*found)


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_double_backward_and_a_graph_that_is_retained(application):
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)), nn.Linear(4, 1)
    )
    names = ("0",) if application is MODULES else ("_0_0", "_0_1", "_0_2", "_0_3")

    def twice(out):
        loss = out.square().sum()
        loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, model_now[1].weight, create_graph=True)
        return loss + gradient.square().sum()

    plain, checkpointed = (
        copy.deepcopy(model),
        apply(copy.deepcopy(model), [region(*names, of=application)], application),
    )
    found = []
    for model_now in (plain, checkpointed):
        found.append(trained(model_now, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), loss=twice))
    assert same(*found)


# --- the model stays the user's ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_the_model_is_the_same_object_of_the_same_class(application):
    model = blocks(nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 1))
    shown, keys, parameters = repr(model), list(model.state_dict()), list(model.parameters())
    types = [type(module) for module in model.modules()]
    calls = []
    for module in (model, model[1]):
        module.register_forward_pre_hook(lambda module, args: calls.append("before"))
        module.register_forward_hook(lambda module, args, out: calls.append("after"))
        module.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward"))
    if application is GRAPH:
        with pytest.raises(UsageError, match="module '1' has hooks"):
            apply(model, [region("_1_0", "_1_1", of=GRAPH)], GRAPH)
        model[1]._forward_hooks.clear()
        model[1]._forward_pre_hooks.clear()
        model[1]._backward_hooks.clear()
    names = ("1",) if application is MODULES else ("_1_0", "_1_1", "_1_2", "_1_3")
    assert apply(model, [region(*names, of=application)], application) is model
    assert repr(model) == shown
    assert list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), types, strict=True))
    model(IMAGES.clone().requires_grad_()).sum().backward()
    assert (
        calls
        == {
            MODULES: ["before", "before", "after", "after", "backward", "backward"],
            GRAPH: ["before", "after", "backward"],
        }[application]
    )
    with pytest.raises(UsageError, match=r"expected a model without checkpoints, but .* has been checkpointed before"):
        apply(model, [region("1")], MODULES)
    assert uncheckpoint(model) is model
    assert [type(module) for module in model.modules()] == types
    assert not [name for module in model.modules() for name in vars(module) if "fxmem" in name]
    assert uncheckpoint(model) is model


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_checkpoints_its_own_parameters(application, through):
    model = blocks(nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1))
    plain = copy.deepcopy(model)
    names = ("1",) if application is MODULES else ("_1_0", "_1_1", "_1_2", "_1_3")
    copied = through(apply(model, [region(*names, of=application)], application))
    assert type(copied[1]) is type(model[1])
    assert same(trained(plain, IMAGES), trained(copied, IMAGES))
    assert all(parameter.grad is None for parameter in model.parameters())
    saved = [analyze(one, IMAGES, target="cpu").profile.saved_bytes for one in (plain, model, copied)]
    assert saved[2] == saved[1] < saved[0]
    assert type(uncheckpoint(copied)[1]) is nn.Sequential


@pytest.mark.truth
def test_a_saved_model_is_loaded_in_another_process(tmp_path):
    for application, names in ((MODULES, ("1",)), (GRAPH, ("_1_0", "_1_1"))):
        model = apply(blocks(nn.Tanh(), nn.Conv2d(4, 4, 1)), [region(*names, of=application)], application)
        torch.save((model, IMAGES), tmp_path / application)
        torch.save(trained(copy.deepcopy(model), IMAGES), tmp_path / f"{application}_expected")
    program = f"""
import torch
from torch.utils import checkpoint
name = "_checkpoint_without_reentrant_generator"
name = name + "_impl" if hasattr(checkpoint, name + "_impl") else name  # its name since torch 2.15
real, calls = getattr(checkpoint, name), []
setattr(checkpoint, name, lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
for application in ("modules", "graph"):
    path = {str(tmp_path)!r} + "/" + application
    model, images = torch.load(path, weights_only=False)
    expected = torch.load(path + "_expected")
    for _ in range(2):
        model(images).square().sum().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    print(type(model).__name__, type(model[1]).__name__, len(calls))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.split("\n"), done.stderr) == (["Sequential Sequential 2", "Sequential Sequential 4", ""], "")


def test_a_class_that_copies_itself_keeps_its_checkpoints():
    traced = torch.fx.symbolic_trace(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    )
    plain = copy.deepcopy(traced)
    copied = copy.deepcopy(apply(traced, [region("_0", "_1", "_2", "_3", of=GRAPH)], GRAPH))
    x = torch.randn(2, 4)
    assert analyze(copied, x, target="cpu").profile.saved_bytes < analyze(plain, x, target="cpu").profile.saved_bytes
    assert same(trained(plain, x), trained(copied, x))


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_wrapped_for_distributed_training_afterwards(application, tmp_path):
    model = blocks(nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1))
    names = ("1",) if application is MODULES else ("_1_0", "_1_1", "_1_2", "_1_3")
    plain, checkpointed = (
        copy.deepcopy(model),
        apply(copy.deepcopy(model), [region(*names, of=application)], application),
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert same(*(trained(nn.parallel.DistributedDataParallel(one), IMAGES) for one in (plain, checkpointed)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_on_meta_and_without_touching_the_model_that_is_analysed(application):
    with torch.device("meta"):
        model = blocks(nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 1))
    names = ("1",) if application is MODULES else ("_1_0", "_1_1", "_1_2", "_1_3")
    before = analyze(model, IMAGES, target="cpu", optimizer=None)
    after = analyze(apply(model, [region(*names, of=application)], application), IMAGES, target="cpu", optimizer=None)
    assert after.profile.saved_bytes < before.profile.saved_bytes
    assert after.profile.recomputed
    assert model[1][0].weight.is_meta


def test_a_slice_of_a_sequential_and_slices_within():
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2))]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers))
    names = [f"1.{i}" for i in range(16)]
    outer = region(*names[0:8], inside=(region(*names[0:4]), region(*names[4:8], inside=(region(*names[5:8]),))))
    x = torch.randn(6, 4)
    assert compare(model, [outer, region(*names[8:15])], x)
    assert compare(model, [region("1", inside=(outer,))], x)
    saved = [
        analyze(apply(copy.deepcopy(model), regions, MODULES), x, target="cpu").profile.saved_bytes
        for regions in ([], [outer], [region("1")])
    ]
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.truth
@pytest.mark.parametrize("application", [Application.MODULES, Application.GRAPH])
def test_under_the_compiler(application):
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 1)
    )
    names = ("0",) if application is MODULES else ("_0_0", "_0_1", "_0_2", "_0_3")
    plain, checkpointed = (
        copy.deepcopy(model),
        apply(copy.deepcopy(model), [region(*names, of=application)], application),
    )
    x = torch.randn(3, 4)
    torch.compile(checkpointed, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    plain(x).square().sum().backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(plain.buffers(), checkpointed.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_public_function_takes_a_plan():
    peak = Peak(requested_bytes=1, phase=Phase.FORWARD, tick=0, by_kind={})
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    settings = {
        "strategy": "flat",
        "chosen": "flat",
        "budget_bytes": None,
        "before": peak,
        "after": peak,
        "analysed": True,
    }
    about = {
        "fxmem_version": "0",
        "torch_version": "0",
        "model": "Sequential",
        "inputs": (),
        "forward_flops": 1,
        "extra_flops": 1,
    }
    machine = {
        "target": Target(name="cpu", device="cpu"),
        "step": Step(mode="train", optimizer=None, loss=None, precision=None),
    }
    plan = Plan(**about, **machine, **settings, application=MODULES, regions=(region("0"),))
    assert carry_out(model, plan) is model
    assert type(model[0]) is not nn.Sequential
    assert carry_out(uncheckpoint(model), plan.model_copy(update={"regions": ()})) is model
    assert type(model[0]) is nn.Sequential


def test_what_is_put_on_a_module_that_the_graph_bypasses_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Tanh()))
    apply(model, [region("_1_0", of=GRAPH)], GRAPH)
    x = torch.randn(2, 4)
    model(x)
    hook = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="expected 1 without hooks and a forward of its own"):
        model(x)
    model.eval()(x)
    model.train()
    hook.remove()
    model[1].forward = torch.sin
    with pytest.raises(UsageError, match="expected 1 without hooks"):
        model(x)


@pytest.mark.parametrize("application", [MODULES, GRAPH])
def test_a_parameter_written_to_before_backward_is_noticed(application) -> None:
    """Autograd does not save a norm's bias, so that nothing else would."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 4))
    regions = [region("1") if application is MODULES else region("_1_0", "_1_1", of=GRAPH)]
    model = apply(model, regions, application)
    for _ in range(2):
        out = model(torch.randn(3, 4))
        with torch.no_grad():
            model[1][0].bias.add_(1.0)
        with pytest.raises(RuntimeError, match=r"parameter bias \(4,\) of BatchNorm1d has been written to"):
            out.sum().backward()
    model(torch.randn(3, 4)).sum().backward()


# --- what is refused --------------------------------------------------------------------------------------------------


class Refused(nn.Module):
    """A layer and something after it."""

    def __init__(self, then, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *args):
        return self.then(self, self.linear(x), *args).tanh()


def average(self, x):
    self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.mean


def replace(self, x):
    self.mean = self.mean * 0.9 + x.detach().mean(0)
    return x - self.mean


def count(self, x):
    self.count += 1
    return x


def collect(self, x):
    self.seen.append(x.detach())
    return x


def gather(self, x):
    dist.all_reduce(x)
    return x


def inner(self, x):
    return checkpoint(torch.sin, x, use_reentrant=False)


REFUSED = {
    "moving average": (average, {}, r"aten\.mul_\.Tensor writes in place to buffer mean of Refused"),
    "replaced buffer": (replace, {}, "it changes mean of Refused on each run"),
    "counter": (count, {"count": 0}, "it changes count of Refused on each run"),
    "growing list": (collect, {"seen": []}, "it changes seen of Refused on each run"),
    "collective": (gather, {}, "it communicates"),
    "shape from values": (
        lambda self, x: x[x > 0],
        {},
        r"the shape of what aten\.(index\.Tensor|nonzero\.default) returns depends on values",
    ),
    "checkpoint": (inner, {}, "it uses torch.utils.checkpoint itself"),
    "python's random": (lambda self, x: x * random.random(), {}, "it draws from Python's random"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_must_not_run_twice_is_refused(case, tmp_path):
    then, attributes, message = REFUSED[case]
    model = apply(nn.Sequential(nn.Linear(4, 4), Refused(then, **attributes)), [region("1")], MODULES)
    with contextlib.ExitStack() as stack:
        if case == "collective":
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        with pytest.raises(UsageError, match=rf"region 1 must not be recomputed: {message}"):
            model(torch.randn(3, 4))
    assert torch.is_grad_enabled()
    x = torch.randn(2, 4, requires_grad=True)
    x.sin().sum().backward()  # nothing of the refused run is left switched on
    assert x.grad is not None


def test_the_same_is_refused_in_an_analysis():
    model = apply(nn.Sequential(nn.Linear(4, 4), Refused(average)), [region("1")], MODULES)
    with pytest.raises(UsageError, match="writes in place to buffer mean"):
        analyze(model, torch.randn(3, 4), target="cpu")


def test_spectral_norm_is_refused_and_weight_norm_is_not():
    x = torch.randn(2, 4)
    weight_norm = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())
    )
    assert compare(weight_norm, [region("1")], x)
    spectral_norm = apply(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())),
        [region("1")],
        MODULES,
    )
    with pytest.raises(UsageError, match=r"writes in place to buffer _[uv] of"):
        spectral_norm(x)


class Cache:
    def __init__(self):
        self.layers = [[]]


def test_a_cache_among_the_arguments_is_refused():
    def cached(self, x, cache):
        cache.layers[0].append(x)
        return x

    model = apply(Refused(cached), [region("")], MODULES)
    with pytest.raises(
        UsageError,
        match=r"region the model must not be recomputed: it writes to its argument 1 \(Cache\); turn the cache off",
    ):
        model(torch.randn(3, 4), Cache())


def test_a_region_in_place_on_its_input_is_refused():
    model = apply(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))), [region("1")], MODULES
    )
    with pytest.raises(
        UsageError, match=r"region 1 must not be recomputed: aten\.relu_\.default writes in place to its input 0"
    ):
        model(torch.randn(3, 4))


def test_something_filled_in_once_is_no_side_effect():
    def fill(self, x):
        self.table = torch.ones(4) if self.table is None else self.table
        return x * self.table

    assert compare(nn.Sequential(nn.Linear(4, 4), Refused(fill, table=None)), [region("1")], torch.randn(2, 4))


@pytest.mark.parametrize(
    ("regions", "application", "message"),
    [
        ([region("1.7")], MODULES, r"for another model: Sequential has no module '1\.7'; closest: 1"),
        (
            [region("_1_9", of=GRAPH)],
            GRAPH,
            r"for another model: the graph of Sequential has no node '_1_9'; closest: _1_",
        ),
        ([region("_1_1", "_1_0", of=GRAPH)], GRAPH, "are not in the plan's order"),
        (
            [region("_1_0", "_1_1", of=GRAPH), region("_1_1", "_1_2", of=GRAPH)],
            GRAPH,
            "the regions from _1_0 and from _1_1 overlap",
        ),
        ([region("_1_0", of=GRAPH)], MODULES, "_1_0 is none; this is a plan for application 'graph'"),
        ([region("1.0", "1.2")], MODULES, "expected consecutive children of one nn.Sequential, but 1.0 to 1.2 are not"),
        ([region("1.0", "2")], MODULES, "expected consecutive children"),
        ([region("1.0", "1.1"), region("1.1", "1.2")], MODULES, "region 1.0 to 1.1 and region 1.1 to 1.2 overlap"),
    ],
)
def test_a_plan_for_another_model_is_refused_and_nothing_changed(regions, application, message):
    model = blocks(nn.BatchNorm2d(4), nn.Tanh())
    with pytest.raises(UsageError, match=message):
        apply(model, [region("0"), *regions] if application is MODULES else regions, application)
    assert [type(module) for module in model] == [nn.Conv2d, nn.Sequential, nn.Flatten, nn.Linear]


def test_a_forward_put_on_the_instance_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = lambda x: x
    with pytest.raises(UsageError, match=r"1 has a forward of its own in place of its class's \(Linear\)"):
        apply(model, [region("1")], MODULES)


class Branching(nn.Module):
    """Decides by its mode, its argument, a random number or its input."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x, mask=None):
        x = self.linear(x)
        if self.way == "input":
            return x.tanh() if x.sum() > 0 else x
        if self.way == "random":
            return x.tanh() * torch.rand(4)
        if self.way == "kind":
            return x.tanh() if isinstance(x, torch.Tensor) else x.sin()
        if self.way == "mode":
            return F.dropout(x.tanh(), 0.5, self.training)
        return x.tanh() if mask is None else x.tanh() * mask


def test_each_call_of_a_profile_has_its_node_in_the_graph():
    def named(model, x):
        profile = analyze(model, x, target="cpu").profile
        names = graph_names(model, profile, (x,), {})
        assert len(names) == len(profile.nodes)
        return {node.name: name for node, name in zip(profile.nodes, names, strict=True)}

    nothing = dict.fromkeys(("x", "output", "loss", "optimizer"))
    same_name = {name: name for name in ("conv1", "relu", "conv2", "norm", "relu_1", "add", "hardswish")}
    assert named(InPlace(), IMAGES) == nothing | same_name | {"add_": "iadd"}
    # What takes `unbind`'s tuple apart, and what reads a parameter or buffer, is no call.
    nothing |= dict.fromkeys(("order", "position", "getitem_1", "getitem_2"))
    same_name = {
        name: name
        for name in (
            "linear",
            "view",
            "unbind",
            "sin",
            "mul",
            "cat",
            "view_1",
            "add",
            "exp",
            "full",
            "add_1",
            "tanh",
            "add_2",
        )
    }
    # Symbolic names count sizes and arithmetic on them, too.
    other_name = {
        "getitem": "getitem_2",
        "getitem_3": "getitem_5",
        "getitem_4": "getitem_6",
        "mul_1": "mul_2",
        "sum_1": "sum_1",
        "add_3": "add_3",
    }
    assert named(Shaped(), torch.randn(2, 4)) == nothing | same_name | other_name


@pytest.mark.parametrize(
    ("way", "kwargs", "message"),
    [
        ("input", {}, r"symbolic_trace raised at .*test_regions\.py:\d+: TraceError"),
        ("random", {}, "its forward draws random numbers that torch.fx would keep for good"),
        ("kind", {}, r"torch.fx fixes a branch; where the program runs tanh at .*\.py:\d+, its trace has sin"),
        ("mask", {"mask": torch.ones(4)}, "it is given 'mask', and torch.fx cannot follow `mask is None`"),
    ],
)
def test_a_model_whose_trace_is_not_its_program_is_refused(way, kwargs, message):
    model, x = Branching(way), torch.ones(2, 4)
    profile = (
        analyze(model, {"x": x, **kwargs}, target="cpu").profile
        if way != "input"
        else analyze(Branching("mask"), x, target="cpu").profile
    )
    with pytest.raises(UsageError, match=message):
        graph_names(model, profile, (), {"x": x, **kwargs})


def test_a_branch_on_the_mode_is_the_programs_own_in_eval():
    holder = nn.Sequential(nn.Linear(4, 4), Branching("mode"))
    regions = [region("_1_linear", "tanh", "dropout", of=GRAPH)]
    checkpointed, x = apply(copy.deepcopy(holder), regions, GRAPH), torch.randn(3, 4)
    assert same(trained(holder, x), trained(checkpointed, x))
    assert torch.equal(holder.eval()(x), checkpointed.eval()(x))
    checkpointed.train()[1].eval()
    with pytest.raises(UsageError, match=r"expected 1 in train\(\), as when the plan was applied"):
        checkpointed(x)


def test_an_optional_argument_the_plan_was_made_without():
    model, x = apply(Branching("mask"), [region("linear", "tanh", of=GRAPH)], GRAPH), torch.randn(3, 4)
    assert torch.equal(model(x), model(x, None))
    assert torch.equal(model(x), model(x, mask=None))
    with pytest.raises(UsageError, match="expected argument 'mask' to be left out"):
        model(x, mask=torch.ones(4))


def test_arguments_that_are_one_object_are_one_again() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, requires_grad=True)
    # Within another region what autograd saves comes back as another object, so `query is key` is no longer true:
    # torch's own breaks on it.
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    with pytest.raises(CheckpointError):
        checkpoint(
            lambda y: checkpoint(attention, y, y, y, use_reentrant=False)[0] * y, x, use_reentrant=False
        ).sum().backward()
    assert compare(nn.Sequential(Attending()), [region("0", inside=(region("0.attention"),))], x.detach())


def test_a_program_that_checkpoints_arguments_that_are_one_is_analysed_as_it_runs() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.attention = nn.Linear(16, 16), nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return checkpoint(self.attention, x, x, x, use_reentrant=False)[0]

    Attending()(torch.randn(2, 5, 16)).sum().backward()
    assert analyze(Attending(), torch.randn(2, 5, 16), target="cpu").profile.recomputed


def test_a_path_where_a_plan_belongs() -> None:
    with pytest.raises(UsageError, match=r"expected a plan, as fxmem.load_plan\(path\) reads it .* got 'plan.json'"):
        carry_out(nn.Linear(2, 2), "plan.json")
