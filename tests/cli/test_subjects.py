"""Every verb that reads a step takes whatever has one: a model, a generation, a report, a program."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxmem.__main__ import main
from fxmem.records.parts import HostUse
from fxmem.simulation.run.host_memory import HostMeter
from tests import ROOT

PROGRAM = """
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(device)
called = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    called(torch.randn(32, 64, device=device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODEL = """
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
"""
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 64}
SMALL = ["hf:GPT2LMHeadModel", *(word for name, size in SIZES.items() for word in ("--set", f"{name}={size}"))]
GENERATION = [*SMALL, "--prompt", "8", "--new", "4"]
Json = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with a program and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "own.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Json:
    """The document that a command writes."""

    def call(*words: str) -> Any:
        assert main(list(words)) == 0, capsys.readouterr().err
        # What the host holds is measured, and differs from run to run.
        return json.loads(capsys.readouterr().out, object_hook=lambda each: (each.pop("host", None) and each) or each)

    return call


@pytest.mark.truth
def test_a_program_is_analysed_as_it_runs(document: Json) -> None:
    analysed = document("analyze", "--target", "t4", "--json", "-", "--run", "train.py")
    assert analysed == document("run", "--target", "t4", "--json", "-", "train.py")
    assert analysed["step"]["program"]["optimizers"] == ["AdamW"]
    assert "compiled" not in analysed["step"]


@pytest.mark.truth
@pytest.mark.usefixtures("compiler")
def test_a_compiled_program_is_compiled_whoever_asks(document: Json) -> None:
    words = ("--compile", "as-is", "--target", "t4", "--json", "-")
    report = document("analyze", *words, "--run", "train.py")
    assert report == document("run", *words, "train.py")
    assert report["step"]["compiled"]["graphs"] > 0
    planned = document("plan", *words, "--run", "train.py")
    assert planned["before"]["requested_bytes"] == report["peak"]["requested_bytes"]


@pytest.mark.truth
@pytest.mark.usefixtures("compiler")
def test_a_compiled_program_is_validated_as_compiled(document: Json, folder: Path) -> None:
    """What is fused is not saved: both runs take less than they do as eager code."""
    chain = ", ".join(["torch.nn.Sigmoid()"] * 6)
    (folder / "train.py").write_text(PROGRAM.replace("torch.nn.ReLU()", chain).replace("randn(32", "randn(4096"))
    verdict = document("validate", "--compile", "as-is", "--steps", "2", "--json", "-", "--run", "train.py")
    assert verdict["within_tolerance"]
    assert verdict["measurement"]["rounds"]
    plain = document("run", "--target", "cpu", "--steps", "2", "--json", "-", "train.py")
    eager = min(each["requested_bytes"] for each in plain["step"]["program"]["rounds"])
    for side, key in (("predicted", "requested_bytes"), ("measured", "peak_bytes")):
        assert max(each[side][key] for each in verdict["rounds"]) < eager


@pytest.mark.truth
def test_a_generation_is_analysed_as_it_generates(document: Json) -> None:
    generated = document("generate", *GENERATION, "--json", "-")
    assert document("analyze", *GENERATION, "--mode", "generate", "--json", "-") == generated
    assert generated["step"]["generation"]["new_tokens"] == 4


@pytest.mark.truth
@pytest.mark.parametrize("form", ["line", "layer"])
def test_a_program_by_line_and_by_layer_is_its_report(form: str, document: Json, folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(document("run", "--json", "-", "train.py")))
    assert document("show", "--by", form, "--json", "-", "--run", "train.py") == document(
        "show", "--by", form, "report.json", "--json", "-"
    )


@pytest.mark.truth
@pytest.mark.parametrize(
    "words",
    [
        ("report", "-o", "made.html"),
        ("graph", "-o", "made.svg"),
        ("graph", "--by", "time", "-o", "made.svg"),
        ("export", "--to", "csv", "-o", "made.csv"),
    ],
    ids=lambda words: " ".join(words[:-2]),
)
def test_what_is_written_of_a_program_is_written_of_its_report(
    words: tuple[str, ...], document: Json, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "report.json").write_text(json.dumps(document("run", "--json", "-", "train.py")))
    verb, made = words[0], folder / words[-1]
    monkeypatch.setattr(
        HostMeter, "record", lambda _: HostUse(peak_bytes=None, process_bytes=None)
    )  # measured, and in one of both
    assert main([*words, "--quiet", "--run", "train.py"]) == 0
    of_program = made.read_bytes()
    assert main([verb, "report.json", *words[1:], "--quiet"]) == 0
    assert made.read_bytes() == of_program


@pytest.mark.truth
def test_a_program_is_held_against_cards_by_running_it_for_each(document: Json) -> None:
    fits = document("cards", "--only", "t4,rtx4090", "--json", "-", "--run", "train.py")
    of_card = {each["card"]: each for each in fits["points"]}
    assert fits["analyses"] == 2
    for name, each in of_card.items():
        alone = document("run", "--target", name, "--json", "-", "train.py")["peak"]
        assert each["requested_bytes"] == alone["requested_bytes"]


def test_a_report_is_held_against_cards_of_its_own_capability(
    document: Json, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = document("analyze", "own.py:build", "--input", "4x8", "--target", "h100", "--json", "-")
    (folder / "report.json").write_text(json.dumps(report))
    held = document("cards", "report.json", "--json", "-")
    analysed = document("cards", "own.py:build", "--input", "4x8", "--only", "h100,h200", "--json", "-")
    assert held["analyses"] == 0
    assert {tuple(each["capability"]) for each in held["cards"]} == {(9, 0)}
    found = {each["card"]: each for each in held["points"]}
    assert [found[each["card"]] for each in analysed["points"]] == analysed["points"]
    assert main(["cards", "report.json"]) == 0
    assert "not again: a report is held against cards of its own compute capability" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["cards", "report.json", "--only", "t4"]) == 2
    assert "others run other kernels; t4 needs the model or the program itself" in capsys.readouterr().err
    assert main(["cards", "report.json", "--only", "h100", "--plan"]) == 2
    assert "expected plans for a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("max-batch",), ("advise",), ("validate",), ("shard", "--cards", "2xh100", "--batch", "4")],
    ids=lambda words: words[0],
)
def test_where_a_step_runs_again_a_report_is_refused(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "report.json").write_text("{}")
    assert main([words[0], "report.json", *words[1:]]) == 2
    assert capsys.readouterr().err == (
        "fxmem: expected a model or a program, got the report 'report.json': here the step runs again, and what a "
        "report says was fixed when it was written\n"
    )


def test_a_program_says_itself_what_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--by", "line", "--compile", "reduce-overhead", "--run", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "fxmem: expected --compile as-is with --run: a program says itself what it compiles\n"
    )


@pytest.mark.truth
def test_no_more_combinations_are_refused_than_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may only fall: a new verb, or a new subject, is asked what all others are."""
    monkeypatch.setattr(sys, "argv", ["refusals"])
    runpy.run_path(str(ROOT / ".ci/refusals.py"))["main"]()
    refused, _, asked, *_ = capsys.readouterr().out.split()
    assert int(refused) <= 232
    assert int(asked) >= 1045
