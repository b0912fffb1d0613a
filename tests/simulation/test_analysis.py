"""The public face: what is annotated, what is left alone, what it costs."""

import copy
import random
import subprocess
import sys
from collections.abc import Callable

import numpy
import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxmem import analyze
from fxmem.errors import AnalysisError, UsageError
from fxmem.memory import liveness
from fxmem.records.profile import Kind, Phase, Report
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu


def _cnn():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 13 * 13, 10))


X = torch.zeros(4, 1, 28, 28)


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("name", ["resnet18", "vit_b_32"])
def test_annotations_add_up(name, target):
    profile = analyze(
        lambda: torchvision.models.get_model(name, weights=None),
        torch.empty(2, 3, 224, 224, device="meta"),
        target=target,
    ).profile
    liveness.check(profile)
    assert sum(n.saved_bytes for n in profile.nodes) == profile.saved_bytes
    assert sum(n.params_bytes for n in profile.nodes) == sum(
        s.nbytes for s in profile.storages if s.kind in (Kind.PARAMETER, Kind.BUFFER)
    )
    assert sum(n.buffers_bytes for n in profile.nodes) == sum(
        s.nbytes for s in profile.storages if s.kind is Kind.BUFFER
    )
    assert [span.phase for span in profile.phases] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert [
        u.what for u in profile.unknowns if "CUDA context" not in u.what and "attention workspace" not in u.what
    ] == []


def test_figures_of_a_cnn_worked_out_by_hand():
    analysis = analyze(_cnn(), X, optimizer="sgd", target="cpu")
    conv, relu, pool, flat, linear = (n for n in analysis.profile.nodes if n.op == "call_module")
    outputs = 4 * 8 * 26 * 26 * 4
    assert (conv.params_bytes, conv.output_bytes, conv.saved_bytes) == (
        4 * (8 * 9 + 8),
        outputs,
        0,
    )  # it saves its input and weight: both excluded
    assert (relu.output_bytes, relu.saved_bytes) == (outputs, outputs)  # it saves its result
    pooled = 4 * 8 * 13 * 13
    # It saves its int64 indices, which are no output of the module, and its input, which relu already keeps.
    assert (pool.output_bytes, pool.saved_bytes) == (pooled * 4, pooled * 8)
    assert (flat.output_bytes, analysis.profile.nodes[flat.view_of].name) == (0, pool.name)
    assert (linear.params_bytes, linear.output_bytes, linear.saved_bytes) == (
        4 * (8 * 169 * 10 + 10),
        4 * 4 * 10,
        pooled * 4,
    )  # its input, which pooling brought
    assert conv.forward_flops == 2 * 4 * 8 * 9 * 26 * 26
    assert linear.forward_flops == 2 * 4 * 8 * 169 * 10
    assert conv.source is None  # nobody's own line calls a layer of a Sequential that is the model itself


