"""Ways of saying that memory ran out, and what the causes come to in words: the tables of `formats.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fxmem.records.shortage import Cause


class Format(NamedTuple):
    """A way of saying it; its fields are described in the file."""

    words: Sequence[str]
    pattern: str
    source: str = ""
    cause: Cause = "unknown"
    api: str = ""
    is_hint: bool = False
    means: str = ""
    change: str = ""
    unless: str = ""
    line: str = ""


class CauseWords(NamedTuple):
    """What a cause is, what to do, and what it comes to for the card of a snapshot."""

    means: str
    change: str
    card: str = "not known"


@cache
def _read() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))


@cache
def find_words(cause: Cause) -> CauseWords:
    """The words of a cause."""
    return CauseWords(**_read()["causes"][cause])


@cache
def all_formats() -> Sequence[Format]:
    """The tables, in their order."""
    return [Format(**row) for row in _read()["formats"]]


@cache
def find_format(source: str) -> Format:
    """The first format of a source; empty is PyTorch's allocator."""
    return next(each for each in all_formats() if each.source == source)


def find_by_line(line: str) -> Format | None:
    """The first format with words for a line that this one has."""
    return next((each for each in all_formats() if each.line and re.search(each.line, line)), None)


@cache
def patterns_by_word(*, is_hint: bool) -> Mapping[str, tuple[re.Pattern[str], Sequence[Format]]]:
    """For each word of hints, or of the others, a pattern with a group for each format of it, and these formats."""
    formats: dict[str, list[Format]] = {}
    for each in all_formats():
        for word in each.words if each.is_hint == is_hint else ():
            formats.setdefault(word, []).append(each)
    return {word: (re.compile("|".join(f"({each.pattern})" for each in have)), have) for word, have in formats.items()}
