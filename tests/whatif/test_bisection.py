"""The commit with which a peak changed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.records.comparison import StepComparison

SCRIPT = """
import torch
from net import WIDTH
width = WIDTH * len(open("size.txt").read())
net = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(2):
    net(torch.ones(64, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMMAND = "run --target rtx3060 --steps 2 work/train.py"


def git(*words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Six commits: the third widens the model, the fourth cannot run; a file that git does not know says how wide."""
    top = tmp_path / "repository"
    (top / "work").mkdir(parents=True)
    monkeypatch.chdir(top)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    git("init", "--quiet", "--initial-branch", "main")
    Path("size.txt").write_text("four", encoding="utf-8")
    Path("work/train.py").write_text(SCRIPT, encoding="utf-8")
    commits = []
    for number, net in enumerate(
        ["WIDTH = 128", "WIDTH = 64 + 64", "WIDTH = 256", "oops", "WIDTH = 512 // 2", "WIDTH = 256 "]
    ):
        Path("net.py").write_text(f"{net}\n", encoding="utf-8")
        git("add", "net.py", "work/train.py")
        git("commit", "--quiet", "--message", f"Change {number}")
        commits.append(git("rev-parse", "HEAD"))
    return commits


@pytest.mark.truth
def test_the_commit_that_widens_a_model_is_found(repository: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = git("status", "--porcelain"), git("rev-parse", "HEAD"), git("worktree", "list")
    assert main(["compare", repository[0], "main", "--bisect", COMMAND, "--json", "found.json"]) == 0
    out, err = capsys.readouterr()
    found = StepComparison.model_validate_json(Path("found.json").read_text(encoding="utf-8"))
    assert found.commit is not None
    assert (found.commit.name, found.commit.subject) == (repository[2], "Change 2")
    assert f"Commit      {repository[2][:10]} Change 2" in out
    lines = out.partition("Lines ")[2].partition("Memory")[0]
    assert re.match(r" +work/train.py:\d+ \+\S+ MiB: (optimizer.step\(\)|net)", lines)
    assert "Memory      fits: " in out
    assert "fxmem-bisect-" not in Path("found.json").read_text(encoding="utf-8")
    assert (found.params_bytes.before, found.params_bytes.after) == (4 * 513 * 512, 4 * 1025 * 1024)
    assert f"asking {repository[0][:10]}" in err
    os.remove("found.json")
    assert (git("status", "--porcelain"), git("rev-parse", "HEAD"), git("worktree", "list")) == before


@pytest.mark.truth
def test_a_bisection_that_finds_none_says_so(repository: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", repository[2], "main", "--bisect", COMMAND, "--quiet"]) == 1
    assert "no commit changed it" in capsys.readouterr().err
    assert main(["compare", repository[3], "main", "--bisect", COMMAND]) == 1
    assert "the command fails at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["main", "main~1", "--bisect", COMMAND], "expected main to be an ancestor of main~1"),
        (["nothing", "main", "--bisect", COMMAND], "expected a commit, got 'nothing'"),
        (["main~1", "main", "--bisect", "sweep train.py"], "expected --bisect 'run --target rtx4090 train.py'"),
        (["main~1", "main", "--bisect", "run --json x.json train.py"], "without --json"),
        (["main", "--bisect", COMMAND], "expected two commits"),
        (["main~1", "main", "--bisect", COMMAND, "--precision", "bf16"], "got --precision"),
    ],
)
def test_what_cannot_be_bisected_is_refused(
    repository: list[str], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_commits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(["compare", "a", "b", "--bisect", COMMAND]) == 2
    assert "expected a folder of a git repository" in capsys.readouterr().err
