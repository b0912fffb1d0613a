"""Commands of installed packages, and programs that start another in their place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.simulation.program import Launch, RunSettings, check_program, find_started, launch
from fxmem.simulation.program.launcher import LaunchResult

TRAIN = """
import os, sys, torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
model(torch.ones(int(os.environ.get("BATCH", 4)), 8, device="cuda")).sum().backward()
optimizer.step()
"""
HEAD = f"#!{sys.executable}\nimport os, subprocess, sys\n"
IN_ITS_PLACE = 'os.execvpe(sys.executable, [sys.executable, "train.py", "0.1"], {**os.environ, "BATCH": "64"})'
AS_A_CHILD = (
    'sys.exit(subprocess.run([sys.executable, "train.py", "0.1"], env={**os.environ, "BATCH": "64"}).returncode)'
)


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    """Install a command beside a script that trains."""
    for place in ("bin", "work"):
        (folder / place).mkdir()
    (folder / "work/train.py").write_text(TRAIN)
    (folder / "bin" / name).write_text(HEAD + code)
    (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(folder / "work")


def ran(name: str, *words: str) -> LaunchResult:
    return launch(Launch(name, words), catalogue.target("h100"), RunSettings(until="end", max_operators=100))


@pytest.mark.parametrize(("name", "code"), [("mytrain", IN_ITS_PLACE), ("swift", AS_A_CHILD)])
def test_what_a_command_starts_in_its_place_runs_there(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, monkeypatch, name, code)
    launched = ran(name, "sft")
    assert not launched.raised
    assert launched.recorded.ending == "ran to its end"
    (only,) = launched.recorded.rounds
    assert only.requested_bytes >= 64 * 8 * 4
    assert "BATCH" not in os.environ


def test_a_child_of_any_other_program_is_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = 'subprocess.run([sys.executable, "-c", "open(\'child\', \'w\')"])\nsys.argv[1:] = ["0.1"]\n'
    command(tmp_path, monkeypatch, "mytrain", child + 'exec(open("train.py").read())')
    assert len(ran("mytrain").recorded.rounds) == 1
    command_of_table = tmp_path / "bin/swift"
    (tmp_path / "bin/mytrain").rename(command_of_table)  # `python -c` is no program that could run here
    assert len(ran("swift").recorded.rounds) == 1
    assert (tmp_path / "work/child").exists()


def test_a_command_is_found_as_a_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, monkeypatch, "mytrain", IN_ITS_PLACE)
    started = find_started(Launch("mytrain", ("--lr", "1")))
    assert started.program == str(tmp_path / "bin/mytrain")
    assert started.command == "mytrain --lr 1"
    (tmp_path / "work/mytrain").write_text("")
    assert find_started(Launch("mytrain")).program == "mytrain"  # a file here comes first
    with pytest.raises(UsageError, match="got 'ls', which is no file"):
        check_program(Launch("ls"))
