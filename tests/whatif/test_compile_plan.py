"""Plans for compiled steps: the share that AOTAutograd's partitioner may keep."""

import functools
import json

import pytest
import torch
from jsonschema import Draft202012Validator
from torch import nn

import fxmem
from fxmem.__main__ import main
from fxmem.errors import ExceededError, UsageError
from fxmem.records import schemas
from fxmem.records.parts import CompileSettings
from fxmem.records.plan import CompilePlan
from fxmem.show.text import plan as reporting
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.verified_plan import plan_compiled


@functools.cache
def step() -> Analysis:
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(2))
    return fxmem.analyze(nn.Sequential(*blocks), torch.zeros(2048, 64), target="cpu", optimizer="sgd", compile=True)


@functools.cache
def plan() -> CompilePlan:
    return plan_compiled(step(), 0.9)


@pytest.mark.truth
def test_the_largest_share_that_keeps_the_budget_is_chosen() -> None:
    made = plan()
    kept = [each for each in made.points if each.peak.counted_bytes <= made.budget_bytes]
    exceeded = [each for each in made.points if each.peak.counted_bytes > made.budget_bytes]
    assert made.budget_bytes == int(0.9 * step().peak.counted_bytes)
    assert made.chosen == max(each.activation_memory_budget for each in kept)
    assert exceeded[-1].activation_memory_budget - made.chosen == pytest.approx(1 / 32)
    again = step().vary(compile=CompileSettings(activation_memory_budget=made.chosen))
    assert again.peak == made.after
    assert again.profile.step.compiled is not None
    assert again.profile.step.compiled.options == {"activation_memory_budget": repr(made.chosen)}


@pytest.mark.truth
def test_the_plan_of_eager_code_stands_beside_it() -> None:
    made = plan()
    assert made.plan is not None
    assert made.plan.after.counted_bytes <= made.budget_bytes
    assert made.plan.before == made.eager
    text = reporting.budget_table(made, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert f"config.activation_memory_budget = {made.chosen:g}\n" in text
    assert f"->  compiled, {made.chosen:g} " in text


@pytest.mark.truth
def test_it_is_written_as_its_schema_says() -> None:
    document = json.loads(plan().model_dump_json())
    Draft202012Validator(json.loads(schemas.text("compile_plan"))).validate(document)
    assert CompilePlan.model_validate(document) == plan()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "1GiB", "--code"], "expected --compile without --code"),
        ([], "expected --compile with --budget"),
    ],
)
def test_the_command_line_refuses_what_does_not_go_with_compile(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "torch.nn:Linear(2,2)", "--input", "1x2", "--compile", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.truth
def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ExceededError, match="the least, with activation_memory_budget="):
        plan_compiled(fxmem.analyze(nn.Linear(2, 2), torch.zeros(1, 2), target="cpu", compile=True), 8)
    with pytest.raises(UsageError, match="expected a training step that is compiled as a whole"):
        plan_compiled(fxmem.analyze(nn.Linear(2, 2), torch.zeros(1, 2), target="cpu"), 0.5)
