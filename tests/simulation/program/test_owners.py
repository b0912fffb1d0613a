"""Whose a byte is that outlives a step: by the name that the program gives it, and by what it is."""

from __future__ import annotations

import collections
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.hardware import catalogue
from fxmem.memory.by_layer import module_rows
from fxmem.memory.figures import holdings_at_peak
from fxmem.records.profile import Kind
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.program import Launch, RunSettings, launch


def kept(run: ProfiledStep, kind: Kind) -> dict[str, int]:
    """What lies beside nodes and modules at the peak: bytes by owner, of a kind; nothing is without an owner."""
    found = holdings_at_peak(run.profile, run.timeline)
    worth = run.timeline.peak.requested_bytes // 100
    assert [each for each in found if not each.owner and each.nbytes > worth] == []
    assert [node.target for node in run.profile.nodes if "_tensor_constant" in node.target] == []
    return {each.label: each.nbytes for each in found if each.kind is kind}


def make_net(width: int = 1024) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).cuda()


def batch(rows: int = 512, width: int = 1024) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda")


MIB = 1 << 20


def train(net: nn.Module, steps: int, after: Callable[[torch.Tensor, torch.Tensor], Any] = lambda x, out: None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        x = batch()
        out = net(x)
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(x, out)


def test_batches_that_a_list_keeps() -> None:
    with fxmem.record("h100", steps=3) as run:
        buf: list[torch.Tensor] = []
        train(make_net(), 4, lambda x, out: buf.append(x))
    # The third step begins with two batches in the list; its own is still a variable.
    assert kept(run, Kind.BUFFER) == {"buf, 2 tensors": 2 * 2 * MIB}


def test_results_that_a_list_keeps_are_outputs() -> None:
    with fxmem.record("h100", steps=3) as run:
        preds: list[torch.Tensor] = []
        train(make_net(), 4, lambda x, out: preds.append(out))
    assert kept(run, Kind.OUTPUT) == {"preds, 2 tensors": 2 * 2 * MIB}


def test_what_the_graph_of_a_kept_loss_saves() -> None:
    with fxmem.record("h100", steps=3) as run:
        net, losses = make_net(), list[torch.Tensor]()
        train(net, 4, lambda x, out: losses.append(net(x).mean()))
    # The first graph, made as the second step began, has the batch of the first, and the result of tanh, which also is
    # the last layer's input. The second graph is of the third step itself, but for the second's batch.
    assert kept(run, Kind.SAVED) == {"graph of losses, 2 tensors": (2 + 2) * MIB}
    assert kept(run, Kind.BUFFER)["graph of losses"] == 2 * MIB


def test_what_hooks_and_closures_keep() -> None:
    def watch(module: nn.Module) -> None:
        found: list[torch.Tensor] = []
        module.register_forward_hook(lambda _, given, out: found.append(out))

    with fxmem.record("h100", steps=3) as run:
        net = make_net()
        watch(net[1])
        train(net, 4)
    assert kept(run, Kind.OUTPUT) == {"hook of net.1.found, 2 tensors": 2 * 2 * MIB}


class Average:
    """A running average of weights, in a dictionary."""

    everything: list[torch.Tensor] = []  # noqa: RUF012 - shared by all, as in the programs of people

    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in net.named_parameters()}


def follow(twin: nn.Module, net: nn.Module, *_: torch.Tensor) -> None:
    for own, trained in zip(twin.parameters(), net.parameters(), strict=True):
        own.mul_(0.9).add_(trained.detach(), alpha=0.1)


def test_averages_of_weights_by_attribute_and_copies_by_module() -> None:
    with fxmem.record("h100", steps=2) as run:
        net = make_net()
        ema, twin = Average(net), copy.deepcopy(net).requires_grad_(False)

        train(net, 3, functools.partial(follow, twin, net))
        del ema, twin
    assert kept(run, Kind.BUFFER) == {"ema.shadow, 4 tensors": 2 * (4 * MIB + 4096)}
    rows = {row.label: row.figures.params for row in module_rows(run.profile, run.timeline)}
    assert rows["twin"] == rows["net"] == 2 * (4 * MIB + 4096)


