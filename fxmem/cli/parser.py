"""The argument parser: one clear line for every mistake, and no abbreviations."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from fxmem.cli.defaults import read_default
from fxmem.errors import UsageError

_SWITCH: Final = {"true": True, "1": True, "false": False, "0": False}
"""What a switch may be set to in the environment and in pyproject.toml."""


OF_SUBJECT: Final = "the model or program, and the card"
"""Heading of the options that say what a verb is asked about; they follow its own."""
SHARED_GROUPS: Final = ("the step", "kernels", "the compiler", "many cards", "a generation")
"""Headings of the options that most verbs have, which `fxmem help step` describes once."""


class Argument(NamedTuple):
    """One argument of a verb, as data."""

    names: tuple[str, ...]
    """`--output` and its like, or one name without dashes: a positional argument."""
    settings: Mapping[str, Any]
    """Keyword arguments of `argparse.ArgumentParser.add_argument`."""
    group: str = ""
    """The heading that it stands under in the help."""
    variable: str = ""
    """The environment variable that is its default; its end in small letters is the key in `[tool.fxmem]`."""
    least: int | None = None
    """The smallest number that it may be."""

    @property
    def dest(self) -> str:
        """The name of its value among the parsed ones."""
        name: str = self.settings.get("dest") or self.names[-1].lstrip("-").replace("-", "_")
        return name

    def find_default(self) -> Any:
        """Its value where it is not given: the user's own default, else the tool's."""
        chosen = read_default(self.variable) if self.variable else None
        if chosen is None:
            return self.settings.get("default", False if self.settings.get("action") == "store_true" else None)
        if self.settings.get("action") is not argparse.BooleanOptionalAction:
            return chosen
        if chosen.lower() not in _SWITCH:
            raise UsageError(f"expected {self.names[0]} to be true or false; got {chosen!r}")
        return _SWITCH[chosen.lower()]

    def is_given(self, options: argparse.Namespace) -> bool:
        """Whether it has another value than that."""
        value = getattr(options, self.dest, None)
        return value not in (None, [], "") and value != self.find_default()


def argument(*names: str, help: str, default: Any = None, least: int | None = None, **settings: Any) -> Argument:
    """Declare an argument, what the help shows for its value after its last name: `argument("-o", "--output FILE")`.

    A default other than None is named at the end of the help.
    """
    named = help if default is None else f"{help} (default {default})"
    names, shown = _read_names(*names)
    return Argument(names, {"help": named, "default": default, **shown, **settings}, least=least)


def _read_names(*words: str) -> tuple[tuple[str, ...], dict[str, str]]:
    name, _, value = words[-1].partition(" ")
    return (*words[:-1], name), {"metavar": value} if value else {}


def flag(name: str, help: str) -> Argument:
    """Declare an option without a value, False unless given."""
    return Argument((name,), {"help": help, "action": "store_true"})


def switch(name: str, help: str, **settings: Any) -> Argument:
    """Declare an option that is turned on by its name, and off by `--no-` before it."""
    return argument(name, help=help, action=argparse.BooleanOptionalAction, **settings)


def number(name: str, help: str, **settings: Any) -> Argument:
    """Declare an option whose value is a whole number, N in the help unless something follows its name."""
    return argument(name if " " in name else f"{name} N", help=help, type=int, **settings)


def repeatable(name: str, help: str, **settings: Any) -> Argument:
    """Declare an option that may be given several times, a list of its values."""
    names, shown = _read_names(name)
    return Argument(names, {"help": help, "action": "append", "default": [], **shown, **settings})


def grouped(group: str, *arguments: Argument) -> tuple[Argument, ...]:
    """The arguments under this heading, those that have one aside."""
    return tuple(each if each.group else each._replace(group=group) for each in arguments)


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, so that every error looks alike.

    It accepts no abbreviations, so that an option added later breaks no script.
    """

    def __init__(self, **settings: Any) -> None:
        self._waiting: list[Argument] = []
        self._bounded: list[Argument] = []
        self.examples: Sequence[str] = ()
        """Lines to paste, at the end of the help."""
        self.names_shared = True
        """Whether the help only names the options of `SHARED_GROUPS`."""
        super().__init__(allow_abbrev=False, **settings)
        self._negative_number_matcher = re.compile(r"-\.?\d")
        """Of argparse, which takes `-1` for a value but `-1%` for an option: no option begins with a digit."""

    def add_arguments(self, arguments: Iterable[Argument]) -> Parser:
        """Add them in this order, and return the parser.

        argparse sees them when the parser is first used: of all verbs' parsers one is, and four hundred arguments are a
        sixth of what `fxmem --help` takes.
        """
        self._waiting += arguments
        self._bounded += [each for each in self._waiting if each.least is not None and each not in self._bounded]
        return self

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        groups = {name: self.add_argument_group(name) for name in dict.fromkeys(each.group for each in waiting) if name}
        for each in waiting:
            settings = {**each.settings}
            if each.variable:
                settings["default"] = each.find_default()
            groups.get(each.group, self).add_argument(*each.names, **settings)

    def parse_known_args(  # type: ignore[override]  # argparse also takes a namespace of another class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does."""
        self._add_waiting()
        options, rest = super().parse_known_args(args, namespace)
        for each in self._bounded:
            value = getattr(options, each.dest, None)
            if each.least is not None and value is not None and value < each.least:
                unit = "" if each.settings["metavar"] == "N" else f" {each.settings['metavar'].lower()}"
                raise UsageError(f"expected {each.names[-1]} of at least {each.least}{unit}, got {value}")
        return options, rest

    def format_usage(self) -> str:
        """As argparse does."""
        self._add_waiting()
        return super().format_usage()

    def format_help(self) -> str:
        """As argparse does, and the examples; what many verbs share is named alone."""
        self._add_waiting()
        examples = "".join(f"\n  {line}" for line in self.examples)
        shared = [group for group in self._action_groups if group.title in SHARED_GROUPS]
        formatter = self._get_formatter()
        if shared and self.names_shared:
            words = " ".join(str(each.metavar) for each in self._actions if not each.option_strings)
            formatter.add_text(f"usage: {self.prog} [OPTIONS] {words}".rstrip())
        else:
            shared = []
            formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in sorted(self._action_groups, key=lambda each: each.title == OF_SUBJECT):
            if group not in shared:
                formatter.start_section(group.title)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return "".join(
            [
                formatter.format_help(),
                "\nof every step, described by `fxmem help step`:\n" if shared else "",
                *(_name_options(group.title or "", group._group_actions) for group in shared),
                f"\nexamples:{examples}\n" if examples else "",
            ]
        )

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` that says in our words what argparse complains of."""
        choice = re.fullmatch(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.+)\)", message)
        if choice is not None:
            what, got, known = choice[1], choice[2], re.findall(r"[\w.-]+", choice[3])
            message = f"expected {what} to be one of {', '.join(known)}; got {got!r}{_suggest(got, known)}"
            takers = [each.option_strings[-1] for each in self._actions if got in (each.choices or ())]
            message += f", did you mean {takers[0]} {got}?" if takers else ""
        number = re.fullmatch(r"argument (.+): invalid (int|float) value: (.+)", message)
        if number is not None:
            kind = "whole number" if number[2] == "int" else "number"
            message = f"expected {number[1]} to be a {kind}; got {number[3]}"
        raise UsageError(f"{message}; see {self.prog} --help")

    def arguments(self) -> list[argparse.Action]:
        """Every argument but `--help`, in the order of the help."""
        self._add_waiting()
        return [action for action in self._actions if action.dest != "help"]

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise a `UsageError` for words that no argument matches."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            self.error(f"unexpected argument {words[0]!r}")
        known = re.findall(r"--[a-z-]+", self.format_usage())
        if option in _OF_RANKS and _OF_RANKS[0] not in known:
            others = "analyze, run, plan, advise, max-batch, cards and compare do, and what reads their reports"
            self.error(f"no option {option}: {self.prog} takes no rank; {others}")
        after = f"; the program's own come after it: {self.prog} train.py {option}" * self.prog.endswith(" run")
        self.error(f"no option {option}{_suggest(option, known, 0.8 if after else 0.6)}{after}")


def _name_options(title: str, actions: Iterable[argparse.Action]) -> str:
    """The names of a group's options, as lines of the help."""
    names = ", ".join(action.option_strings[0] for action in actions)
    columns = shutil.get_terminal_size().columns - 2
    return textwrap.fill(f"  {title}: {names}", columns, subsequent_indent="    ", break_on_hyphens=False) + "\n"


_OF_RANKS: Final = ("--ranks", "--rank", "--parallelize", "--mesh")


_OF_OTHERS: Final = {
    **dict.fromkeys(("--gpu", "--card", "--device", "--accelerator"), "--target"),
    **dict.fromkeys(("--batch-size", "--batchsize", "--bs", "-b"), "--batch"),
    **dict.fromkeys(("--dtype", "--amp", "--autocast"), "--precision"),
    **dict.fromkeys(("--memory", "--limit", "--vram"), "--budget"),
    **dict.fromkeys(("--shape", "--inputs", "--input-shape", "--input-size"), "--input"),
    **dict.fromkeys(("--share", "--gpu-memory-utilization"), "--utilization"),
    **dict.fromkeys(("--script", "--program"), "--run"),
}
"""What other tools call an option of ours."""


def _suggest(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """`, did you mean NAME?` for the closest of the known names; empty if none is as close."""
    names = list(known)
    if word.endswith(".py") and "run" in names:
        return f", did you mean fxmem run {word}?"
    if (meant := _OF_OTHERS.get(word.lower())) in names:
        return f", did you mean {meant}?"
    begun = [each for each in names if each.startswith(word.lower())]
    near = difflib.get_close_matches(word.lower(), begun or names, n=1, cutoff=0.0 if begun else least)
    return f", did you mean {near[0]}?" if near else ""
