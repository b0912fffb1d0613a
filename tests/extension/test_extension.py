"""What is added to fxmem most often is one file, and fails no test.

Each `*.patch` beside this file adds one thing, as someone who read docs/extend.md would. It is applied to a copy of the
package and of its tests, and the tests of its room run there. A further patch needs nothing here. It begins with

    Tests: the files of tests that run, with options of pytest where they are too many
    Check: a line of Python that fails where what was added is not found
"""

from __future__ import annotations

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


def head(patch: Path) -> dict[str, str]:
    """What stands before the difference, by its first words."""
    lines = patch.read_text(encoding="utf-8").partition("\ndiff --git ")[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_what_is_added_is_one_file_and_fails_no_test(patch: Path, tmp_path: Path) -> None:
    assert len(re.findall(r"^\+\+\+ ", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)) == 1
    copy = tmp_path / "copy"
    for name in ("fxmem", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}
    environment |= {"PYTHONPATH": str(copy), "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    said = head(patch)
    for command in (
        ["git", "apply", "--whitespace=error", str(patch)],
        [sys.executable, "-c", said["Check"]],
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(said["Tests"])],
    ):
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
