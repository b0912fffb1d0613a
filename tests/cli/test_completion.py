"""Completion, asked of the shells themselves; and the examples of each verb, which its parser accepts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.cli.completion import SCRIPTS
from fxmem.cli.verbs import VERBS, build_parser, describe

CASES = {
    "fxmem ad": {"advise"},
    "fxmem analyze torchvision:resnet1": {"torchvision:resnet101", "torchvision:resnet152", "torchvision:resnet18"},
    "fxmem analyze timm:vit_tiny_patch16_2": {"timm:vit_tiny_patch16_224"},
    "fxmem plan m.py:build --target rtx40": {"rtx4060", "rtx4070", "rtx4070tis", "rtx4080", "rtx4090"},
    "fxmem analyze m.py:build --prec": {"--precision"},
    "fxmem analyze --quiet --mode tr": {"train"},
    "fxmem export r.json --to perf": {"perfetto"},
    "fxmem plan rep": {"report.json"},
    "fxmem completion z": {"zsh"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, and one with a report in it."""
    folder = tmp_path_factory.mktemp("completion")
    parsers = build_parser()[1]
    for shell, script in SCRIPTS.items():
        text = script({verb: describe(verb).brief for verb in VERBS}, parsers)
        (folder / shell).write_text(text, encoding="utf-8")
    (folder / "files").mkdir()
    (folder / "files" / "report.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture
def folder(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, the report in the working directory."""
    monkeypatch.chdir(written / "files")
    return written


def ask(*command: str) -> set[str]:
    """The lines that a shell prints."""
    found = shutil.which(command[0])
    if found is None:
        pytest.skip(f"no {command[0]} is installed")
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.splitlines())


@pytest.mark.parametrize("line", CASES)
def test_bash(folder: Path, line: str) -> None:
    asked = f"source {folder}/bash; COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; _fxmem 2>/dev/null; "
    answers = ask("bash", "--norc", "-c", asked + 'printf "%s\\n" "${COMPREPLY[@]}"')
    head = line.split()[-1].rpartition(":")[0]  # bash takes a word to begin after a colon
    assert answers == {each.removeprefix(f"{head}:") if head else each for each in CASES[line]}


@pytest.mark.parametrize("line", CASES)
def test_fish(folder: Path, line: str) -> None:
    answers = ask("fish", "--no-config", "-c", f"source {folder}/fish; complete -C {shlex.quote(line)}")
    assert {each.partition("\t")[0] for each in answers} == CASES[line]


def test_zsh(folder: Path) -> None:
    """Its completion needs a terminal: what it would add is caught instead."""
    script = f"""
        compdef() {{ }}; source {folder}/zsh; _describe() {{ print -l -- $verbs }}; _files() {{ print -l -- FILES }}
        compadd() {{ print -l -- ${{(P)2}} }}
        words=(fxmem plan m.py:build --target rtx); CURRENT=5; _fxmem
        words=(fxmem ''); CURRENT=2; _fxmem
        words=(fxmem analyze --mode ''); CURRENT=4; _fxmem
        words=(fxmem plan ''); CURRENT=3; _fxmem
    """
    answers = ask("zsh", "-f", "-c", script)
    assert {"rtx4090", "h100", "train", "infer", "FILES", "torchvision:resnet18"} <= answers
    assert f"advise:{describe('advise').brief}" in answers
    assert "--budget" not in answers


@pytest.mark.parametrize("verb", VERBS)
def test_an_example_is_a_command_of_its_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for line in describe(verb).examples:
        assert f"\n  {line}\n" in shown
        words = shlex.split(line, comments=True)
        if words[0] == "fxmem":
            assert words[1] == verb
            build_parser()[0].parse_args([word for word in words[1:] if word not in ("|", "source")])
    assert describe(verb).examples
