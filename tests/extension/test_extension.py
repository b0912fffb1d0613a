"""What is added to fxmem most often is one file, and fails no test.

Each `*.patch` beside this file adds one thing, as someone who read docs/extend.md would. It is applied to a copy of the
package and of its tests, and the gate's tests of its room run there. A further patch needs nothing here. It begins with

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


TESTS_AND_CHECK = "import sys, pytest; code = pytest.main(sys.argv[2:]); exec(sys.argv[1]); sys.exit(code)"


def head(patch: Path) -> dict[str, str]:
    """What stands before the difference, by its first words."""
    lines = patch.read_text(encoding="utf-8").partition("\ndiff --git ")[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and what its tests need: one for all patches, so that its bytecode is made once."""
    made = tmp_path_factory.mktemp("extension") / "copy"
    for name in ("fxmem", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", made)
    return made


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")
@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_what_is_added_is_one_file_and_fails_no_test(patch: Path, copy: Path) -> None:
    assert len(re.findall(r"^\+\+\+ ", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)) == 1
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}
    environment |= {"PYTHONPATH": str(copy), "GIT_CEILING_DIRECTORIES": str(copy.parent), "PYTHONDONTWRITEBYTECODE": ""}
    said = head(patch)

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    run("git", "apply", "--whitespace=error", str(patch))
    try:
        options = ["-q", "-p", "no:cacheprovider", "-m", "not truth", *shlex.split(said["Tests"])]
        run(sys.executable, "-c", TESTS_AND_CHECK, said["Check"], *options)
    finally:
        run("git", "apply", "--reverse", str(patch))
