"""The command that is suggested can be pasted: it parses to the options that were given."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.cli import output
from fxmem.cli.options import ANALYSIS
from fxmem.cli.output import next_for_model, next_for_program, next_for_report
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import load
from fxmem.memory.liveness import timeline
from fxmem.records.profile import Target
from tests.profiles import small_profile
from tests.verbs import report_of, saved

CARD = Target(name="card", device="cuda", memory_bytes=1 << 30, capability=(8, 0))


def parsed(words: list[str]) -> dict[str, object]:
    return vars(Parser().add_arguments(load(words[0]).ARGUMENTS).parse_args(words[1:]))


@pytest.mark.parametrize(
    "line",
    [
        "m.py:f",
        "m.py:f --input 'a b:2x3' --input y:4 --set k=v --target t4 --accumulate 2",
        "m.py:f --no-set-to-none --allow-tf32 --no-deterministic --inference-mode --channels-last --precision bf16",
    ],
)
@pytest.mark.parametrize(("fits", "verb"), [(True, "max-batch"), (False, "advise"), (None, "advise")])
def test_the_step_is_the_same(line: str, fits: bool | None, verb: str) -> None:
    given = Parser().add_arguments(load("analyze").ARGUMENTS).parse_args([*shlex.split(line), "--quiet", "--full"])
    peak = timeline(small_profile()).peak.model_copy(update={"fits": fits})
    command, *words = shlex.split(next_for_model(given, peak))
    assert (command, words[0]) == ("fxmem", verb)
    again = parsed(words)
    names = [each.dest for each in ANALYSIS]
    assert {name: again[name] for name in names} == {**{name: getattr(given, name) for name in names}, "quiet": False}


@pytest.mark.parametrize(("fits", "verb"), [(True, "max-batch"), (False, "max-batch"), (None, None)])
def test_no_advice_about_eager_code_follows_a_compiled_step(fits: bool | None, verb: str | None) -> None:
    given = Parser().add_arguments(load("analyze").ARGUMENTS).parse_args(["m.py:f", "--compile", "reduce-overhead"])
    peak = timeline(small_profile()).peak.model_copy(update={"fits": fits})
    words = shlex.split(next_for_model(given, peak))
    assert words[1:2] == ([verb] if verb else [])
    assert not words or parsed(words[1:])["compile"] == "reduce-overhead"


def test_the_release_of_torch_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "in_features=8", "--set", "out_features=8", "--input", "2x8"]
    assert (
        main(["analyze", "torch.nn:Linear", *settings, "--target", "t4", "--torch", "2.8", "--quiet", "--width", "200"])
        == 0
    )
    following = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Next "))
    assert following.endswith(" --target t4,torch=2.8")
    assert "--torch" not in following


def test_what_else_has_of_the_card_counts_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["torch.nn:Linear", "--set", "in_features=8", "--set", "out_features=8", "--quiet", "--width", "200"]
    inputs = ["--input", "2x8"]
    beside = ["--in-use", "14GiB", "--os", "windows"]
    assert main(["analyze", *settings, *inputs, "--target", "t4", *beside]) == 0
    text = capsys.readouterr().out
    assert " of 1.10 GiB on t4" in text  # 16 GiB, less what Windows keeps at least, and these
    assert "--target t4,in-use=14GiB,os=windows" in text
    assert main(["cards", *settings, *inputs, "--only", "t4,l4", "--in-use", "14.5GiB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Cards 1 of 2 fit" in text
    assert "takes of it at least, and 14.5 GiB of other programs" in text
    over = ["--over", "card=t4,l4", "--over", "batch=2"]
    assert main(["sweep", *settings, "--input", "2x8", *over, *beside[:2]]) == 0
    assert "and 14.0 GiB of other programs" in " ".join(capsys.readouterr().out.split())


def test_where_windows_spills(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["torch.nn:Linear", "--set", "in_features=8", "--set", "out_features=8", "--input", "2x8", "--quiet"]
    assert main(["analyze", *settings, "--target", "t4,os=windows,in-use=15.09GiB", "--width", "200"]) == 4
    text = capsys.readouterr().out
    assert "; Windows spills " in text
    assert "into the host's memory: slower, not an error" in text


def test_a_report_leads_to_its_page_or_to_a_plan() -> None:
    profile = small_profile().model_copy(update={"target": CARD})
    assert next_for_report("a b.json", report_of(profile, fits=True)) == (
        "fxmem report 'a b.json' --output 'a b.html' --open"
    )
    training = profile.model_copy(update={"step": profile.step.model_copy(update={"mode": "train"})})
    assert next_for_report("r.json", report_of(training, fits=False)) == "fxmem plan r.json --budget 574619648"
    assert next_for_report("-", report_of(profile)) == ""


def test_a_program_is_given_as_it_was() -> None:
    words = shlex.split(next_for_program("t4", ["train.py", "--lr", "1e-3", "a b"]))
    assert parsed(words[1:])["run_program"] == ["train.py", "--lr", "1e-3", "a b"]


@pytest.mark.parametrize(("memory", "code"), [(1 << 40, 0), (1, 4), (None, 2)])
def test_the_verdict_is_an_exit_code_and_check_wants_one(tmp_path: Path, memory: int | None, code: int) -> None:
    target = CARD.model_copy(update={"memory_bytes": memory})
    name = saved(tmp_path / "r.json", small_profile().model_copy(update={"target": target}))
    assert main(["show", name, "--check"]) == code
    assert main(["show", name]) == (0 if memory is None else code)


def test_what_was_written_is_opened_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    name, out = saved(tmp_path / "r.json", small_profile()), tmp_path / "of it.svg"
    for words, calls in (([], []), (["--open"], [out.as_uri()])):
        assert main(["graph", name, "-o", str(out), *words]) == 0
        assert opened == calls
        assert capsys.readouterr().err.startswith(f"fxmem: wrote {out} (")
    assert main(["graph", name, "-o", str(out), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("nbytes", "words"), [(999, "999 bytes"), (650_000, "650 kB"), (2_350_000, "2.4 MB")])
def test_sizes_of_files(nbytes: int, words: str) -> None:
    assert output._describe_size(nbytes) == words
