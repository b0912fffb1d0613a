"""Edits of a program's source, as the text that Python reads in a file's place and as a patch of the user's files."""

from __future__ import annotations

import difflib
import linecache
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple


class SourceEdit(NamedTuple):
    """A part of a line, and what stands there instead. Those of one file compose: each is of the file as it is."""

    path: str
    """The file's real path."""
    line: int
    """From 1; the one after the last is the file's end."""
    begin: int
    end: int
    """`[begin, end)` are bytes of the line in UTF-8, as `ast` counts them; the same twice inserts."""
    text: str


def _split(text: str) -> list[str]:
    """Lines as Python's files have them: a form feed ends none."""
    return text.replace("\n", "\n\0").split("\0")[: None if not text.endswith("\n") else -1]


def apply_edits(edits: Iterable[SourceEdit]) -> Mapping[str, str]:
    """The edited files' texts, by real path.

    Raises:
        ValueError: two edits are of one place.
    """
    found = {}
    for path, group in groupby(sorted({*edits}), key=lambda each: each.path):
        there = list(group)
        for one, other in pairwise(there):
            is_same = one[:4] == other[:4] and not (one.text.endswith("\n") and other.text.endswith("\n"))
            if one.line == other.line and (one.end > other.begin or is_same):
                raise ValueError(f"two edits of line {one.line}")
        lines = [each.encode() for each in (*linecache.getlines(path), "")]
        for _, line, begin, end, text in reversed(there):
            old = lines[line - 1]
            lines[line - 1] = old[:begin] + text.encode() + old[end:]
        found[path] = b"".join(lines).decode()
    return found


def edited_lines(edits: Iterable[SourceEdit], first: int, last: int) -> str:
    """The lines `[first, last]` of the one file that is edited there."""
    edits = list(edits)
    path = edits[0].path
    beyond = len(linecache.getlines(path)) - last
    lines = _split(apply_edits(edits)[path])
    return "".join(lines[first - 1 : len(lines) - beyond])


def write_patch(edits: Iterable[SourceEdit], folder: str) -> str:
    """The edits as a patch that `git apply` and `patch -p1` take in a folder.

    Raises:
        ValueError: a file is not below the folder, or no UTF-8, or was changed since Python read it.
    """
    return "".join(
        "".join(_diff_file(path, text, os.path.realpath(folder))) for path, text in apply_edits(edits).items()
    )


def _diff_file(path: str, text: str, folder: str) -> Iterator[str]:
    name = os.path.relpath(path, folder).replace(os.sep, "/")
    if name.startswith(os.pardir) or os.path.isabs(name):
        raise ValueError(f"{path} is not below {folder}")
    raw = Path(path).read_bytes().decode()
    mark = raw[: raw.startswith("\ufeff")]
    ending = "\r\n" if "\r\n" in raw else "\n"
    old = raw[len(mark) :].replace("\r\n", "\n")
    if old.removesuffix("\n") != "".join(linecache.getlines(path)).removesuffix("\n"):
        raise ValueError(f"{path} is not as it was when it ran")
    text = text if old.endswith("\n") or not old else text.removesuffix("\n")
    diff = difflib.unified_diff(_split(mark + old), _split(mark + text), f"a/{name}", f"b/{name}")
    for number, line in enumerate(diff):
        if not line.endswith("\n"):
            yield f"{line}\n\\ No newline at end of file\n"
        else:
            yield line if number < 2 or line.startswith("@@") else line.removesuffix("\n") + ending
