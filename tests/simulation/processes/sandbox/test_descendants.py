"""What a program starts ends with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fxmem.__main__ import main

PROGRAM = Path(__file__).parent / "starts.py"
ENDINGS = {"clean": 0, "exception": 1, "interrupt": 130, "kill": 1}


def is_alive(process: str) -> bool:
    """Whether it is there, and not over."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.truth
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process has started")
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_a_program_starts_ends_with_it(
    ending: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["run", "--target", "rtx3080", "--until", "end", str(PROGRAM), ending])
    errors = capfd.readouterr().err
    assert code == ENDINGS[ending], errors
    found = re.search(r"^STARTED (.*)$", errors, re.MULTILINE)
    assert found is not None, errors
    started = found[1].split()
    assert len(started) == 3
    assert [each for each in started if is_alive(each)] == []
