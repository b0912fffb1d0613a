"""The reference of the command line as Markdown, made from the parsers: `python -m fxmem.cli.reference > FILE.md`."""

from __future__ import annotations

import argparse
import functools
import re

from fxmem.cli.parser import Parser
from fxmem.cli.verbs import build_parser, describe

_SHARED = 3
"""Verbs that must have an argument alike before it stands in the table of shared arguments."""
_WIDTH = 100
"""Columns of a usage line."""


def reference() -> str:
    """Return the Markdown: the arguments that several verbs share, then a section for each verb.

    The verbs stand in the order of `fxmem --help`. No terminal and no environment variable changes the text.
    """
    _, parsers = build_parser()
    every = [row for parser in parsers.values() for row in _rows(parser)]
    shared = [row for row in dict.fromkeys(every) if every.count(row) >= _SHARED]
    parts = [
        "# The command line",
        "\n".join(f"- [`fxmem {verb}`](#fxmem-{verb}): {_escape(describe(verb).brief)}" for verb in parsers),
        "## Shared arguments",
        "Several verbs take these; the usage of a verb names those that it takes.",
        _table(shared),
    ]
    for verb, parser in parsers.items():
        parser.formatter_class = functools.partial(argparse.HelpFormatter, width=_WIDTH)
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
        usage = re.sub(r"\n {7}", "\n", usage)  # argparse indents by the length of what was just removed, too
        parts += [f"## fxmem {verb}", _escape(parser.description or ""), f"```text\n{usage}\n```"]
        own = [row for row in _rows(parser) if row not in shared]
        parts += [_table(own)] if own else []
    return "\n\n".join(parts) + "\n"


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| Argument | Meaning |", "|---|---|", *(f"| {words} | {meaning} |" for words, meaning in rows)])


def _rows(parser: Parser) -> list[tuple[str, str]]:
    """Each argument of a verb as the user types it, and what it means."""
    return [(_spell(action), _escape((action.help or "").replace("%%", "%"))) for action in parser.arguments()]


def _spell(action: argparse.Action) -> str:
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    value = str(action.metavar or choices or action.dest) if action.nargs != 0 else ""
    words = [", ".join(action.option_strings), f"[{value}]" if action.nargs == "?" else value]
    return "`" + " ".join(word for word in words if word).replace("|", r"\|") + "`"


def _escape(text: str) -> str:
    """The text, with nothing in it that Markdown or HTML would read as markup."""
    return re.sub(r"([|*<\[])", r"\\\1", text)


if __name__ == "__main__":
    print(reference(), end="")