def test_flops_of_products_are_flop_counter_modes():
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.randn(1, 3, 64, 64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    nodes = analyze(model, x, mode="infer", target="cpu").profile.nodes
    products = [n.forward_flops for n in nodes if n.module_type in ("Conv2d", "Linear")]
    assert sum(products) == counter.get_total_flops()


def test_a_real_model_is_left_exactly_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[1].eval()
    x = torch.randn(3, 4)
    model[0].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    pointers = [t.data_ptr() for t in model.parameters()]
    analyze(model, x, target="h100")
    states_after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert [m.training for m in model.modules()] == flags
    assert [t.data_ptr() for t in model.parameters()] == pointers
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert torch.equal(states[0], states_after[0])
    assert states[1] == states_after[1]
    assert (states[2] == states_after[2]).all()


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    profile = analyze(Tied, torch.zeros(2, 8, dtype=torch.long), target="h100").profile
    assert [s.nbytes for s in profile.storages if s.kind is Kind.PARAMETER] == [100 * 16 * 4]


def test_channels_last_and_half_precision_are_kept():
    model = _cnn().to(torch.bfloat16).to(memory_format=torch.channels_last)
    x = X.bfloat16().to(memory_format=torch.channels_last)
    nodes = {n.name: n for n in analyze(model, x, target="h100").profile.nodes}
    assert {t.dtype for n in nodes.values() for t in n.outputs} <= {"bfloat16", "int64"}
    assert nodes["_0"].output_bytes == 2 * 4 * 8 * 26 * 26


def test_optimizer_forms_of_a_card():
    """A steady AdamW step takes as much again as the parameters in its foreach form and nothing in its fused form."""
    size = 4 * (64 * 64 + 64)
    peaks = {}
    for form in ("adamw", "adamw:fused", "adamw:forloop"):
        analysis = analyze(nn.Linear(64, 64), torch.zeros(1, 64), optimizer=form, target="h100")
        span = analysis.profile.phases[-1]
        live = analysis.timeline.live_bytes[span.begin : span.end]
        peaks[form] = max(0, max(live, default=0) - analysis.timeline.live_bytes[span.begin - 1])
    assert peaks["adamw"] >= size
    assert peaks["adamw:fused"] == 0
    assert 0 < peaks["adamw:forloop"] <= 3 * size


def test_inference_keeps_nothing_for_backward():
    profile = analyze(_cnn(), X, mode="infer", target="h100").profile
    assert profile.saved_bytes == 0
    assert profile.step.optimizer is None
    assert {span.phase for span in profile.phases} == {Phase.FORWARD}


def test_a_step_without_optimizer_ends_with_its_gradients():
    analysis = analyze(nn.Linear(8, 8), torch.zeros(2, 8), optimizer=None, target="cpu")
    gradients = [s for s in analysis.profile.storages if s.kind is Kind.GRADIENT]
    assert {s.death for s in gradients} == {analysis.profile.ticks}
    assert {s.name for s in gradients} == {"weight.grad", "bias.grad"}


def test_json_reads_back_as_it_was(tmp_path):
    analysis = analyze(_cnn(), X, target="h100")
    text = analysis.to_json(tmp_path / "report.json")
    assert Report.model_validate_json(text) == analysis.report()
    assert (tmp_path / "report.json").read_text() == text + "\n"
    assert analysis.report().peak.allocated_bytes % 512 == 0


def test_factories_and_nested_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair, *, scale):
            return {"sum": self.linear(pair["a"]) * scale + pair["b"][0]}

    inputs = {"pair": {"a": torch.zeros(2, 4), "b": [torch.zeros(4)]}, "scale": 2.0}
    profile = analyze(Pair, inputs, target="cpu").profile
    assert {i.name for i in profile.inputs} == {"pair.0", "pair.1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "both"}, "expected mode"),
        ({"precision": "fp8"}, "expected precision"),
        ({"target": "h1000"}, "h100"),
        ({"optimizer": "adamm"}, "adam"),
        ({"loss": lambda out: out}, "one element"),
        ({"inputs": [X]}, "a tensor, a tuple"),
        ({"model": 3}, "nn.Module"),
        ({"model": lambda: 3}, "nn.Module"),
    ],
)
def test_what_cannot_be_understood_says_what_was_expected(change, message):
    arguments = {"model": _cnn(), "inputs": X, **change}
    with pytest.raises(UsageError, match=message):
        analyze(**arguments)


def test_a_model_that_raises_leaves_torch_as_it_was():
    class Raising(nn.Linear):
        def forward(self, x):
            raise ValueError("no such luck")

    before = nn.Module.__call__, nn.functional.scaled_dot_product_attention, torch.cuda.is_available()
    with pytest.raises(AnalysisError, match=r"ValueError: no such luck.*test_analysis\.py"):
        analyze(Raising(2, 2), X, target="h100")
    assert before == (nn.Module.__call__, nn.functional.scaled_dot_product_attention, torch.cuda.is_available())


def test_an_analysis_inside_an_analysis_is_refused_and_leaves_the_next_alone():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            analyze(nn.Linear(2, 2), torch.zeros(1, 2), target="cpu")
            return self.linear(x)

    with pytest.raises(UsageError, match="expected no analysis within another"):
        analyze(Curious(), torch.zeros(2, 4), target="cpu")
    # A batch of 8 bytes, a weight of 16, a bias of 8, an output of 8.
    found = analyze(nn.Linear(2, 2), torch.zeros(1, 2), target="cpu", mode="infer")
    assert found.peak.requested_bytes == 8 + 16 + 8 + 8