Step = collections.namedtuple("Step", "states actions")


class Player:
    """Keeps tensors in many ways."""

    def __init__(self) -> None:
        self.net = make_net()
        self.replay: collections.deque[Step] = collections.deque(maxlen=50)
        self.scale = functools.partial(torch.mul, batch(1024))
        self.data = self.batches()

    def batches(self) -> Iterator[torch.Tensor]:
        table = batch(2048)
        for at in range(100):
            yield table[at : at + 512]

    def play(self) -> None:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(4):
            self.net(next(self.data)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.replay.append(Step(batch(), torch.zeros(512, device="cuda")))


def test_attributes_generators_and_named_tuples() -> None:
    with fxmem.record("h100", steps=3) as run:
        Player().play()
    found = kept(run, Kind.BUFFER)
    assert found["Player.data.table"] == 8 * MIB
    assert found["Player.scale"] == 4 * MIB
    # The second of them came as the third step began: it belongs to the call that made it.
    assert found["Player.replay, 2 tensors"] == 2 * MIB + 2048


def test_a_checkpoint_that_stays_loaded(tmp_path: Path) -> None:
    with fxmem.record("h100", steps=2) as run:
        net = nn.Sequential(nn.Linear(1024, 1024))
        torch.save({"model": net.state_dict()}, tmp_path / "last.pt")
        ck = torch.load(tmp_path / "last.pt", map_location="cuda")
        net.load_state_dict(ck["model"])
        train(net.cuda(), 3)
        del ck
    assert (
        sum(each.nbytes for each in holdings_at_peak(run.profile, run.timeline) if each.owner == "ck") == 4 * MIB + 4096
    )


def test_buckets_of_gradients_are_communication() -> None:
    with fxmem.record("h100", steps=3, ranks=2) as run:
        torch.distributed.init_process_group("nccl")
        replica = nn.parallel.DistributedDataParallel(make_net())
        train(replica, 4)
    # The first bucket takes up to 1 MiB of the last layer: its bias, and the weight that passes the limit.
    assert kept(run, Kind.COMMUNICATION) == {"net.gradient_buckets, 2 tensors": 2 * (4 * MIB + 4096)}
    assert sum(node.params_bytes for node in run.profile.nodes) == 2 * (4 * MIB + 4096)


class Master(torch.optim.Optimizer):
    """Steps copies of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.copies = [each.detach().float().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


def test_what_an_optimizer_keeps_beside_its_state() -> None:
    with fxmem.record("h100", steps=2) as run:
        net = make_net().bfloat16()
        optimizer = Master(net.parameters())
        for _ in range(3):
            net(batch().bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    states = [each for each in run.profile.storages if each.kind is Kind.OPTIMIZER_STATE]
    assert [each.holder for each in states] == [f"optimizer.copies[{at}]" for at in range(4)]
    assert sum(each.nbytes for each in states) == 2 * (4 * MIB + 4096)


def test_the_variable_of_a_loop_over_parameters_is_no_name_of_one() -> None:
    def step(optimizer: Master) -> None:
        for each in optimizer.copies:
            each.grad = None
        optimizer.step()

    with fxmem.record("h100", steps=2) as run:
        net = make_net().bfloat16()
        optimizer = Master(net.parameters())
        optimizer.copies = [nn.Parameter(each) for each in optimizer.copies]
        for _ in range(3):
            net(batch().bfloat16()).sum().backward()
            step(optimizer)
    found = [each.holder for each in run.profile.storages if each.kind is Kind.PARAMETER and not each.name]
    assert found == [f"optimizer.copies[{at}]" for at in range(4)]


class Scaled(nn.LayerNorm):
    """Reads its parameters by a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half().float())


