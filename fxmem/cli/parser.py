"""The argument parser: one clear line for every mistake, and no abbreviations."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from fxmem.errors import UsageError

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every error looks alike, and takes no abbreviations, so that an option added
    later breaks no script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """argparse's complaint, in our words."""
        choice = re.fullmatch(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.+)\)", message)
        if choice is not None:
            what, got, known = choice[1], choice[2], re.findall(r"[\w.-]+", choice[3])
            message = f"expected {what} to be one of {', '.join(known)}; got {got!r}{_meant(got, known)}"
        number = re.fullmatch(r"argument (.+): invalid (int|float) value: (.+)", message)
        if number is not None:
            message = (
                f"expected {number[1]} to be a {'whole number' if number[2] == 'int' else 'number'}; got {number[3]}"
            )
        raise UsageError(f"{message}; see {self.prog} --help")

    def arguments(self) -> list[argparse.Action]:
        """Every argument but `--help`, in the order of the help."""
        return [action for action in self._actions if action.dest != "help"]

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Complain of words that no argument takes."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            self.error(f"unexpected argument {words[0]!r}")
        self.error(f"no option {option}{_meant(option, re.findall(r'--[a-z-]+', self.format_usage()))}")


def _meant(word: str, known: Iterable[str]) -> str:
    whole = list(known)
    begun = [each for each in whole if each.startswith(word.lower())]
    near = difflib.get_close_matches(word.lower(), begun or whole, n=1, cutoff=0.0 if begun else 0.6)
    return f", did you mean {near[0]}?" if near else ""
