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
def find_format(source: str) -> Format:
    """The first format of a source; empty is PyTorch's allocator."""
    return next(each for row in _read()["formats"] if (each := Format(**row)).source == source)


@cache
def patterns_by_word() -> Mapping[str, tuple[re.Pattern[str], Sequence[Format]]]:
    """For each word, a pattern with a group for each format that it stands in, and these formats."""
    formats: dict[str, list[Format]] = {}
    for row in _read()["formats"]:
        for word in row["words"]:
            formats.setdefault(word, []).append(Format(**row))
    return {word: (re.compile("|".join(f"({each.pattern})" for each in have)), have) for word, have in formats.items()}
