"""Completion scripts for bash, zsh and fish, made from the parsers: whatever a verb takes is completed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from fxmem.cli.parser import Parser
from fxmem.cli.spec_names import list_models
from fxmem.hardware import catalogue

_LIBRARIES: Final = ("torchvision:", "timm:", "hf:")


class Word(NamedTuple):
    """What may stand in one place of a command line."""

    options: tuple[str, ...] = ()
    """How the option before it is spelt; none for a positional argument."""
    help: str = ""
    values: tuple[str, ...] = ()
    """The words it may be."""
    is_model: bool = False
    """Whether it may be a model's name, too."""
    is_file: bool = False
    """Whether a file's name may stand there."""
    has_value: bool = True
    """Whether the option takes a value."""


Briefs = Mapping[str, str]
"""The verbs, each with its line in the list of commands."""
Parsers = Mapping[str, Parser]
"""The parser of each verb."""


def bash_script(briefs: Briefs, parsers: Parsers) -> str:
    """The completion for bash: `eval "$(fxmem completion bash)"`."""
    return _fill("bash", " ".join(briefs), parsers)


def zsh_script(briefs: Briefs, parsers: Parsers) -> str:
    """The completion for zsh: `eval "$(fxmem completion zsh)"`, after compinit."""
    return _fill("zsh", " ".join(_quote(f"{verb}:{brief}") for verb, brief in briefs.items()), parsers)


def fish_script(briefs: Briefs, parsers: Parsers) -> str:
    """The completion for fish: `fxmem completion fish | source`."""
    lines = ["complete -c fxmem -f", f"set -g __fxmem_models {_list_models()}"]
    first = "complete -c fxmem -n __fish_use_subcommand"
    lines += [f"{first} -a {verb} -d {_quote(brief)}" for verb, brief in briefs.items()]
    for verb, parser in parsers.items():
        for word in map(_describe, parser.arguments()):
            lines.append(" ".join([f"complete -c fxmem -n '__fish_seen_subcommand_from {verb}'", *_fish_word(word)]))
    return "\n".join(lines) + "\n"


SCRIPTS: Final = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
"""What makes the script of each shell."""


# --- what the parsers take --------------------------------------------------------------------------------------------


def _describe(action: argparse.Action) -> Word:
    spelt = str(action.metavar or "")
    values = tuple(map(str, action.choices)) if action.choices is not None else ()
    is_model = "MODEL" in spelt
    if action.dest == "target":
        values = catalogue.names()
    help = re.split(r"[;:(]", (action.help or "").replace("%%", "%"))[0].strip()
    is_file = is_model or any(hint in spelt for hint in ("FILE", ".json", ".svg", "FOLDER", "PROGRAM"))
    return Word(tuple(action.option_strings), help, values, is_model, is_file, action.nargs != 0)


def _list_models() -> str:
    return " ".join((*_LIBRARIES, *list_models()))


# --- bash and zsh -----------------------------------------------------------------------------------------------------


# In `completion.bash`: bash splits a word at each colon; the words are read from the line itself, and what is before
# the last colon is taken off the answers. Arrays are indexed as bash 3.2 (macOS) knows it.
def _fill(shell: str, verbs: str, parsers: Parsers) -> str:
    """The script beside this file, filled in."""
    script = Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    return script.replace("@VERBS@", verbs).replace("@CASES@", _cases(parsers)).replace("@MODELS@", _list_models())


def _cases(parsers: Parsers) -> str:
    """Shell cases by verb and the option before: what may follow."""
    lines = []
    for verb, parser in parsers.items():
        listed = [_describe(action) for action in parser.arguments()]
        for word in listed:
            if word.options and word.has_value:
                patterns = "|".join(_quote(f"{verb} {option}") for option in word.options)
                lines.append(f"    {patterns}) {_assign(word.values, [word])} ;;")
        free = [word for word in listed if not word.options]
        options = [option for word in listed for option in word.options]
        values = [*options, *dict.fromkeys(value for word in free for value in word.values)]
        lines.append(f"    {_quote(f'{verb} ')}*) {_assign(values, free)} ;;")
    return "\n".join(lines)


def _assign(values: Iterable[str], words: Iterable[Word]) -> str:
    words = list(words)
    models = '" $models"' if any(word.is_model for word in words) else ""
    is_file = any(word.is_file for word in words)
    return f"values={_quote(' '.join(values))}{models}; files={'yes' if is_file else ''}"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish -------------------------------------------------------------------------------------------------------------


def _fish_word(word: Word) -> Iterator[str]:
    for option in word.options:
        yield f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
    if word.options and word.has_value:
        yield "-r"
    if word.is_file:
        yield "-F"
    if word.values:
        yield f"-a {_quote(' '.join(word.values))}"
    if word.is_model:
        yield "-a '$__fxmem_models'"
    if word.options and word.help:
        yield f"-d {_quote(word.help)}"
