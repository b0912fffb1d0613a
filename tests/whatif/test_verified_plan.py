"""A plan's peak is a promise: the analysis of the model that carries it out, and what a real run takes."""

from __future__ import annotations

import copy
import os
import re
import runpy
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem import analyze
from fxmem.errors import AnalysisError, ExceededError, UsageError
from fxmem.hardware.catalogue import CATALOGUE
from fxmem.memory import liveness
from fxmem.planning import STRATEGIES
from fxmem.planning.estimate import estimate
from fxmem.planning.regions.cost_tables import CostTables
from fxmem.records.plan import Plan
from fxmem.records.profile import Phase
from fxmem.records.units import Application, format_bytes
from fxmem.simulation.recording.observe.fx_writer import GraphWriter
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.whatif import plan_search, verified_plan
from tests.profiles import Log

pytestmark = pytest.mark.truth


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack() -> Analysis:
    return analyze(Stack(), torch.randn(1024, 64), target="cpu", optimizer="sgd")


def resnet(target: str = "h100", batch: int = 16) -> Analysis:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    return analyze(model, torch.zeros(batch, 3, 128, 128, device="meta"), target=target)


@pytest.mark.parametrize("application", list(Application))
def test_the_promise_is_kept_by_a_fresh_analysis_and_by_a_real_run(application: Application) -> None:
    analysis, share = stack(), 0.45
    plan = fxmem.plan(analysis, budget=share, application=application)
    assert plan.analysed
    assert plan.regions
    assert plan.after.requested_bytes <= share * plan.before.requested_bytes
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(1024, 64)
    planned = fxmem.checkpoint(copy.deepcopy(model), plan)
    assert analyze(planned, x, target="cpu", optimizer="sgd").peak.requested_bytes == plan.after.requested_bytes
    measured = measure_cpu(planned, StepRequest(args=(x,), optimizer="sgd"))
    # Each region keeps the state of the CPU's random numbers, 5,056 bytes, which is no tensor of the program.
    states = 5056 * (1 + sum(1 for _ in plan.all_regions()))
    assert (
        plan.after.requested_bytes
        <= measured.peak_without_scratch_bytes
        <= plan.after.requested_bytes * 1.0001 + states
    )


