"""Plans of programs: each is tried by running the program again, and holds when the program does it itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import plan as plan_command
from fxmem.errors import AnalysisError, ExceededError, UsageError
from fxmem.hardware.context import give_room
from fxmem.planning import Planner
from fxmem.records.plan import Plan
from fxmem.records.profile import Target
from fxmem.records.units import Application
from fxmem.whatif import card_fit
from fxmem.whatif.program_step import ProgramEdits, program_step

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def train(change=lambda model: model):
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    change(model)
    for _ in range(4):
        model(torch.randn(1 << 14, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
scope: dict[str, Any] = {"__name__": "script"}
exec(SCRIPT, scope)
train = scope["train"]


def test_a_planned_function_is_what_checkpoints_in_it_make_it() -> None:
    told: list[str] = []
    plan = fxmem.plan(train, "modules", "60%", target="rtx4090", steps=2, progress=told.append)
    assert plan.application is Application.MODULES
    assert plan.analysed
    assert told[0] == "running the program as it is"
    assert [region.modules[0].partition(".")[0] for region in plan.regions] == ["blocks"] * len(plan.regions)
    with fxmem.record("rtx4090", steps=2) as before:
        train()
    with fxmem.record("rtx4090", steps=2) as after:
        train(lambda model: fxmem.checkpoint(model, plan))
    assert (plan.before, plan.after) == (before.peak, after.peak)
    assert plan.after.counted_bytes <= 0.6 * plan.before.counted_bytes < plan.before.counted_bytes
    assert plan.extra_flops is not None
    assert plan.extra_flops > 0


@pytest.mark.truth
def test_a_function_is_planned_for_each_card_that_is_too_small() -> None:
    step = program_step(train, target="rtx4090", steps=2)
    least = fxmem.plan(step, "modules", "60%").after.counted_bytes
    small, large = (
        give_room(Target(name=name, device="cuda", capability=(8, 9)), least + (more << 20))
        for name, more in (("small", 32), ("large", 1 << 10))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_fit, "choose_cards", lambda names: [small, large])
        fits = {fit.card: fit for fit in card_fit.cards(step, plans=True).points}
    assert fits["large"].fits
    assert not fits["small"].fits
    assert fits["small"].plan is not None
    assert fits["small"].plan.after.counted_bytes <= least + (32 << 20)
    assert {region.modules[0].partition(".")[0] for region in fits["small"].plan.regions} == {"blocks"}


def test_the_curve_of_a_function_falls() -> None:
    plan = fxmem.plan(train, target="rtx4090", steps=1)
    peaks = [point.peak.counted_bytes for point in plan.curve]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] == plan.before.counted_bytes > peaks[-1]
    assert {path.split(".")[0] for point in plan.curve for each in point.regions for path in each.modules} == {"blocks"}


def test_what_the_curve_reaches_is_found_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    step, find = program_step(train, target="rtx4090", steps=1), Planner.find
    lowest, whole = fxmem.plan(step).curve[-1].peak.counted_bytes, step.peak.counted_bytes
    # As where estimates are off: of all that may be lowest by them, another is once it is analysed.
    monkeypatch.setattr(Planner, "smallest", lambda self: find(self, "flat", None))
    monkeypatch.setattr(Planner, "find", lambda *_: None)
    assert fxmem.plan(step, budget=(lowest + 1) / whole).after.counted_bytes == lowest
    with pytest.raises(ExceededError, match=rf"reaches .* \({lowest:,} bytes\) at the least"):
        fxmem.plan(step, budget=(lowest - 1) / whole)


def test_what_no_plan_reaches() -> None:
    with pytest.raises(ExceededError, match=r"no plan takes less than .* of it no plan can free: parameter"):
        fxmem.plan(train, budget="5%", target="rtx4090", steps=1)


def test_a_budget_beyond_the_card_is_bounded_by_what_a_context_leaves() -> None:
    def plan_on(room: int, budget: str) -> Plan:
        card = give_room(Target(name="small", device="cuda", capability=(8, 9)), room)
        step = fxmem.analyze(scope["Net"](), torch.zeros(1 << 14, 64), target=card)
        return fxmem.plan(step, budget=budget, application="modules")

    room = plan_on(1 << 30, "60%").after.reserved_bytes or 0
    plan = plan_on(room, "1GiB")
    assert (plan.budget_bytes, plan.before.fits, plan.after.fits) == (1 << 30, False, True)
    assert plan.after.reserved_bytes == room
    assert "Memory      does NOT fit" in str(plan_on(room, "95%"))
    with pytest.raises(
        ExceededError, match=r"within 40\.0 MiB .*, the room on small beside a CUDA context; .*has less"
    ):
        plan_on(40 << 20, "1GiB")


def evaluate() -> None:
    with torch.no_grad():
        nn.Linear(64, 64).cuda()(torch.zeros(1, 64, device="cuda"))


def train_two() -> None:
    one, other = scope["Net"]().cuda(), scope["Net"]().cuda()
    other(one(torch.zeros(1 << 14, 64, device="cuda"))).sum().backward()


def test_programs_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected the analysis of a training step"):
        fxmem.plan(evaluate, target="rtx4090")
    with pytest.raises(UsageError, match="regions would be in one, other, and a plan is for one"):
        fxmem.plan(train_two, "modules", "40%", target="rtx4090")
    with pytest.raises(UsageError, match="expected application 'modules' for a program, got 'graph'"):
        fxmem.plan(train, application="graph", target="rtx4090")
    with pytest.raises(UsageError, match="expected no steps: the analysis has its settings"):
        fxmem.plan(fxmem.analyze(nn.Linear(2, 2), torch.zeros(1, 2), target="cpu"), steps=3)

    monkeypatch.setattr(ProgramEdits, "prepare", lambda *_: None)
    with pytest.raises(AnalysisError, match="the program, run again, did not recompute model"):
        fxmem.plan(train, "modules", "60%", target="rtx4090", steps=1)


def command(*words: str) -> tuple[int, str]:
    return plan_command.run(Parser().add_arguments(plan_command.ARGUMENTS).parse_args(words))


@pytest.mark.parametrize("verb", [fxmem.plan, fxmem.advise])
def test_a_model_where_an_analysis_belongs(verb: Any) -> None:
    with pytest.raises(UsageError, match=r"expected an analysis or a function that trains; got a model, Linear: give"):
        verb(nn.Linear(2, 2))


def test_inputs_where_a_strategy_belongs() -> None:
    with pytest.raises(UsageError, match=r"expected strategy to be one of auto, .*; got a Tensor$"):
        fxmem.plan(fxmem.analyze(nn.Linear(2, 2), torch.ones(1, 2)), torch.ones(1, 2))  # type: ignore[arg-type]


@pytest.mark.truth
def test_plan_of_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "own.py", tmp_path / "plan.json"
    script.write_text(f"{SCRIPT}\ntrain()\n")
    program = ("--target", "rtx4090", "--steps", "2", "--run", str(script))
    code, text = command("--budget", "60%", "--strategy", "modules", "--json", str(out), "--quiet", *program)
    assert code == 0
    plan = Plan.model_validate_json(out.read_text())
    assert plan.after.counted_bytes <= (plan.budget_bytes or 0) < plan.before.counted_bytes
    assert "kept" in text
    for wrong, message in (
        (("--application", "grpah"), "one of modules, graph, operators; got 'grpah', did you mean graph?"),
        (("--application", "operators"), "expected application 'modules' for a program"),
        (("--mode", "infer"), "expected --run without --mode"),
        (("report.json",), "one of the two"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            command(*wrong, *program)
