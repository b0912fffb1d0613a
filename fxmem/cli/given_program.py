"""`diffusers:NAME` in the place of a model: a program of fxmem's own, run as the user's are."""

from __future__ import annotations

import argparse
import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fxmem.errors import UsageError, closest
from fxmem.simulation.stand_ins import hub_pipelines

PREFIX: Final = "diffusers:"
_PROGRAM: Final = Path(__file__).with_name("sample_pipeline.py")
_FOLDER: Final = "fxmem-given-"
SIZES: Final = ("--height", "--width", "--frames", "--steps", "--batch")
"""What the program takes, whose source names each, as any program's that takes one of fxmem's own options."""
_VERBS: Final = ("advise", "analyze", "cards", "explain", "max-batch", "plan", "report", "run", "sweep")


def give_program(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """A command line with a program in the place of `diffusers:NAME`, whose sizes go with it; `max-batch` varies the
    number of prompts where no other size is said to vary.

    Raises:
        UsageError: no such pipeline, or a verb that runs no program.
    """
    at = next((number for number, word in enumerate(words) if word.startswith(PREFIX)), None)
    if at is None or "--run" in words[:at]:
        return list(words)
    # An argument of the program before it is that program's own.
    if words[0] == "run" and parser.parse_known_args(words[: at + 1])[0].program != words[at]:
        return list(words)
    pipeline = find_pipeline(words[at])
    if words[0] not in _VERBS:
        raise UsageError(f"expected a model after `fxmem {words[0]}`; {words[at]} is a program: fxmem analyze runs it")
    own: list[str] = []
    rest: list[str] = []
    left = iter([*words[:at], *words[at + 1 :]])
    for word in left:
        if word.partition("=")[0] in SIZES:
            own += [word] if "=" in word else [word, next(left, "")]
        else:
            rest.append(word)
    if words[0] == "max-batch" and not any("{" in word for word in own):
        own += ["--batch", "{}"]
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = shutil.copy(_PROGRAM, Path(folder, "pipeline.py"))
    return [*rest, *(["--run"] if words[0] != "run" else []), str(program), pipeline.name, *own]


def spell_program(words: Sequence[str]) -> list[str]:
    """The words of a command line that have given this program."""
    return name_program(*words).split() or ["--run", *words]


def name_program(program: str, *arguments: str) -> str:
    """What the user calls a program of fxmem's own; empty for another."""
    is_ours = Path(program).parent.name.startswith(_FOLDER)
    return " ".join([PREFIX + arguments[0], *arguments[1:]]) if is_ours else ""


def find_pipeline(spec: str) -> hub_pipelines.Pipeline:
    """The pipeline that `diffusers:NAME` names. Raises UsageError, with the nearest names, for none."""
    name = spec.removeprefix(PREFIX)
    if (found := hub_pipelines.find(name)) is None:
        names = hub_pipelines.list_names()
        near = closest(name, names if "/" in name else [each.rpartition("/")[2] for each in names])
        raise UsageError(f"no pipeline {spec} is at hand{near}; another runs as a program: fxmem run sample.py")
    return found