def test_what_a_step_begins_with_is_not_the_reader_of_a_parameter() -> None:
    """The copies that an optimizer has stepped come back into the model, as the next step begins."""
    with fxmem.record("h100", steps=3) as run:
        net = nn.Sequential(nn.Linear(1024, 1024), Scaled(1024)).cuda()
        optimizer = Master(net.parameters())
        for _ in range(4):
            for each, copied in zip(net.parameters(), optimizer.copies, strict=True):
                each.detach().copy_(copied.view_as(each))
            net(batch()).sum().backward()
            optimizer.step()
    read = {run.profile.nodes[each.node].target for each in run.profile.storages if each.name and each.node is not None}
    own = [each for each in run.profile.storages if each.kind is Kind.PARAMETER]
    assert [each.name for each in own if each.node is None] == []
    assert "torch.nn.functional.layer_norm" in read
    assert sum(node.params_bytes for node in run.profile.nodes) == sum(each.nbytes for each in own)


def infer(keeps_graph: bool, outputs: list[torch.Tensor]) -> None:
    """A function that returns: its model is no more when the program ends."""
    net = make_net().eval()
    with torch.set_grad_enabled(keeps_graph):
        outputs += [net(batch()) for _ in range(3)]


def test_inference_gives_parameters_to_modules_that_are_no_more() -> None:
    with fxmem.record("h100") as run:
        infer(False, [])
    assert sum(node.params_bytes for node in run.profile.nodes) == 2 * (4 * MIB + 4096)
    # The first batch was there before the model was called, by no name but its argument's.
    assert [each.holder for each in run.profile.storages if each.kind is Kind.INPUT] == ["input"]
    assert kept(run, Kind.BUFFER) == {}
    assert run.profile.saved_bytes == 0


def test_a_graph_that_nothing_goes_back_through_saves() -> None:
    with fxmem.record("h100") as run:
        infer(True, [])
    # Of each forward the result of tanh, which is also the last layer's input, and the batch; the first batch was there
    # before.
    assert run.profile.saved_bytes == (3 * 2 + 2 * 2) * MIB


def test_a_graph_saves_beside_what_a_kernel_has_for_itself() -> None:
    with fxmem.record("h100") as run:
        net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()).cuda().eval()
        outputs = net(batch()).sort()  # the peak is within it, and as the program ends goes first what came last
        del net, outputs
    # The results of tanh, and the indices that sort makes.
    assert run.profile.saved_bytes == (2 + 4) * MIB


def test_a_graph_that_is_dropped_saves_no_more() -> None:
    with fxmem.record("h100") as run:
        net = make_net().eval()
        kept_results = [net(batch()).tanh().detach() for _ in range(8)]
        del kept_results
    # At the peak the last call's graph alone is there: its batch, both tanhs' results and nothing of the seven before.
    assert run.profile.saved_bytes == (2 + 2 + 2) * MIB


def test_a_view_of_what_this_round_made_reads_what_made_it() -> None:
    with fxmem.record("h100", steps=1) as run:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch().data).sum().backward()
        optimizer.step()
    kept(run, Kind.BUFFER)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_cache_that_a_model_fills_is_named_by_its_attribute(mode: Any) -> None:
    class Filling(nn.Module):
        """Makes a mask in its first call, and keeps it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.masks: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "causal" not in self.masks:
                self.masks["causal"] = torch.ones(512, 512, device=x.device)
            out: torch.Tensor = self.masks["causal"] @ self.inner(x)
            return out

    analysis = fxmem.analyze(Filling(), torch.empty(512, 64, device="meta"), mode=mode, target="h100")
    assert kept(analysis, Kind.BUFFER) == {"masks": MIB}


def test_a_module_that_is_imported_lazily_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "not_there", Lazy("not_there"))
    with fxmem.record("h100", steps=2) as run:
        train(make_net(), 2)
    assert run.profile is not None


class Unmeasured(tuple[torch.Tensor, ...]):
    """A sequence that does not say how long it is."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


KEEPING = """
import stash, torch
stash.kept.append(torch.ones(1024, 1024, device="cuda"))
net = torch.nn.Linear(1024, 1024, device="cuda")
net(stash.kept[0]).sum().backward()
"""