@pytest.mark.truth
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process's largest memory is read from /proc")
def test_a_70_billion_parameter_model_fits_a_laptop():
    """Measured in a process of its own: the interpreter, torch and transformers included.

    Not by `ru_maxrss`, in which a process starts with what its parent had.
    """
    script = """
import re, torch
from fxmem.cli.specs import build_model
from fxmem import analyze
settings = dict(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672, num_attention_heads=64, \
num_key_value_heads=8, vocab_size=128256)
built = build_model("hf:LlamaForCausalLM", settings, weights_dtype="bf16")
ids = torch.empty(1, 4096, dtype=torch.long, device="meta")
peak = analyze(built.module, {"input_ids": ids, "labels": ids}, target="b200").peak
assert sum(p.numel() for p in built.module.parameters()) > 70e9
assert not peak.fits
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * 2**30


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (torch.nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.int64)),
        (torch.nn.Linear(4, 4).double(), torch.zeros(2, 3, 4)),
        (torch.nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8, dtype=torch.float16)),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_what_no_kernel_takes_is_refused_as_on_a_card(model: torch.nn.Module, given: torch.Tensor, target: str) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        model(given)
    with pytest.raises(AnalysisError, match=r"expected tensors of one dtype, got|should be the same"):
        analyze(model, given, target=target, mode="infer")


class _Picks(torch.nn.Module):
    """Rows of a table, by a function of the table and what is given."""

    def __init__(self, pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self._pick = torch.nn.Parameter(torch.ones(5, 4)), pick

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self._pick(self.table, at)


@pytest.mark.parametrize(
    "pick",
    [
        lambda table, at: torch.nn.functional.embedding(at, table),
        lambda table, at: table.index_select(0, at),
        lambda table, at: table.index_add(0, at, table[:2]),
        lambda table, at: table[:2].repeat_interleave(at, dim=0, output_size=2),
    ],
    ids=["embedding", "index_select", "index_add", "repeat_interleave"],
)
@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_indices_that_are_no_whole_numbers_are_refused_as_on_a_card(
    pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], target: str
) -> None:
    model = _Picks(pick)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(torch.ones(2))
    with pytest.raises(AnalysisError, match="expected indices of int64 or int32, got float32"):
        analyze(model, torch.ones(2), target=target, mode="infer")
    analyze(model, torch.ones(2, dtype=torch.int64), target=target, mode="infer")


def test_an_analysis_can_be_made_again_with_other_settings() -> None:
    analysis = analyze(torch.nn.Linear(64, 64), torch.zeros(8, 64, device="meta"), target="cpu")
    assert analysis.vary().profile == analysis.profile
    assert analysis.vary(optimizer=None).peak.requested_bytes < analysis.peak.requested_bytes
    assert analysis.vary(torch.nn.Linear(64, 128)).peak.requested_bytes > analysis.peak.requested_bytes
    assert analysis.vary(args=(torch.zeros(16, 64, device="meta"),)).profile.inputs[0].shape == (16, 64)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_step_that_is_run_twice_says_what_its_nodes_return(reentrant: bool | None) -> None:
    """An input's gradient outlives the step, so that the steady state is the second."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle = torch.relu(self.first(x)) * self.first.bias
            low, high = middle.split(8, 1)
            middle = torch.cat([high, low], 1)
            return (
                self.second(middle)
                if reentrant is None
                else torch.utils.checkpoint.checkpoint(self.second, middle, use_reentrant=reentrant)
            )

    once, twice = (
        analyze(Net(), torch.zeros(4, 8, requires_grad=wanted), target="cpu").profile.nodes for wanted in (False, True)
    )
    told = [
        [(node.name, node.output_bytes, [(t.shape, t.dtype) for t in node.outputs], node.view_of) for node in nodes]
        for nodes in (once, twice)
    ]
    assert told[0] == told[1]
    assert sum(node.output_bytes for node in twice)


