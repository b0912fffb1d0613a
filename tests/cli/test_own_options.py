"""Options of fxmem's own after a program's name."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from fxmem.__main__ import _parse, main
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.profile import Target
from fxmem.simulation.program import Launch, RunSettings
from fxmem.whatif import program_step

PARSES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--target')\np.parse_args()\n"
FIELDS = "from transformers import HfArgumentParser\nclass Own:\n    max_operators: int = 3\nHfArgumentParser(Own)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    for name, text in {
        "plain.py": "import json\nsteps = 3\nprint(json.dumps(steps))\n",
        "parses.py": PARSES,
        "fields.py": FIELDS,
        "imports.py": "from package.settings import read\nread()\n",
        "package/settings.py": PARSES,
        "package/__main__.py": "from . import settings\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run plain.py --target rtx3080", "--target before plain.py"),
        ("run plain.py --json=-", "--json before plain.py"),
        ("run plain.py --steps 2", "--steps before plain.py"),
        ("run parses.py --target x --full", "--full before parses.py"),
        ("run -m package --full", "fxmem run -m -- package --full"),
        ("run torchrun --nproc-per-node 2 plain.py --target x", "the source of plain.py does not know --target"),
        ("run python -u -m package --full", "--full before python"),
        ("max-batch --run plain.py --target rtx3080", "--target before --run"),
        ("plan --run -m torch.distributed.run plain.py --budget 60%", "the source of plain.py does not know --budget"),
        ("advise --run -m package --full-batch --quick", "fxmem advise --run -- -m package --quick"),
    ],
)
def test_an_option_that_the_program_does_not_know_is_refused_by_name(words: str, named: str) -> None:
    with pytest.raises(UsageError) as refused:
        _parse(words.split())
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("run --target rtx3080 parses.py --target x", ["--target", "x"]),
        ("run fields.py --max_operators 3 --max-operators 3", ["--max_operators", "3", "--max-operators", "3"]),
        ("run imports.py --target x", ["--target", "x"]),
        ("run -- plain.py --target x", ["--target", "x"]),
        ("run -m -- package --full", ["--full"]),
        ("run -m installed --target x", ["--target", "x"]),
        ("run deepspeed --num_gpus 2 parses.py --target x", ["--num_gpus", "2", "parses.py", "--target", "x"]),
        ("run plain.py --batch-size 3 -- --run -- x", ["--batch-size", "3", "--", "--run", "--", "x"]),
    ],
)
def test_what_the_program_may_know_is_its_own(words: str, arguments: list[str]) -> None:
    assert _parse(words.split()).arguments == arguments


def test_a_separator_gives_the_program_all_that_follows_run() -> None:
    assert _parse(["plan", "--run", "--", "plain.py", "--target", "x"]).run_program == ["plain.py", "--target", "x"]
    assert _parse(["plan", "--run", "-m", "package", "--target", "x"]).run_program == ["-m", "package", "--target", "x"]


@pytest.mark.parametrize(
    ("words", "steps", "reads_epoch"),
    [
        ("report -o page.html", None, True),
        ("report -o page.html --steps 3", 3, False),
        ("graph --by time -o step.svg", 3, False),
    ],
)
def test_a_report_runs_a_program_as_far_as_run_does(
    words: str, steps: int | None, reads_epoch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[RunSettings] = []

    def note(program: Launch, target: Target, given: RunSettings, *_: object, **__: object) -> NoReturn:
        settings.append(given)
        raise AnalysisError("seen")

    monkeypatch.setattr(program_step, "launch_apart", note)
    assert main([*words.split(), "--quiet", "--run", "plain.py"]) == 1
    assert [(each.steps, each.reads_epoch) for each in settings] == [(steps, reads_epoch)]
