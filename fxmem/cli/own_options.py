"""Options of fxmem's own after a program's name, where they are the program's."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fxmem.cli.step import require_torch
from fxmem.errors import UsageError

_PARSERS: Final = re.compile(
    r"\b(argv|argparse|\w*ArgumentParser|click|fire|typer|tyro|hydra|absl|jsonargparse|simple_parsing|LightningCLI|"
    r"docopt|getopt|optparse|configurator)\b"
)
"""What reads options in a source that names them without dashes: as fields, parameters or keys."""
_IMPORT: Final = re.compile(r"^\s*(?:from\s+([\w.]+)\s+)?import\s+(.+)$", re.MULTILINE)


def without_separator(words: Sequence[str]) -> list[str]:
    """Leave out a `--` after `--run`: argparse would end there what belongs to it."""
    at = words.index("--run") + 1 if "--run" in words and words[0] != "run" else len(words)
    return [*words[:at], *words[at + (words[at : at + 1] == ["--"]) :]]


def check_own_options(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Refuse an option of fxmem's own after a program whose source does not know it.

    Of a launcher, what counts is the program that it starts. What a program without a source here knows, as an
    installed module, is not known. `--` before the program gives it all that follows.

    Args:
        options: as `words` were parsed.
        words: the command line.
    """
    given = getattr(options, "run_program", None)
    arguments = given if given is not None else getattr(options, "arguments", [])
    before = words[: len(words) - len(arguments)]
    if not arguments or "--" in before:
        return
    is_module = given[:1] == ["-m"] if given is not None else options.m
    program = options.program if given is None else given[is_module] if len(given) > is_module else ""
    own = {name for action in options.parser.arguments() for name in action.option_strings if name.startswith("--")}
    if own.isdisjoint(word.partition("=")[0] for word in arguments):
        return
    started, file, further = program, _find_source(program, is_module=is_module), arguments
    if file is None:
        further = arguments if given is None else given[1 + is_module :]
        started, file, further = _find_started(program, further, is_module=is_module)
    for word in further:
        name = word.partition("=")[0]
        if name in own and not _knows(file, name):
            verb = options.parser.prog.partition(" ")[2]
            flag = "-m " * is_module
            place = f"{flag}-- {program}" if given is None else f"--run -- {flag}{program}"
            raise UsageError(
                f"expected {name} before {program if given is None else '--run'}: what follows a program is its own, "
                f"and the source of {started} does not know {name}; to give it to the program all the same: "
                f"fxmem {verb} {place} {name}"
            )


def _find_started(program: str, arguments: Sequence[str], *, is_module: bool) -> tuple[str, Path | None, Sequence[str]]:
    """What a launcher starts, its file and its words; None for a file that is not here."""
    require_torch()
    from fxmem.simulation.program import Launch, find_started

    started = find_started(Launch(program, tuple(arguments), is_module))
    return started.program, _find_source(started.program, is_module=started.is_module), started.arguments


def _find_source(program: str, *, is_module: bool) -> Path | None:
    """The file of a program; None where it is not one in Python here."""
    if not is_module:
        return Path(program) if program.endswith(".py") and Path(program).is_file() else None
    path = Path(*program.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__main__.py") if each.is_file()), None)


def _knows(file: Path | None, name: str) -> bool:
    """Whether a program may know an option; True where it has no source here."""
    if file is None:
        return True
    text = "\n".join(each.read_text(encoding="utf-8", errors="replace") for each in _find_sources(file))
    word = name[2:].replace("-", "[-_]")
    if re.search(rf"--{word}\b", text):
        return True
    return bool(_PARSERS.search(text) and re.search(rf"\b{word}\s*[:=]|[\"']{word}[\"']", text))


def _find_sources(file: Path) -> Iterator[Path]:
    """The file, and those that it imports from here, theirs as well."""
    waiting, seen = [file], {file}
    while waiting:
        found = waiting.pop()
        yield found
        for module, names in _IMPORT.findall(found.read_text(encoding="utf-8", errors="replace")):
            for name, root in itertools.product(re.findall(r"[\w.]+", names), (found.parent, file.parent, Path())):
                path = root.joinpath(*filter(None, [*module.split("."), *name.split(".")]))
                for each in (Path(f"{path}.py"), path / "__init__.py", Path(f"{path.parent}.py")):
                    if each not in seen and each.is_file():
                        seen.add(each)
                        waiting.append(each)
