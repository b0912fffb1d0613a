"""Defaults of options: the option, the environment, the file, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxmem.cli.options import STEP, TARGET, width
from fxmem.cli.parser import Parser
from fxmem.errors import UsageError


def parsed(*words: str) -> tuple[str, int | None]:
    given = Parser(prog="tool").add_arguments([TARGET, width()]).parse_args(words)
    return given.target, given.width


def test_the_option_goes_before_the_environment_and_this_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.fxmem]\ntarget = "t4"\nwidth = 70\n', encoding="utf-8")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert parsed() == ("t4", 70)
    monkeypatch.setenv("FXMEM_TARGET", "a10")
    monkeypatch.setenv("FXMEM_WIDTH", "90")
    assert parsed() == ("a10", 90)
    assert parsed("--target", "h100", "--width", "61") == ("h100", 61)
    monkeypatch.setenv("FXMEM_WIDTH", "wide")
    with pytest.raises(UsageError, match="expected --width to be a whole number; got 'wide'"):
        parsed()


def test_without_either_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed() == ("h100", None)
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n", encoding="utf-8")
    assert parsed() == ("h100", None)


@pytest.mark.parametrize("text", ["[tool.fxmem]\ntargt = 't4'\n", "[tool.fxmem\n", "tool.fxmem = 3\n"])
def test_a_file_that_cannot_be_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"pyproject\.toml"):
        parsed()


def test_a_switch_is_read_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keeps = next(each for each in STEP if each.dest == "keep_outputs")

    def parse(*words: str) -> tuple[bool | None, bool]:
        given = Parser(prog="tool").add_arguments([keeps]).parse_args(words)
        return given.keep_outputs, keeps.is_given(given)

    assert parse() == (None, False)
    (tmp_path / "pyproject.toml").write_text("[tool.fxmem]\nkeep_outputs = false\n", encoding="utf-8")
    assert parse() == (False, False)
    assert parse("--keep-outputs") == (True, True)
    monkeypatch.setenv("FXMEM_KEEP_OUTPUTS", "true")
    assert parse() == (True, False)
    assert parse("--no-keep-outputs") == (False, True)
    monkeypatch.setenv("FXMEM_KEEP_OUTPUTS", "maybe")
    with pytest.raises(UsageError, match="expected --keep-outputs to be true or false; got 'maybe'"):
        parse()
