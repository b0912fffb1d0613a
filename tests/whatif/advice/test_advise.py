"""Advice: ranked by what each change is worth, and the cheapest set that keeps a budget."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jsonschema import Draft202012Validator
from torch import nn

import fxmem
from fxmem import analyze
from fxmem.__main__ import main
from fxmem.records import schemas
from fxmem.records.advice import Advice, Effect
from fxmem.records.findings import Finding
from fxmem.records.units import format_bytes
from fxmem.show.text import advice as advice_reporting
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.advice import suggestions, variant
from fxmem.whatif.advice.changes import ModelBench
from tests.cores import two_cores

pytestmark = [pytest.mark.truth, pytest.mark.usefixtures("compiler")]


class Speaker(nn.Module):
    def __init__(self, vocabulary: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(1)
        )

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


def the_loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["loss"]


def speaker(**options: Any) -> Analysis:
    return analyze(Speaker(), torch.zeros(8, 128, dtype=torch.int64), loss=the_loss, **{"target": "h100", **options})


@pytest.fixture(scope="module")
def advice(compiler: None) -> Advice:
    analysis = speaker(target="cpu")
    with two_cores():
        return fxmem.advise(analysis, budget=0.6)


def test_what_frees_most_comes_first_and_everything_tried_is_accounted_for(advice: Advice) -> None:
    saved = [each.saved_bytes for each in advice.suggestions]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 0
    keys = {each.key for each in (*advice.suggestions, *advice.refused)}
    assert keys >= {
        "inplace",
        "bf16-autocast",
        "bf16-weights",
        "channels-last",
        "micro-batches-2",
        "chunked-loss",
        "sgd-optimizer",
        "checkpoint",
        "compile",
    }
    assert any(key.startswith("release:head") for key in keys)
    for each in advice.suggestions:
        assert each.saved_bytes == advice.before.counted_bytes - each.peak.counted_bytes


def test_compiling_is_worth_what_the_compiled_step_takes_less(advice: Advice) -> None:
    row = next(each for each in advice.suggestions if each.key == "compile")
    assert row.peak == speaker(target="cpu", compile=True).peak
    assert row.code == "model = torch.compile(model)"


def test_what_is_not_to_be_had_has_a_reason(advice: Advice) -> None:
    reasons = {each.key: each.reason for each in advice.refused}
    assert reasons["channels-last"] == "the model has no convolutions"
    assert all(reasons.values())


def test_the_set_that_keeps_a_budget_changes_the_numbers_as_little_as_possible(advice: Advice) -> None:
    assert advice.together is not None
    assert advice.budget_bytes is not None
    assert advice.together.peak.counted_bytes <= advice.budget_bytes
    assert advice.together.effect != "training"


def test_a_step_that_keeps_its_budget_needs_nothing_and_one_that_never_can_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    analysis = speaker(target="cpu")
    assert fxmem.advise(analysis, budget="1GiB", quick=True).together is None

    seen: list[Any] = []
    analyze_request, the_loss_of_torch = variant.analyze_request, F.cross_entropy

    def recorded(model: nn.Module, request: StepRequest) -> Any:
        parameters = tuple((p.dtype, p.requires_grad) for p in model.parameters())
        inputs = tuple((x.shape, x.dtype) for x in request.args)
        rest = {
            field.name: getattr(request, field.name)
            for field in dataclasses.fields(request)
            if field.name not in ("args", "kwargs")
        }
        seen.append((str(model), parameters, inputs, repr(rest), F.cross_entropy is the_loss_of_torch))
        return analyze_request(model, request)

    monkeypatch.setattr(variant, "analyze_request", recorded)
    hopeless = fxmem.advise(analysis, budget="1MiB", plans=False)
    assert hopeless.together is None
    assert "no set of these changes keeps the budget" in advice_reporting.table(hopeless)
    assert len(seen) > 10
    assert len(seen) == len(set(seen)), "a step was analysed twice"


def test_quick_advice_is_a_part_of_the_whole_and_comes_first(advice: Advice) -> None:
    stages: list[str] = []
    found: list[str] = []
    analysis = speaker(target="cpu")
    quick = suggestions.try_changes(
        ModelBench(analysis),
        None,
        plans=True,
        quick=True,
        progress=stages.append,
        found=lambda each: found.append(each.key),
    )
    whole = {each.key: each for each in advice.suggestions}
    assert quick.suggestions == tuple(each for each in advice.suggestions if each.key in suggestions.QUICK)
    assert "bf16-autocast" in found
    assert set(found) == {each.key for each in quick.suggestions} < set(whole)
    count = len(quick.suggestions) + len(quick.refused)
    assert [stage.partition(",")[0] for stage in stages] == [f"{n} of {count}" for n in range(1, count + 1)]


def test_what_was_found_before_an_interrupt_is_the_advice() -> None:
    bench, told = ModelBench(speaker(target="cpu")), list[str]()

    def interrupt(what: str) -> None:
        told.append(what)
        if what.startswith("4 of"):
            raise KeyboardInterrupt

    advice = suggestions.try_changes(bench, 0.5, plans=True, progress=interrupt, interruptible=True)
    assert advice.interrupted
    assert "bf16-autocast" in [each.key for each in advice.suggestions]
    untried = [each.key for each in advice.refused if each.reason == "not tried: interrupted"]
    assert len(untried) > 5
    assert {"compile", "torchao-8bit"} <= {*untried}
    assert advice.together is None
    assert "Cut short   interrupted" in advice_reporting.table(advice)
    with pytest.raises(KeyboardInterrupt):
        suggestions.try_changes(bench, None, plans=False, progress=interrupt)


def test_changes_that_free_little_are_one_line(advice: Advice) -> None:
    first, second, *_ = advice.suggestions
    peak, reserved = advice.before.counted_bytes, advice.before.model_copy(update={"reserved_bytes": 10**9})
    little = second.model_copy(
        update={"title": "little: of it", "saved_bytes": peak // 101, "growth_bytes": None, "code": "small = 1"}
    )
    lower = reserved.model_copy(update={"reserved_bytes": 10**9 - peak // 2})
    alike = little.model_copy(update={"title": "lower reserved", "saved_bytes": 0, "peak": lower})
    before = advice.model_copy(update={"before": reserved, "budget_bytes": None, "together": None})
    head = first.model_copy(update={"peak": reserved})
    little = little.model_copy(update={"peak": reserved})
    text = advice_reporting.table(before.model_copy(update={"suggestions": (head, little, alike)}), width=140)
    assert f"Under 1 %   little ({format_bytes(peak // 101)})" in text
    assert "2. lower reserved" in text
    assert "small = 1" in text.partition("2.  ")[2], "the code of what has a row"
    assert text.count("small = 1") == 1
    none = advice_reporting.table(before.model_copy(update={"suggestions": (little,)}))
    assert "Nothing that was tried frees 1 % of the peak." in none
    assert "Next" not in none


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_table_fits_its_width(advice: Advice, width: int) -> None:
    text = advice_reporting.table(advice, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "Together" in text


def test_what_is_found_and_the_best_change_that_is_no_other_task_stand_at_the_top(advice: Advice) -> None:
    found = Finding(cause="own", text="all of it is kept", nbytes=2048, change="del of it", saved_bytes=1024)
    first, *others = advice.suggestions
    changes = (first.model_copy(update={"effect": "training"}), first.model_copy(update={"title": "mild"}), *others)
    shown = advice.model_copy(update={"findings": (found,), "suggestions": changes})
    head, _, _ = advice_reporting.table(shown, width=140).partition("\n\n")
    told = "all of it is kept, 2.00 KiB at the peak. To do: del of it (tried: 1.00 KiB less at the peak)"
    assert f"Found       {told}" in head
    assert "Next        change 2: mild" in head


def test_a_step_that_does_not_fit_says_so_and_which_changes_do(advice: Advice) -> None:
    first, second, *_ = advice.suggestions
    small = advice.target.model_copy(update={"name": "small", "memory_bytes": advice.before.counted_bytes - 1})
    fitting = first.model_copy(update={"peak": first.peak.model_copy(update={"fits": True})})
    changed = {"target": small, "suggestions": (fitting, second), "budget_bytes": None}
    shown = advice.model_copy(update={**changed, "before": advice.before.model_copy(update={"fits": False})})
    text = advice_reporting.table(shown, width=140)
    assert "Memory      does NOT fit: " in text.partition("\n\n")[0]
    assert [line[-3:].strip() for line in text.splitlines() if re.match(r"[12]\. ", line)] == ["yes", "no"]
    fits = advice_reporting.table(advice.model_copy(update={"target": small}), width=140)
    assert "Fits" not in fits


@pytest.mark.parametrize(
    ("budget", "fits", "effect", "said"),
    [
        (1, None, "none", "with it, still above the budget; backward runs other operators"),
        (
            None,
            False,
            "training",
            "with it, still too much for cpu; backward runs other operators: another optimisation",
        ),
        (None, True, "rounding", "with it; backward runs other operators: gradients differ by rounding"),
    ],
)
def test_a_patch_says_what_it_does_not_reach(
    advice: Advice, budget: int | None, fits: bool | None, effect: Effect, said: str
) -> None:
    first = advice.suggestions[0]
    peak = first.peak.model_copy(update={"fits": fits})
    patched = first.model_copy(
        update={"peak": peak, "effect": effect, "same_backward": False, "patch": "+++ b/x.py\n+y"}
    )
    shown = advice.model_copy(update={"patched": patched, "budget_bytes": budget})
    assert f"{said}\n" in advice_reporting.table(shown, width=200)


def test_advice_has_what_is_found_in_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding(cause="own", text="all of it is kept", nbytes=2048, change="del of it")
    monkeypatch.setattr(suggestions, "QUICK", ())
    monkeypatch.setattr(Analysis, "findings", (found,))
    assert fxmem.advise(speaker(), quick=True).findings == (found,)


def test_it_is_written_as_its_schema_says(advice: Advice) -> None:
    document = json.loads(advice.model_dump_json())
    Draft202012Validator(json.loads(schemas.text("advice"))).validate(document)
    assert Advice.model_validate(document) == advice


def test_inference_has_changes_of_its_own() -> None:
    advice = fxmem.advise(
        analyze(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(4, 3, 64, 64), mode="infer")
    )
    keys = {each.key for each in (*advice.suggestions, *advice.refused)}
    assert "bf16-weights" in keys
    assert not [key for key in keys if "optimizer" in key or key.startswith("checkpoint")]


def test_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), "
        "nn.LayerNorm(32), nn.GELU())))\n"
    )
    monkeypatch.chdir(tmp_path)
    common = ["own.py:build", "--input", "2048x32", "--target", "cpu", "--quiet"]
    assert main(["advise", *common, "--no-plans", "--budget", "100KiB"]) == 4
    assert main(["advise", *common, "--budget", "much"]) == 2
    capsys.readouterr()
    assert main(["advise", *common[:-1], "--quick"]) == 0
    out, err = capsys.readouterr()
    assert "fxmem: bfloat16 autocast: saves " in err
    assert "bfloat16 autocast" in out
    assert "Saves" in out
    assert "checkpoints" not in out
    assert main(["plan", *common, "--budget", "70%", "--json", "plan.json", "--svg", "plan.svg"]) == 0
    assert "kept" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["analysed"] is True
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert main(["max-batch", *common, "--budget", "20MB", "--json", "plain.json"]) == 0
    assert main(["max-batch", *common, "--budget", "20MB", "--plan", "plan.json", "--json", "planned.json"]) == 0
    sizes = [json.loads((tmp_path / name).read_text())["largest"] for name in ("plain.json", "planned.json")]
    assert sizes[1] > 1.2 * sizes[0]
    assert main(["max-batch", *common, "--budget", "20MB", "--plan", "sizes.json"]) == 2
    capsys.readouterr()
    assert main(["plan", *common, "--budget", "70%", "--application", "operators", "--code"]) == 0
    assert 'fxmem.checkpoint(model, fxmem.load_plan("plan.json"))' in capsys.readouterr().out
    assert main(["plan", *common, "--budget", "1KiB"]) == 4
    assert "no plan can free" in capsys.readouterr().err
    assert main(["analyze", *common, "--json", "report.json"]) == 0
    capsys.readouterr()
    assert main(["plan", "report.json", "--budget", "70%"]) == 0
    assert "an estimate" in capsys.readouterr().out
    assert main(["plan", "report.json", "--strategy", "cube"]) == 2


def test_parts_are_frozen_and_batches_wait_on_the_command_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), "
        "nn.Linear(512, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    common = ["analyze", "own.py:build", "--input", "4x64", "--target", "cpu", "--quiet", "--json", "-"]

    def report(*options: str) -> dict[str, Any]:
        assert main([*common, *options]) == 0
        return json.loads(capsys.readouterr().out)

    plain = report()["peak"]["by_kind"]
    for options in (["--freeze", "0"], ["--freeze", "0.*"], ["--freeze", "0.weight", "--freeze", "0.bias"]):
        frozen = report(*options)
        assert (
            plain["optimizer_state"] - frozen["peak"]["by_kind"]["optimizer_state"] == 8 * (64 * 512 + 512) + 8
        )  # two float32 per number, two counters
        assert any("frozen by --freeze" in each["text"] for each in frozen["assumptions"])
    waiting = report("--prefetch", "3")
    assert waiting["peak"]["by_kind"]["input"] == 4 * plain["input"]
    assert waiting["step"]["prefetch"] == 3
    assert main([*common, "--freeze", "O"]) == 2
    assert "expected --freeze with a module or a pattern of parameters' names, got 'O'" in capsys.readouterr().err
    assert main([*common, "--prefetch", "-1"]) == 2
    assert "expected prefetch to be at least 0, got -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("analyze own.py:buidl", "own.py has no 'buidl'; closest: build"),
        (
            "advise own.py:build --input 4x64 --budget 24Gigs",
            "expected a budget as bytes (8589934592), with a unit (8GiB, 500MB)",
        ),
        ("cards own.py:build --input 4x64 --only h1000", "unknown target 'h1000': did you mean h100 or v100?"),
        ("max-batch own.py:build --input 4x64 --dim sq", "expected a dimension as batch, seq, a number or NAME:AXIS"),
        (
            "max-batch own.py:build --input 4x64 --budget 50%",
            "expected --budget in bytes or with a unit (16GiB), got '50%'",
        ),
        ("plan own.py:build --input 4x64 --strategy norm", "got 'norm', did you mean norms?"),
        ("advise own.py:build --bugdet 24GiB", "no option --bugdet, did you mean --budget?"),
        ("advice own.py:build", "got 'advice', did you mean advise?"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_write(
    command: str, complaint: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(64, 8)\n")
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), *([] if "advice" in command else ["--quiet"])]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_a_point_of_a_curve_is_shown_for_what_it_is() -> None:
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)) for _ in range(6))
    )
    plan = fxmem.plan(fxmem.analyze(model, torch.randn(256, 64), target="cpu", optimizer=None))
    assert len(plan.curve) > 3
    for point in plan.curve[1:]:
        shown = suggestions._move_along(plan, point)
        assert (shown.application, shown.chosen, shown.regions, shown.after) == (
            point.application,
            point.strategy,
            point.regions,
            point.peak,
        )
        assert not shown.extent.startswith("0 ")
