"""The graph the running program writes, held against `torch.fx.symbolic_trace` and against the program itself."""

import contextlib
import dataclasses
import functools
import warnings

import pytest
import torch
import torch.fx
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.densenet import DenseNet
from torchvision.models.maxvit import MaxVit
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.models.video.swin_transformer import SwinTransformer3d

from fxmem import analyze
from fxmem._torch.common import FakeTensorMode, tree_leaves
from fxmem.errors import AnalysisError
from fxmem.simulation.step.fake_model import fake_model

# Of what is built from the same blocks, one: of a few blocks, where a class of torchvision takes their number.
# Detectors decide by the boxes they find, and raft loops over a number torch.fx does not see: symbolic_trace refuses
# both.
_WINDOWS = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
_KERNELS = [3, 3, 3], [3, 3, 3]
_MVIT = [
    MSBlockConfig(1, 24, 24, *_KERNELS, [1, 1, 1], [1, 8, 8]),
    MSBlockConfig(2, 24, 48, *_KERNELS, [1, 2, 2], [1, 4, 4]),
]
_V2 = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
_SWIN_V2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
FEW_BLOCKS = {
    "densenet": functools.partial(DenseNet, growth_rate=8, block_config=(2, 3), num_init_features=16),
    "maxvit": functools.partial(MaxVit, (224, 224), 16, 7, [32, 64], [1, 2], 16, 0.2),
    "mvit_v2": functools.partial(MViT, (224, 224), 16, _MVIT, **_V2),
    "swin_v2": functools.partial(SwinTransformer, [4, 4], window_size=[8, 8], **_WINDOWS, **_SWIN_V2),
    "swin3d": functools.partial(SwinTransformer3d, [2, 4, 4], window_size=[8, 7, 7], **_WINDOWS),
}
MODELS = [
    *FEW_BLOCKS,
    "convnext_tiny",
    "deeplabv3_resnet50",
    "googlenet",
    "lraspp_mobilenet_v3_large",
    "regnet_y_400mf",
    "resnet18",
    "s3d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "vit_b_32",
]

# What symbolic_trace writes differently from what runs, and why.
_SAME = {
    "iadd": "add",  # a proxy has no in-place operators: `x += y` becomes `x + y`
    "add_": "add",
    "imul": "mul",
    "mul_": "mul",
    "truediv": "div",  # operators and methods are one in the running program
    "concat": "cat",
    "floordiv": "floor_divide",
}


def _shape(name):
    if any(word in name for word in ("mvit", "swin3d", "s3d")):
        return 1, 3, 16, 224, 224
    return 1, 3, 224, 224