@pytest.mark.parametrize("reentrant", [True, False])
def test_ops_of_a_checkpoint_that_runs_again(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(
                lambda y: torch.relu(self.second(y)), self.first(x), use_reentrant=reentrant
            )

    profile = analyze(Net(), torch.zeros(32, 8), target="cpu").profile
    ops = [(profile.ops[each.op], each.read_bytes) for each in profile.recomputed_ops]
    again = [
        (op.name, profile.nodes[op.node].target, read) for op, read in ops if "empty" not in op.name
    ]  # what holds states of generators
    read = 4 * (32 * 16 + 16 * 4 + 4)
    assert again == [("aten.addmm.default", "second", read), ("aten.relu.default", "torch.relu", 0)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_holds_the_state_of_the_random_generator(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    model, x = Net(), torch.randn(64, 32, requires_grad=True)
    peak = analyze(model, x, target="cpu", optimizer=None).peak.requested_bytes
    assert peak == measure_cpu(model, StepRequest(args=(x,), optimizer=None)).peak_without_kernel_scratch_bytes


class HalfKept(nn.Module):
    """The first to read an element of a tuple is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, changed = x.chunk(2, dim=1)
        return torch.cat((kept, self.linear(changed)), 1)


def test_the_gradient_of_a_node_that_reads_an_element_is_its_own() -> None:
    profile = analyze(HalfKept(), torch.zeros(4, 16), target="cpu").profile
    of = {node.name: node for node in profile.nodes}
    assert of["linear"].inputs == (profile.nodes.index(of["getitem"]),)
    # The weight's gradient is a product of 4 x 5 and 4 x 8, the bias's the sums of 5 columns of 4.
    assert (of["linear"].backward_flops, of["getitem"].backward_flops) == (2 * 4 * 5 * 8 + 4 * 5, 0)
    assert {profile.nodes[op.node].name for op in profile.ops if op.name == "aten.mm.default"} == {"linear"}


def test_parameters_and_buffers_are_placed_in_the_order_in_which_to_moves_them() -> None:
    """The allocator hands out blocks in that order, and where a block lies decides what fits beside it."""
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = nn.Sequential(inner, nn.BatchNorm2d(4))
    model.register_parameter("scale", nn.Parameter(torch.ones(7)))
    moved: list[tuple[int, ...]] = []
    model._apply(lambda tensor: [tensor, moved.append(tuple(tensor.shape))][0])
    storages = analyze(model, torch.empty(2, 3, 8, 8)).profile.storages
    placed = [storage.shape for storage in storages if storage.kind in (Kind.PARAMETER, Kind.BUFFER)]
    assert placed == moved


class Biased(nn.Module):
    """Attention with a trained bias of 20 columns, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 4, 20, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.bias.expand(2, 4, 20, 20))
        return x


def test_the_gradient_of_an_attention_bias_is_padded_each_time() -> None:
    """To a multiple of 16 columns: `_efficient_attention_backward` in
    aten/src/ATen/native/transformers/cuda/attention_backward.cu."""
    profile = analyze(Biased(), torch.empty(2, 4, 20, 32)).profile
    backward = "aten._scaled_dot_product_efficient_attention_backward.default"
    at = {index for index, op in enumerate(profile.ops) if op.name == backward}
    made = [storage for storage in profile.storages if storage.op in at and storage.shape == (2, 4, 20, 20)]
    assert [storage.nbytes for storage in made] == [2 * 4 * 20 * 32 * 4] * 2


@pytest.mark.truth
def test_an_analysis_in_a_thread_that_has_ended_leaves_the_process_alive() -> None:
    """In a process of its own: the main thread of this one has made what the thread would have made."""
    script = """
import threading, torch, fxmem
def analyze():
    print(fxmem.analyze(torch.nn.Linear(4, 4), torch.zeros(2, 4), target="h100").peak.requested_bytes)
for _ in range(2):
    thread = threading.Thread(target=analyze)
    thread.start()
    thread.join()
analyze()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 1
    assert len(done.stdout.split()) == 3


class OnTheHost(torch.optim.Optimizer):
    """Steps copies on the CPU, as torchao's `CPUOffloadOptimizer`, which leaves out `Optimizer.__init__` too."""

    def __init__(self, parameters) -> None:
        self.copies = {each: torch.empty_like(each, device="cpu") for each in parameters}
        for each, on_host in self.copies.items():
            on_host.grad = torch.empty_like(on_host)
            each.register_post_accumulate_grad_hook(self.fetch)
        self.inner = torch.optim.AdamW(self.copies.values())

    @property
    def param_groups(self):
        return self.inner.param_groups

    def fetch(self, parameter) -> None:
        self.copies[parameter].grad.copy_(parameter.grad)
        parameter.grad = None

    def step(self, closure=None) -> None:
        self.inner.step()
        for parameter, on_host in self.copies.items():
            parameter.data.copy_(on_host)

    def zero_grad(self, set_to_none=True) -> None:
        for parameter in self.copies:
            parameter.grad = None


def test_an_optimizer_on_the_host_has_no_bytes_on_the_card() -> None:
    """Nor are gradients there at the end of backward; AdamW on the card has them and two more weights."""
    analyses = [
        analyze(nn.Linear(64, 32, bias=False), torch.zeros(1, 64), optimizer=optimizer, target="h100")
        for optimizer in (OnTheHost, "adamw")
    ]
    kinds = [{storage.kind for storage in analysis.profile.storages} for analysis in analyses]
    assert [Kind.OPTIMIZER_STATE in found for found in kinds] == [False, True]
    assert analyses[0].peak.requested_bytes < analyses[1].peak.requested_bytes - 2 * 64 * 32 * 4