def test_gradients_and_losses_are_those_of_the_unplanned_model() -> None:
    plan = fxmem.plan(stack(), budget=0.5)
    torch.manual_seed(1)
    model, x = Stack(), torch.randn(256, 64)  # another batch size than the plan's
    planned = fxmem.checkpoint(copy.deepcopy(model), plan)
    results = []
    for each in (model, planned):
        torch.manual_seed(2)
        loss = each(x).square().mean()
        loss.backward()
        results.append([loss, *(p.grad for p in each.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Counting(Stack):
    """Writes to what it has read, which single operators could then not be made again from."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x * self.seen)
        self.seen += 1
        return out


def test_a_way_that_does_not_go_with_the_model_is_left_for_another() -> None:
    analysis = analyze(Counting(), torch.randn(1024, 64), target="cpu", optimizer=None)
    with pytest.raises(AnalysisError, match="what the model reads"):
        fxmem.plan(analysis, "mincut", 0.45)
    plan = fxmem.plan(analysis, budget=0.45)
    assert plan.application is not Application.OPERATORS
    assert plan.after.requested_bytes <= 0.45 * plan.before.requested_bytes


class Dropping(nn.Module):
    """Small, so that the states of the random generator that its dropout starts from weigh a lot."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("application", list(Application))
def test_states_of_the_random_generator_are_in_the_promise(application: Application) -> None:
    model, x, state = Dropping(), torch.randn(64, 32), torch.get_rng_state()
    plan = fxmem.plan(analyze(model, x, target="cpu", optimizer=None), budget=0.85, application=application)
    assert torch.equal(torch.get_rng_state(), state)
    measured = measure_cpu(fxmem.checkpoint(model, plan), StepRequest(args=(x,), optimizer=None))
    assert measured.peak_without_kernel_scratch_bytes == plan.after.requested_bytes


@pytest.mark.parametrize("application", list(Application))
def test_what_runs_again_is_told_apart(application: Application) -> None:
    analysis = resnet()
    plan = fxmem.plan(analysis, "auto", 0.93, application=application)
    before, after = analysis.profile, plan_search.apply_regions(analysis, plan.regions, plan.application).profile
    again = [after.ops[each.op] for each in after.recomputed_ops]
    computed = [Counter(op.name for op in ops if "empty" not in op.name) for ops in (again, after.ops, before.ops)]
    assert computed[0] == computed[1] - computed[2]
    assert before.recomputed_ops == before.restored == ()
    assert all(op.phase is Phase.BACKWARD for op in again)
    assert sum(each.read_bytes for each in after.recomputed_ops) > 0
    kept = {(index, after.storages[storage].nbytes) for index, node in enumerate(after.nodes) for storage in node.saved}
    restored = {(each.node, after.storages[each.storage].nbytes) for each in after.restored}
    saved = {
        (index, before.storages[storage].nbytes) for index, node in enumerate(before.nodes) for storage in node.saved
    }
    assert saved <= kept | restored  # each node's backward reads what it does without the plan
    assert {(each.node, each.storage) for each in after.restored}.isdisjoint(
        (i, storage) for i, node in enumerate(after.nodes) for storage in node.saved
    )


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_strategy_is_applied_and_analysed(strategy: Any) -> None:
    analysis = resnet()
    plan = fxmem.plan(analysis, strategy, None if not STRATEGIES.get(strategy).has_curve else 0.94)
    assert plan.analysed
    assert plan.regions
    assert plan.strategy == strategy
    assert plan.after.requested_bytes < plan.before.requested_bytes
    assert plan.after.allocated_bytes is not None
    assert plan.after.reserved_bytes is not None
    assert (plan.extra_flops or 0) > 0
    assert plan.after_seconds is not None
    assert plan.after_seconds > (plan.before_seconds or 0)


@pytest.mark.parametrize(("target", "cheaper"), [("h100", "few large"), ("cpu", "many small")])
def test_the_quicker_of_two_plans_is_cheaper_and_without_rates_that_of_fewer_flops(target: str, cheaper: str) -> None:
    def proposal(chosen: str, count: int, flops: int) -> plan_search.Proposal:
        log = Log(target=CATALOGUE[target].target)
        node = log.node("linear")
        with log.phase(Phase.FORWARD):
            for _ in range(count):
                with log.op("aten.mm.default", node, Phase.FORWARD, flops=flops, moved_bytes=8):
                    pass
        step: Any = SimpleNamespace(profile=log.profile())
        way: Any = SimpleNamespace(application=Application.MODULES)
        return plan_search.Proposal(way, chosen, (), step)

    both = proposal("few large", 10, 10**8), proposal("many small", 100, 10**6)
    assert min(both, key=lambda each: each.cost).chosen == cheaper


def test_a_budget_in_bytes_bounds_the_allocator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = r"in pieces \(PYTORCH_ALLOC_CONF=expandable_segments:True may help\)"
    with pytest.raises(ExceededError, match=pieces) as refused:
        fxmem.plan(resnet(batch=64), budget="550MiB", application="modules")
    least = re.search(r"--budget (\d+) gives it", str(refused.value))
    assert least is not None
    assert fxmem.plan(resnet(batch=64), budget=int(least[1]), application="modules").regions
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    analysis = resnet(batch=64)
    before = analysis.peak
    assert before.allocated_bytes is not None
    budget = 550 << 20
    assert before.allocated_bytes > budget
    plan = fxmem.plan(analysis, budget=budget)
    assert plan.budget_bytes == budget
    after = plan.after
    assert after.counted_bytes <= budget
    from fxmem.memory import allocator

    carried_out = plan_search.apply_regions(analysis, plan.regions, plan.application)
    assert carried_out.peak == after
    settings = allocator.read_settings(os.environ)
    assert allocator.replay(carried_out.profile, capacity_bytes=budget, settings=settings).shortage is None


def test_a_step_that_fits_needs_no_plan() -> None:
    plan = fxmem.plan(stack(), budget="1GiB")
    assert plan.regions == ()
    assert plan.after == plan.before
    assert plan.extra_flops == 0


def test_a_budget_out_of_reach_says_what_is_reached_and_what_bounds_it() -> None:
    with pytest.raises(
        ExceededError, match=r"within 1\.00 MiB .* no plan takes less than .*no plan can free: parameter"
    ) as refused:
        fxmem.plan(stack(), budget="1MiB")
    assert "\n" not in str(refused.value)


_LOOP = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x, scale):
        return self.lin((x * scale).sigmoid().tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(
                x,
                scale=0.5,
            )
        return x
"""


def test_the_code_for_blocks_in_a_loop_does_what_the_plan_does(tmp_path: Path) -> None:
    def analyse_file(name: str, source: str) -> Analysis:
        (tmp_path / f"{name}.py").write_text(source)
        names = runpy.run_path(str(tmp_path / f"{name}.py"))
        return analyze(names["Net"](), torch.zeros(64, 32), target="cpu", optimizer=None)

    plan = fxmem.plan(analyse_file("plain", _LOOP), budget=0.8, application="modules")
    edit = next(region.edit for region in plan.regions if region.modules[0].count(".") == 1)
    assert edit is not None
    assert {region.edit for region in plan.regions} == {edit}
    assert len(plan.regions) > 1
    before, after = (textwrap.indent(code, " " * 12) for code in (edit.source.code, edit.after))
    imports, _, lines = plan.to_code().partition("\n\n#")
    assert all(line in lines for line in (*edit.source.code.splitlines(), *edit.after.splitlines()))
    edited = analyse_file("edited", imports + "\n" + _LOOP.replace(before, after))
    generators = len(plan.regions) * torch.get_rng_state().nbytes  # checkpoint() keeps the CPU's state for each
    assert edited.peak.requested_bytes == plan.after.requested_bytes + generators < plan.before.requested_bytes


def test_a_peak_in_the_optimizer_names_the_form_of_it_that_takes_less() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    analysis = analyze(model, torch.randn(1, 2048), target="h100", optimizer="adamw")
    fused = format_bytes(analysis.vary(optimizer="adamw:fused").peak.counted_bytes)
    with pytest.raises(
        ExceededError, match=f"in optimizer .*; optimizer adamw:fused takes {fused}, which is within it"
    ):
        fxmem.plan(analysis, budget=0.95)


def test_what_is_reached_is_not_above_the_step_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # of which whole modules free nothing
    with pytest.raises(ExceededError) as refused:
        fxmem.plan(
            analyze(model, torch.randn(256, 64), target="cpu", optimizer=None), budget=0.6, application="modules"
        )
    reached, unplanned = re.search(
        r"reaches \S+ \S+ \(([\d,]+) bytes\) at the least \(without a plan (.*?)\)\.", str(refused.value)
    ).groups()
    assert format_bytes(int(reached.replace(",", ""))) == unplanned
    assert "with that plan" not in str(refused.value)


def test_a_loss_of_gradients_is_no_forward_of_the_modules() -> None:
    """A gradient penalty: its gradients are computed before backward begins."""

    def loss(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = out
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(64, 256), nn.Softplus(), nn.Linear(256, 256), nn.Softplus(), nn.Linear(256, 1)
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.requires_grad_()
            return x, self.layers(x)

    analysis = analyze(Critic(), (torch.randn(512, 64),), target="cpu", optimizer="sgd", loss=loss)
    flops = {node.name: node.forward_flops for node in analysis.profile.nodes}
    assert flops["layers_2"] == 2 * 512 * 256 * 256
    assert (flops["loss"] or 0) > 2 * 512 * 256 * 256
    plan = fxmem.plan(analysis, budget=0.96)
    assert plan.after.counted_bytes <= plan.budget_bytes
    with pytest.raises(ExceededError):  # a line, no traceback
        fxmem.plan(analysis, budget=0.6, application="modules")


def test_below_what_the_optimizer_takes_no_plan_is_tried() -> None:
    told: list[str] = []
    analysis = analyze(Stack(depth=3), torch.randn(256, 64), target="cpu", optimizer="adamw")
    floor = liveness.peak_in_phase(analysis.profile, Phase.OPTIMIZER)
    assert floor.requested_bytes == CostTables(analysis.profile, ()).floor == sum(floor.by_kind.values())
    found = f"no plan takes less than .*{floor.requested_bytes:,} bytes.* in optimizer"
    with pytest.raises(ExceededError, match=found):
        verified_plan.plan(analysis, budget=floor.requested_bytes - 1, application="modules", progress=told.append)
    assert not [each for each in told if "analysing the step" in each]
    with pytest.raises(ExceededError, match=r"strategy auto reaches .* at the least"):
        verified_plan.plan(analysis, budget=floor.requested_bytes, application="modules", progress=told.append)
    assert [each for each in told if "analysing the step" in each]


class Remembering(nn.Module):
    """Fills a cache in its first forward, and counts forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache, self.ran = nn.Linear(8, 8), None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ran = self.ran
        ran.append("forward")
        if self.cache is None:
            self.cache = x.detach().sin()
        out = torch.tanh(self.linear(x)) * self.cache
        out.register_hook(lambda _: ran.append("backward"))
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembering:
        made = type(self)()
        made.linear, made.ran = copy.deepcopy(self.linear, memo), self.ran
        return made


def test_a_survey_is_that_of_the_forward_in_the_steady_state_and_runs_no_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Remembering()
    analysis = analyze(model, torch.zeros(4, 8, device="meta"), target="cpu", optimizer=None)
    assert model.ran == ["forward", "backward"] * 2
    model.ran.clear()
    monkeypatch.setattr(GraphWriter, "call", None)  # no graph is written, either
    calls, values = verified_plan.survey(analysis)
    assert model.ran == ["forward"] * 2
    assert [call.name for call in calls] == ["aten.addmm.default", "aten.tanh.default", "aten.mul.Tensor"]
    assert [value.saved for value in values] == [False, True, False]


def check_parts(told: list[str]) -> None:
    counted = [re.match(r"(\d+) of (\d+), ", each) for each in told if "analysing the step" in each]
    found = [(int(each[1]), int(each[2])) for each in counted if each is not None]
    assert len(found) == len(counted) > 0
    assert found == sorted(found)
    assert {total >= number for number, total in found} == {True}


def test_progress_says_which_part_of_how_many_is_being_done() -> None:
    told: list[str] = []
    verified_plan.plan(stack(), budget=0.7, progress=told.append)
    check_parts(told)


def test_without_a_budget_there_is_the_curve() -> None:
    told: list[str] = []
    plan = verified_plan.plan(stack(), progress=told.append)
    check_parts(told)
    peaks = [point.peak.requested_bytes for point in plan.curve]
    extra = [point.extra_flops or 0 for point in plan.curve]
    assert len(plan.curve) > 3
    assert peaks == sorted(peaks, reverse=True)
    assert extra == sorted(extra)
    assert plan.curve[0].regions == ()
    assert plan.regions in [point.regions for point in plan.curve]


def test_the_users_model_is_left_as_it_was() -> None:
    model = Stack()
    classes = [type(module) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(64, 64)
    generator = torch.get_rng_state()
    fxmem.plan(analyze(model, x, target="cpu"), budget=0.95)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert fxmem.uncheckpoint(fxmem.checkpoint(model, fxmem.plan(stack(), budget=0.6))) is model
    assert [type(module) for module in model.modules()] == classes


def test_a_plan_of_regions_and_one_of_single_operators_are_not_asked_for_together() -> None:
    with pytest.raises(
        UsageError, match="expected a plan of regions, got strategy 'mincut', which is about single operators"
    ):
        fxmem.plan(stack(), "mincut", 0.6, regions_only=True)
    with pytest.raises(
        UsageError, match="expected a plan of regions, got application 'operators', which is about single operators"
    ):
        fxmem.plan(stack(), budget=0.6, application="operators", regions_only=True)


def test_a_model_that_cannot_be_traced_symbolically_is_planned_by_modules_and_that_is_said() -> None:
    class Branching(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 10 and len(x) % 2 == 0:
                return super().forward(x)
            return self.head(x)

    analysis = analyze(Branching(), torch.randn(1024, 64), target="cpu")
    assert fxmem.plan(analysis, budget=0.6).application is Application.OPERATORS  # which needs no symbolic trace
    plan = fxmem.plan(analysis, budget=0.6, regions_only=True)
    assert plan.application is Application.MODULES
    assert any("regions are whole modules" in assumption.text for assumption in plan.assumptions)
    with pytest.raises(UsageError):
        fxmem.plan(analysis, budget=0.6, application="graph")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "cube"}, "expected strategy to be one of auto"),
        ({"budget": "much"}, "expected a budget as bytes"),
        ({"budget": 0.5, "application": "magic"}, "expected application 'operators' or 'modules' or 'graph'"),
        ({"budget": 0.5, "strategy": "modules", "application": "graph"}, "with strategy 'modules'"),
    ],
)
def test_what_is_misspelt_is_said_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        fxmem.plan(stack(), **arguments)
    assert "\n" not in str(refused.value)


def test_inference_has_nothing_to_plan() -> None:
    with pytest.raises(UsageError, match="training step"):
        fxmem.plan(analyze(Stack(), torch.randn(8, 64), target="cpu", mode="infer"), budget=0.5)


def test_an_estimate_from_a_report_says_that_it_is_one() -> None:
    analysis = stack()
    plan = estimate(analysis.report(), analysis.peak, "auto", 0.6)
    assert not plan.analysed
    assert plan.regions
    assert plan.after.requested_bytes <= 0.6 * plan.before.requested_bytes
    assert any("has not been applied" in assumption.text for assumption in plan.assumptions)
    assert Plan.model_validate_json(plan.to_json()).to_json() == plan.to_json()
    with pytest.raises(ExceededError):
        estimate(analysis.report(), analysis.peak, "auto", 1000)
    assert estimate(analysis.report(), analysis.peak, "auto", None).curve


def test_a_plan_can_be_drawn(tmp_path: Any) -> None:
    analysis = stack()
    plan = fxmem.plan(analysis, budget=0.6)
    analysis.save_svg(tmp_path / "plan.svg", plan=plan)
    assert "checkpoint" in (tmp_path / "plan.svg").read_text()


class DenseBlock(nn.Module):
    """Two layers as DenseNet's: each concatenates all before it, normalises, activates and convolves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16 + 8 * i) for i in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(16 + 8 * i, 8, 3, padding=1) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.stem(x)]
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            found.append(convolution(torch.relu(norm(torch.cat(found, 1)))))
        return torch.cat(found, 1)


def test_norms_are_computed_again_and_convolutions_are_not() -> None:
    torch.manual_seed(0)
    model, x = DenseBlock(), torch.randn(4, 3, 32, 32)
    analysis = fxmem.analyze(model, x, target="cpu", keep_outputs=False)
    plan = fxmem.plan(analysis, "norms")
    assert [[name.split("_")[0] for name in region.nodes] for region in plan.regions] == [
        ["cat", "norms", "relu", "convolutions"]
    ] * 3
    channel, statistics = (
        4 * 4 * 32 * 32,
        2 * 4 * (16 + 24),
    )  # bytes of a channel of the batch; mean and deviation of the two layers that are not back yet
    before, after = (
        2 * (16 + 24 + 32),
        2 * 32 + 16 + 8 + 8,
    )  # what norms and convolutions keep; what the last layer has again, and all its inputs
    assert plan.before.requested_bytes - plan.after.requested_bytes == (before - after) * channel + statistics
    convolved = sum(node.forward_flops or 0 for node in analysis.profile.nodes if node.name.startswith("convolutions"))
    assert plan.extra_flops is not None
    assert 0 < plan.extra_flops < convolved / 10
    outputs, gradients = [], []
    for each in (copy.deepcopy(model), fxmem.checkpoint(copy.deepcopy(model), plan)):
        out = each(x)
        out.square().sum().backward()
        outputs.append(out)
        gradients.append([p.grad for p in each.parameters()] + list(each.buffers()))
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    run = measure_cpu(fxmem.checkpoint(model, plan), StepRequest(args=(x,)))
    # What the CPU's convolutions take within a call is theirs; each region that runs again keeps the generator's 5,056
    # bytes.
    assert 0 <= run.peak_without_kernel_scratch_bytes - plan.after.requested_bytes <= 3 * 5056 + 256
    assert not fxmem.plan(fxmem.analyze(nn.Linear(4, 4), torch.zeros(2, 4), target="cpu"), "norms").regions


class WithItsOwnCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.first, self.second, self.third = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(checkpoint(self.first, x, use_reentrant=False)))


def test_plans_of_a_model_that_checkpoints_already() -> None:
    analysis = analyze(WithItsOwnCheckpoint(), torch.randn(1024, 64), target="h100")
    plan = fxmem.plan(analysis)
    assert plan.extra_flops is not None
    assert any((point.extra_flops or 0) < 0 for point in plan.curve)  # it recomputes less than the program's own
    cheapest = min(plan.curve, key=lambda point: point.extra_flops or 0)
    assert cheapest.extra_flops is not None
    step = sum(op.flops or 0 for op in analysis.profile.ops)
    planned = verified_plan.apply_regions(analysis, cheapest.regions, cheapest.application)
    assert sum(op.flops or 0 for op in planned.profile.ops) - step == cheapest.extra_flops
    assert fxmem.advise(analysis, quick=True).suggestions


def test_the_ends_of_the_curve_are_found_with_fewer_analyses() -> None:
    analysis, told, all_told = analyze(Stack(depth=3), torch.randn(4096, 64), target="cpu"), list[str](), list[str]()
    whole = fxmem.plan(analysis, progress=all_told.append)
    ends = verified_plan.plan_ends(analysis, progress=told.append)
    assert ends.model_copy(update={"curve": ()}) == whole.model_copy(update={"curve": ()})
    assert ends.curve[-1] == whole.curve[-1]
    counts = [sum("analysing the step" in each for each in stages) for stages in (told, all_told)]
    assert 0 < 2 * counts[0] < counts[1]