def _build(name):
    options = {"weights_backbone": None} if any(word in name for word in ("deeplab", "lraspp")) else {}
    make = FEW_BLOCKS.get(name, functools.partial(torchvision.models.get_model, name, weights=None, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchvision's about its own initial weights
        try:
            with torch.device("meta"):
                model = make()
        except RuntimeError:  # needs real values to build
            model = make()
    return model.eval()


def _name(node):
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
    return _SAME.get(name, name)


class _Producing(torch.fx.Interpreter):
    """Names of the calls of a symbolically traced graph that return a tensor, functions wrapped for fx apart."""

    def __init__(self, module, wrapped):
        super().__init__(module, garbage_collect_values=False)
        self.calls = []
        self.wrapped = wrapped

    def run_node(self, n):
        result = super().run_node(n)
        if n.op not in ("call_function", "call_method") or _name(n) == "getitem" or _name(n) in self.wrapped:
            return result
        if any(isinstance(t, torch.Tensor) for t in tree_leaves(result)):
            self.calls.append(_name(n))
        return result


def _wrapped_functions():
    """Functions marked with torch.fx.wrap: a leaf for symbolic_trace, looked into by a running program."""
    return {name for _, name in torch.fx._symbolic_trace._wrapped_fns_to_patch}


def _made_of_buffers(nodes, buffers):
    """Nodes that read nothing but buffers: symbolic_trace computes them while it traces and keeps the result as a
    constant."""
    made = {i for i, n in enumerate(nodes) if n.op == "get_attr" and n.target in buffers}
    for i, n in enumerate(nodes):
        if n.op in ("call_function", "call_method") and n.inputs and made.issuperset(n.inputs):
            made.add(i)
    return made


@pytest.mark.truth
@pytest.mark.parametrize("name", MODELS)
def test_same_graph_as_symbolic_trace(name):
    model = _build(name)
    shape = _shape(name)
    analysis = analyze(model, torch.empty(shape, device="meta"), mode="infer", target="cpu")
    nodes = analysis.profile.nodes
    symbolic = torch.fx.symbolic_trace(model)
    assert [n.target for n in nodes if n.op == "call_module"] == [
        n.target for n in symbolic.graph.nodes if n.op == "call_module"
    ]
    wrapped, constant = _wrapped_functions(), _made_of_buffers(nodes, dict(model.named_buffers()))
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    theirs = _Producing(fake_model(symbolic, fakes, torch.device("cpu")), wrapped)
    with (
        fakes,
        torch.no_grad(),
        contextlib.suppress(TypeError),
    ):  # swin3d's wrapped functions write to lists that torch.fx has frozen
        theirs.run(torch.empty(shape))
        ours = [
            _SAME.get(short, short)
            for i, n in enumerate(nodes)
            if i not in constant
            and n.op in ("call_function", "call_method")
            and (short := n.target.rpartition(".")[2]) != "getitem"
            and not (n.source and n.source.function in wrapped)
        ]
        assert ours == theirs.calls


@dataclasses.dataclass
class Out:
    first: torch.Tensor
    rest: list


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


@torch.library.custom_op("fxmem_tests::shifted", mutates_args=())
def shifted(x: torch.Tensor, by: float) -> torch.Tensor:
    return x + by


@shifted.register_fake
def _(x, by):
    return torch.empty_like(x)


shifted.register_autograd(lambda ctx, grad: (grad, None))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.linear = nn.Linear(4, 4)
        self.constant = torch.randn(4)
        self.register_buffer("order", torch.arange(3, -1, -1))

    def forward(self, x, flag=True):
        y = x @ self.weight.T + self.constant
        y = self.linear(self.linear(y))
        y[:, 0] = 0
        y += 1
        y.relu_()
        zeros = torch.zeros(4, device=x.device)
        y = (2 - Triple.apply(y, 3)) ** 2
        y = shifted(y, 0.5)
        left, _ = y.chunk(2, 1)
        largest = y.max(1)
        y = y[..., self.order]
        return Out(y * zeros.add(1), [left, {"largest": largest.values, "flag": flag}])


def _equal(a, b):
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(left, right, strict=True)
    )


def test_odd_program_runs_again_from_its_graph():
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(3, 4)
    analysis = analyze(model, x, target="cpu")
    came, expected = analysis.graph_module(x), model(x)
    assert isinstance(came, Out)
    assert torch.equal(came.first, expected.first)
    assert _equal(came.rest, expected.rest)
    targets = {(n.op, n.target) for n in analysis.profile.nodes}
    assert ("get_attr", "weight") in targets
    assert ("get_attr", "constant") in targets
    assert ("call_function", "operator.setitem") in targets
    assert any(target.endswith("Triple.apply") for _, target in targets)
    assert any("shifted" in target for _, target in targets)
    assert [n.target for n in analysis.profile.nodes if n.op == "call_module"] == ["linear", "linear"]


@pytest.mark.truth
@pytest.mark.parametrize("name", ["vit_b_16", "googlenet", "deeplabv3_resnet50"])
def test_graph_module_returns_what_the_model_returns(name):
    torch.manual_seed(0)
    options = {"weights_backbone": None} if "deeplab" in name else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torchvision.models.get_model(name, weights=None, **options).eval()
    x = torch.randn(1, 3, 224, 224)
    analysis = analyze(model, x, mode="infer", target="cpu")
    with torch.no_grad():
        assert _equal(analysis.graph_module(x), model(x))


def test_a_graph_module_is_a_model_like_any_other():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    x = torch.randn(3, 4)
    analysis = analyze(model, x, target="cpu")
    assert [n.target for n in analysis.profile.nodes if n.op == "call_module"] == ["0", "1", "2"]
    assert torch.equal(analysis.graph_module(x), model(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(16, 16), nn.Linear(16, 16), reentrant

    def block(self, x):
        return self.second(torch.relu(self.first(x)))

    def forward(self, x):
        return checkpoint(self.block, x.sin(), use_reentrant=self.reentrant).cos()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_work_belongs_to_the_nodes_of_its_first_run(reentrant):
    # Reentrant checkpointing computes no gradients unless an input requires one.
    analysis = analyze(Checkpointed(reentrant), torch.randn(8, 16, requires_grad=True), target="cpu")
    nodes = analysis.profile.nodes
    assert [n.name for n in nodes if n.op.startswith("call")] == ["sin", "first", "relu", "second", "cos"]
    ran = {}
    for op in analysis.profile.ops:
        if op.phase == "backward" and op.name in ("aten.addmm.default", "aten.relu.default"):
            ran.setdefault(nodes[op.node].name, []).append(op.name)
    assert ran["first"] == ["aten.addmm.default"]
    assert ran["relu"] == ["aten.relu.default"]


def test_nodes_carry_what_torch_fx_promises():
    model = nn.Sequential(nn.Linear(4, 4))
    graph = analyze(model, torch.randn(2, 4), target="cpu").graph_module.graph
    (linear,) = [n for n in graph.nodes if n.op == "call_module"]
    assert linear.meta["tensor_meta"].shape == (2, 4)
    assert list(linear.meta["nn_module_stack"]) == [""]
    assert linear.meta["fxmem"].params_bytes == 4 * (16 + 4)


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        (lambda self, x: self.linear(x) if x.sum() > 0 else x, "control flow"),
        (lambda self, x: self.linear(x * x.max().item()), "control flow"),
        (lambda self, x: self.linear(x.view(7, 7)), "RuntimeError"),
    ],
)
def test_what_no_fake_run_can_do_names_the_users_line(body, advice):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        forward = body

    with pytest.raises(AnalysisError, match=rf"(?s){advice}.*{__name__.rpartition('.')[2]}\.py:\d+"):
        analyze(Asking(), torch.randn(3, 4), target="cpu")


def test_module_calls_and_checkpointed_regions_are_noted() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
            self.head = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            x = checkpoint(self.inner, x, use_reentrant=False)
            x = checkpoint(self.inner, x, use_reentrant=True)
            return self.head(x)

    profile = analyze(Twice(), torch.zeros(2, 4), target="cpu").profile
    assert [node.name for node in profile.nodes[1:8]] == [
        "inner_0",
        "inner_1",
        "inner_2",
        "inner_3",
        "inner_4",
        "inner_5",
        "head",
    ]
    assert [(call.module, call.first_node, call.last_node) for call in profile.calls] == [
        ("inner", 1, 3),
        ("inner", 3, 5),
        ("inner", 5, 7),
    ]
    assert next(call.source.code for call in profile.calls if call.source) == "x = self.inner(x)"
    assert [(region.first_node, region.last_node) for region in profile.recomputed] == [(3, 5), (5, 7)]
