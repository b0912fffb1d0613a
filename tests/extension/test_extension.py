"""What is added to fxmem most often is one file, and fails no test.

Each `*.patch` beside this file adds one thing, as someone who read docs/extend.md would. All are applied to a copy of
the package and of its tests, and the gate's tests of the room of each run there. A further patch needs nothing here. It
begins with

    Tests: the files of tests that run, with options of pytest where they are too many
    Check: a line of Python that fails where what was added is not found
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.truth

PATCHES = sorted(Path(__file__).parent.glob("*.patch"))


TESTS_AND_CHECKS = """
import json, os, sys

import pydantic, pytest, scipy.optimize, torch, torch._dynamo, torchvision  # once for all forks

failed = []
for check, *options in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not truth", *options])
        exec(check)
        sys.stdout.flush()
        os._exit(code)
    failed += [check] if os.waitpid(pid, 0)[1] else []
sys.exit(", ".join(failed) or 0)
"""


def head(patch: Path) -> dict[str, str]:
    """What stands before the difference, by its first words."""
    lines = patch.read_text(encoding="utf-8").partition("\ndiff --git ")[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
def test_what_is_added_is_one_file_each_and_fails_no_test(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("fxmem", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name)  # with the times of files, so that their bytecode is of use
    shutil.copy(ROOT / "pyproject.toml", copy)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}
    environment |= {"PYTHONPATH": str(copy), "GIT_CEILING_DIRECTORIES": str(copy.parent), "PYTHONDONTWRITEBYTECODE": ""}

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    commands: list[list[str]] = []
    for patch in PATCHES:
        assert len(re.findall(r"^\+\+\+ ", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)) == 1, patch.name
        run("git", "apply", "--whitespace=error", str(patch))
        said = head(patch)
        commands.append([said["Check"], *shlex.split(said["Tests"])])
    run(sys.executable, "-c", TESTS_AND_CHECKS, json.dumps(commands))
