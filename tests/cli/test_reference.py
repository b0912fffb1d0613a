"""The reference of the command line has every verb and every argument, and is the same wherever it is made."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fxmem.cli.reference import reference
from fxmem.cli.verbs import VERBS, build_parser, describe


def section(verb: str) -> str:
    """What the reference has under a verb's heading."""
    (found,) = re.findall(rf"^## fxmem {verb}$(.*?)(?=^## |\Z)", reference(), flags=re.MULTILINE | re.DOTALL)
    return found


def test_the_verbs_stand_in_the_order_of_the_help() -> None:
    assert re.findall(r"^## fxmem (\S+)$", reference(), flags=re.MULTILINE) == list(VERBS)


@pytest.mark.truth
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_its_description_and_each_of_its_arguments_once(verb: str) -> None:
    shared = reference().split("\n## fxmem ", 1)[0]
    text = (shared + section(verb)).replace("\\", "")
    assert describe(verb).description in text
    for action in build_parser()[1][verb].arguments():
        name = re.escape(action.option_strings[0] if action.option_strings else str(action.metavar or action.dest))
        meaning = re.escape((action.help or "").replace("%%", "%"))
        assert len(re.findall(rf"^\| `\[?{name}.* \| {meaning} \|$", text, flags=re.MULTILINE)) == 1, name


def test_an_option_that_most_verbs_have_stands_once() -> None:
    assert reference().count("| `--precision {bf16,fp16}` |") == 1


def test_the_terminal_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = reference()
    monkeypatch.setenv("COLUMNS", "200")
    assert reference() == narrow


def test_it_is_printed_without_torch() -> None:
    run = "runpy.run_module('fxmem.cli.reference', run_name='__main__')"
    code = f"import runpy, sys; {run}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, reference(), "")