def test_what_called_the_program_owns_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stash = types.ModuleType("stash")
    kept_by_caller: list[torch.Tensor] = []
    vars(stash)["kept"] = kept_by_caller
    monkeypatch.setitem(sys.modules, "stash", stash)
    script = tmp_path / "train.py"
    script.write_text(KEEPING)
    recorded = launch(Launch(str(script)), catalogue.target("h100"), RunSettings(1)).recorded
    assert kept_by_caller
    holders = {each.holder for each in recorded.profile.storages if each.nbytes == 4 * MIB}
    assert not [each for each in holders if "kept_by_caller" in (each or "")]


def test_a_sequence_is_asked_for_nothing_of_its_own() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        masks = Unmeasured([torch.ones(1 << 20, device="cuda")])
        train(make_net(), 2)
        del masks
    assert "masks" in {each.label for each in holdings_at_peak(recorded.profile, recorded.timeline)}


@pytest.mark.parametrize(("rows", "label"), [(1, "2 others"), (2, "2 others, 3 tensors")])
def test_small_owners_of_a_kind_are_counted_once(rows: int, label: str) -> None:
    with fxmem.record("h100") as recorded:
        layer, one = nn.Linear(1024, 1024).cuda(), torch.zeros(8, device="cuda")
        two = [torch.zeros(8, device="cuda") for _ in range(rows)]
        for _ in range(2):
            layer(torch.zeros(8, 1024, device="cuda")).sum().backward()
            torch.optim.SGD(layer.parameters()).step()
    assert label in {each.label for each in holdings_at_peak(recorded.profile, recorded.timeline)}
    del one, two


class Scaling(torch.autograd.Function):
    """A product whose backward is the program's own, and runs a module again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, again: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.again = again
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            ctx.again(x)
        return gradients[0] * weight, (gradients[0] * x).sum(0), None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.ones(1024)), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Scaling.apply(x, self.weight, self.again)
        return out


def test_the_backward_of_a_function_is_its_modules() -> None:
    with fxmem.record("h100", steps=2) as run:
        train(nn.Sequential(nn.Linear(1024, 1024), Scale(), nn.Linear(1024, 1024), Scale()).cuda(), 2)
    profile = run.profile
    modules = {
        name: {profile.nodes[op.node].module.removeprefix("net.") for op in profile.ops if op.name == f"aten.{name}"}
        for name in ("mul.Tensor", "sigmoid.default")
    }
    # "": of the loss.
    assert modules == {"mul.Tensor": {"", "1", "3"}, "sigmoid.default": {"1.again", "3.again"}}


def test_a_model_that_is_wrapped_before_it_is_called_is_its_wrapper_s() -> None:
    with fxmem.record("h100", steps=1, ranks=4) as run:
        torch.distributed.init_process_group("nccl")
        student, teacher = make_net(), make_net()
        student = nn.parallel.DistributedDataParallel(student)  # type: ignore[assignment]
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        x = batch()
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).pow(2).mean().backward()
        optimizer.step()
    rows = {row.title: row for row in module_rows(run.profile, run.timeline) if row.depth <= 2}
    assert {"student", "module", "teacher"} < rows.keys()
    assert "sequential" not in rows
    assert rows["student"].type_name == "DistributedDataParallel"
    assert rows["module"].figures.params == rows["teacher"].figures.params == 2 * (4 * MIB + 4096)


def test_data_parallel_is_looked_into() -> None:
    """It is a module of torch's own, as a layer is, which calls the program's model with all that it was given."""
    steps = {}
    for wraps in (False, True):
        with fxmem.record("h100", steps=1) as run:
            net = nn.DataParallel(make_net()) if wraps else make_net()
            train(net, 1)
        steps[wraps] = run
    profile = steps[True].profile
    assert [each.module.removeprefix("net.") for each in profile.calls] == ["net", "module"]
    assert [each.target for each in profile.nodes if each.op == "call_module"] == [
        f"net.module.{index}" for index in range(3)
    ]
    assert steps[True].peak.requested_bytes == steps[False].peak.requested_bytes
