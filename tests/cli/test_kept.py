"""Results of earlier commands: read where nothing has changed, made anew on any doubt."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fxmem.simulation.analysis
from fxmem.__main__ import main
from fxmem.cli import kept
from tests.no_files import NO_FILES

Capture = pytest.CaptureFixture[str]

MODEL = """
import json, pathlib, torch
from sizes import WIDTH

def build():
    width = json.loads(pathlib.Path("width.json").read_text()) if pathlib.Path("width.json").exists() else WIDTH
    return torch.nn.Linear(3, width)

def noisy():
    pathlib.Path("log.txt").write_text("built")
    return build()
"""
WORDS = ["--input", "2x3", "--target", "cpu", "--quiet"]


@pytest.fixture
def analyses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder with a model and an empty cache; the names of the models that are analysed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FXMEM_NO_CACHE")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "sizes.py").write_text("WIDTH = 4\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "sizes", raising=False)
    # The first analysis of a process changes its environment.
    assert main(["analyze", "torch.nn:Linear", "--set", "in_features=3", "--set", "out_features=4", *WORDS]) == 0
    assert main(["cache", "clear"]) == 0
    made: list[str] = []
    real = fxmem.simulation.analysis.analyze_step
    monkeypatch.setattr(
        "fxmem.simulation.analysis.analyze_step",
        lambda model, request, progress=None: made.append(request.name) or real(model, request, progress),  # type: ignore[func-returns-value]
    )
    return made


def report(capsys: Capture, *words: str, model: str = "own.py:build") -> str:
    capsys.readouterr()
    assert main(["analyze", model, *WORDS, "--json", "-", *words]) == 0
    return capsys.readouterr().out


def test_a_second_analysis_is_the_first_to_the_byte(analyses: list[str], capsys: Capture) -> None:
    first = report(capsys)
    assert [report(capsys), report(capsys, "--full"), report(capsys, "--budget", "1GiB")] == [first] * 3
    assert analyses == ["own.py:build"]
    assert report(capsys, "--no-cache") == first
    assert len(analyses) == 2


def test_another_verb_starts_from_the_same_analysis(analyses: list[str], capsys: Capture, tmp_path: Path) -> None:
    report(capsys)
    assert main(["timeline", "own.py:build", *WORDS, "-o", "plot.svg"]) == 0
    assert len(analyses) == 1
    assert main(["timeline", "own.py:build", *WORDS[:-1], "-o", "plot.svg"]) == 0
    assert "nothing has changed since this report was made; --no-cache makes it anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "plan --target cpu --budget 1GiB",
        "plan --target cpu --budget 1GiB --json plan.json --svg plan.svg",
        "max-batch --target cpu --budget 1MiB --limit 2",
        "cards --only h100",
        "advise --target cpu --quick",
    ],
)
def test_every_verb_begins_from_the_kept_analysis(analyses: list[str], words: str) -> None:
    verb, *rest = words.split()
    options = ["own.py:build", "--input", "2x3", "--quiet"]
    assert main([verb, *options, *rest]) == 0
    alone = len(analyses)
    assert main(["cache", "clear"]) == 0
    analyses.clear()
    assert main(["analyze", *options, "--target", "h100" if verb == "cards" else "cpu"]) == 0
    assert main([verb, *options, *rest]) == 0
    assert len(analyses) == alone


def test_a_plan_is_the_same_from_a_kept_analysis(analyses: list[str], capsys: Capture) -> None:
    words = ["plan", "own.py:build", *WORDS, "--json", "-"]
    assert main([*words, "--no-cache"]) == 0
    fresh = capsys.readouterr().out
    report(capsys)
    assert main(words) == 0
    assert capsys.readouterr().out == fresh


def test_what_a_plan_s_analysis_depends_on_has_changed(analyses: list[str], capsys: Capture) -> None:
    words = ["plan", "own.py:build", *WORDS, "--budget", "1GiB"]
    for _ in range(2):
        assert main(words) == 0
    assert len(analyses) == 1
    CHANGES["what it imports"]()
    assert main(words) == 0
    assert len(analyses) == 2


def later(name: str, text: str) -> None:
    """Write a file; its time differs from before, as where a person wrote it."""
    Path(name).write_text(text, encoding="utf-8")
    os.utime(name, (time.time() + 5, time.time() + 5))


CHANGES: dict[str, Callable[[], object]] = {
    "the model": lambda: later("own.py", MODEL.replace("Linear(3, width)", "Linear(3, width + 1)")),
    "what it imports": lambda: later("sizes.py", "WIDTH = 5\n"),
    "a module beside it": lambda: later("json.py", "from sizes import WIDTH as loads\n"),
    "the environment": lambda: os.environ.update(OWN_WIDTH="5"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_depends_on_has_changed(
    analyses: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setenv("OWN_WIDTH", "4")
    report(capsys)
    CHANGES[change]()
    report(capsys)
    assert len(analyses) == 2


def test_a_file_that_the_model_reads(analyses: list[str], capsys: Capture) -> None:
    Path("width.json").write_text("6", encoding="utf-8")
    first = report(capsys)
    assert report(capsys) == first
    Path("width.json").write_text("7", encoding="utf-8")
    assert report(capsys) != first
    assert len(analyses) == 2


def test_other_options_and_doubts_are_analysed(analyses: list[str], capsys: Capture) -> None:
    for words in ([], ["--optimizer", "sgd"], ["--values", "real"], ["--values", "real"]):
        report(capsys, *words)
    assert len(analyses) == 4
    for _ in range(2):  # a model that writes files would not write them
        report(capsys, model="own.py:noisy")
    assert len(analyses) == 6


@pytest.mark.parametrize("text", ["", "{}", "null\nnull", '{}\n{"model": 1}\n', "\x00"])
def test_what_cannot_be_read_is_made_anew(analyses: list[str], capsys: Capture, text: str) -> None:
    first = report(capsys)
    (path,) = kept.entries(Path("cache/results"))
    path.write_text(text, encoding="utf-8")
    assert report(capsys) == first
    assert len(analyses) == 2


@pytest.mark.parametrize("written", ['"nbytes":48', '"ticks":', "own.py"])
def test_a_result_that_was_changed_is_made_anew(analyses: list[str], capsys: Capture, written: str) -> None:
    first = report(capsys)
    (path,) = kept.entries(Path("cache/results"))
    text = path.read_text(encoding="utf-8")
    assert written in text
    path.write_text(text.replace(written, written[:-1] + "9", 1), encoding="utf-8")
    assert [report(capsys), report(capsys)] == [first] * 2
    assert len(analyses) == 2


@pytest.mark.skipif(os.name != "posix", reason="needs the files of a Unix")
@pytest.mark.parametrize("what", [*NO_FILES, "a link to a file"])
def test_what_is_no_file_is_never_followed(analyses: list[str], capsys: Capture, what: str) -> None:
    first = report(capsys)
    (path,) = kept.entries(Path("cache/results"))
    elsewhere = path.rename("elsewhere").absolute()
    before = elsewhere.read_bytes()
    NO_FILES.get(what, lambda path: path.symlink_to(elsewhere))(path)
    assert main(["cache", "show"]) == 0
    assert report(capsys) == first
    assert len(analyses) == 2
    assert path.is_dir() or not path.is_symlink()
    assert main(["cache", "clear"]) == 0
    assert kept.entries(path.parent) == []
    assert elsewhere.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="needs the files of a Unix")
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_folder_keeps_nothing(
    analyses: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    NO_FILES[what](Path("place"))
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(Path("place").absolute()))
    assert json.loads(report(capsys))["model"] == "own.py:build"
    assert [main(["cache", action]) for action in ("show", "clear")] == [0, 0]


def test_a_cache_that_cannot_be_cleared_says_so(
    analyses: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    report(capsys)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "clear"]) == 2
    assert "results' to be a folder to write in: Permission denied" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written(analyses: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("not a folder", encoding="utf-8")
    monkeypatch.setenv("FXMEM_CACHE_DIR", str(Path("file").absolute()))
    assert json.loads(report(capsys))["model"] == "own.py:build"


def test_the_oldest_go_first_and_all_can_be_cleared(
    analyses: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(capsys)
    size = kept.entries(Path("cache/results"))[0].stat().st_size
    monkeypatch.setattr(kept, "_MAX_BYTES", 2 * size + size // 2)
    for optimizer in ("sgd", "adam"):
        report(capsys, "--optimizer", optimizer)
    assert len(kept.entries(Path("cache/results"))) == 2
    assert main(["cache", "show"]) == 0
    assert capsys.readouterr().out.startswith("2 results, ")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 2 results, ")
    assert kept.entries(Path("cache/results")) == []


def test_answers_of_other_verbs_are_kept(analyses: list[str], capsys: Capture) -> None:
    words = ["max-batch", "own.py:build", *WORDS, "--budget", "1MiB", "--limit", "4"]
    assert main(words) == 0
    first, count = capsys.readouterr().out, len(analyses)
    assert main(words) == 0
    assert (capsys.readouterr().out, len(analyses)) == (first, count)
    assert main([*words[:-1], "5"]) == 0
    assert len(analyses) > count
