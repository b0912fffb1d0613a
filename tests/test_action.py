"""The GitHub Action: its steps run as they stand, in a repository of two commits, with a `gh` that notes its calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fxmem.__main__ import main
from tests import ROOT

pytestmark = pytest.mark.truth

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
MODEL = """from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, {0}), nn.ReLU(), nn.Linear({0}, 8))
"""
TOOLS = {
    "fxmem": f'#!/bin/bash\nexec {sys.executable} -m fxmem "$@"\n',
    "gh": (
        '#!/bin/bash\nprintf "%s\\n" "$*" >> "$RUNNER_TEMP/calls.txt"\n'
        'case "$*" in *--paginate*) cat "$RUNNER_TEMP/known.txt" ;; esac\n'
    ),
}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, width: int) -> str:
    (folder / "own.py").write_text(MODEL.format(width), encoding="utf-8")
    git(folder, "add", "own.py")
    git(folder, "commit", "--quiet", "--message", f"Width {width}")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner's folder after the action ran on a pull request that doubled a width."""
    folder = tmp_path_factory.mktemp("action")
    origin, runner, tools = folder / "origin", folder / "runner", folder / "tools"
    for each in (origin, runner, tools):
        each.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    git(origin, "init", "--quiet", "--initial-branch", "main")
    base = commit(origin, 512)
    git(folder, "clone", "--quiet", str(origin), "clone")
    commit(folder / "clone", 1024)
    (runner / "known.txt").write_text("", encoding="utf-8")
    given = {
        "${{ inputs.analyze }}": "'own.py:build' --input 4096x8 --target rtx4090",
        "${{ inputs.token }}": "none",
        "${{ github.event.pull_request.base.sha }}": base,
        "${{ github.event.pull_request.number }}": "7",
        "${{ inputs.fail-over }}": "5%",
    }
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(runner),
        "GITHUB_REPOSITORY": "who/what",
        "GITHUB_STEP_SUMMARY": str(runner / "summary.md"),
    }

    def run(step: dict[str, Any], code: int = 0) -> str:
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]  # GitHub's `shell: bash`
        names = {name: given[value] for name, value in step["env"].items()}
        done = subprocess.run(
            words, cwd=folder / "clone", env=environment | names, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stderr

    _, first, second, last = ACTION["runs"]["steps"]
    run(first)
    run(second)
    assert re.fullmatch(r"fxmem: the peak grew by [\d.]+ MiB \([\d.]+ %\), more than 5%\n", run(last, code=4))
    given["${{ inputs.fail-over }}"] = "90%"
    run(last)
    (runner / "known.txt").write_text("41\n42\n", encoding="utf-8")
    run(second)
    return runner


def test_the_comment_says_what_grew_by_module(ran: Path) -> None:
    comment = (ran / "comment.md").read_text(encoding="utf-8")
    assert (ran / "summary.md").read_text(encoding="utf-8") == comment
    first, heading = comment.splitlines()[:2]
    assert first.startswith("<!-- fxmem ")
    assert heading.startswith("### Memory of `own.py:build` on `rtx4090`: +")
    assert heading.endswith(" % more)")
    # ReLU's result is what backward needs: 4096 x 512 more elements of 4 bytes.
    assert "8.00 MiB | 16.0 MiB | +8.00 MiB" in comment
    assert comment.count("\u2588") > 20


def test_a_comment_is_written_once_and_then_replaced(ran: Path) -> None:
    calls = (ran / "calls.txt").read_text(encoding="utf-8").splitlines()
    marker = (ran / "comment.md").read_text(encoding="utf-8").splitlines()[0]
    asked = f'api repos/who/what/issues/7/comments --paginate --jq .[] | select(.body | startswith("{marker}")) | .id'
    body = f"--field body=@{ran}/comment.md"
    assert calls == [
        asked,
        f"api --silent --method POST repos/who/what/issues/7/comments {body}",
        asked,
        f"api --silent --method PATCH repos/who/what/issues/comments/42 {body}",
    ]


def test_a_table_that_is_no_longer_true_fails(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, runner = ran.parent / "clone", tmp_path
    words = "own.py:build --input 8x8 --over batch=4096 --over card=rtx4090,l4"
    environment = {
        **os.environ,
        "PATH": f"{ran.parent / 'tools'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(runner),
        "GITHUB_STEP_SUMMARY": str(runner / "summary.md"),
        "WORDS": words,
        "README": "README.md",
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    step = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", ACTION["runs"]["steps"][0]["run"]]
    readme = folder / "README.md"
    readme.write_text("# Ours\n\n<!-- fxmem -->\n<!-- /fxmem -->\n\nMore.\n")
    stale = run(*step)
    assert stale.returncode == 1
    assert f"run fxmem sweep {words} --markdown README.md" in stale.stdout
    monkeypatch.chdir(folder)
    assert main(["sweep", *words.split(), "--quiet", "--markdown", "README.md"]) == 0
    text = readme.read_text()
    assert text.startswith("# Ours\n\n<!-- fxmem -->\n\n| Card | Room | Batch | Peak |")
    assert text.endswith("<!-- /fxmem -->\n\nMore.\n")
    assert re.search(r"\| `l4` \| \d+\.\d GiB \| 4096 \| ", text)
    again = run(*step)
    assert again.returncode == 0, again.stderr


def test_nothing_of_a_pull_request_is_written_into_a_script() -> None:
    assert not [step for step in ACTION["runs"]["steps"] if "${{" in step["run"]]
