"""JSON documents that anybody may have written, read into records in bounded time and memory.

A report, a plan, a baseline or a target file is data: nothing in it is evaluated, imported or looked up. What is
refused, each in one line: a file larger than `max_bytes()`, a directory or a device, text that is no JSON or only a
part of one, nesting deeper than Python's parser goes, a number that is none (`NaN`, `Infinity`) or has thousands of
digits, a key given twice (RFC 8259, section 4, leaves open which one counts), a field that the record does not know,
and whatever the record itself refuses.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
import typing
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from fxmem.errors import UsageError
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Record

_Record = TypeVar("_Record", bound=BaseModel)

_LIMIT = "FXMEM_MAX_FILE_BYTES"
_DEFAULT_LIMIT = 256 << 20
_MOST_FIELDS = 100
"""Keys of an object that is no mapping, at most. No record has half as many fields."""
_PATIENCE_S, _PAUSE_S = 5.0, 0.02
"""How long a pipe may be without a writer, and how often that is looked at."""
_ITEM = "an item"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, escaped: two make a character, one alone makes text that cannot be written."""


def max_bytes() -> int:
    """Largest file read: `$FXMEM_MAX_FILE_BYTES`, else 256 MiB. A report of 200,000 storages takes some 60 MB.

    Raises:
        UsageError: the variable is no whole number above zero.
    """
    text = os.environ.get(_LIMIT, "")
    if not text:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0):
        raise UsageError(f"expected {_LIMIT} to be a number of bytes above zero, got {text[:20]!r}")
    return int(text)


def read(path: Path, expected: str) -> bytes:
    """The content of a file, or of standard input for `-`; `expected` opens the sentence of what is wrong with it.

    A pipe is read to its end, however long its writer takes once there is one.

    Raises:
        UsageError: there is no such file, it is a directory, a device or a pipe that nobody writes to, or it is longer
            than `max_bytes()`.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise UsageError(f"{expected} on stdin, which is closed")
            return _read_bounded(sys.stdin.buffer, path, expected)
        # A device may never end, and opening one may do something: looked at first.
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
            raise UsageError(f"{expected}, got {_quote(path)}, which is a device or a socket")
        if stat.S_ISFIFO(mode):
            return _read_pipe(path, expected)
        with path.open("rb") as file:
            return _read_bounded(file, path, expected)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UsageError(f"{expected}, got {_quote(path)}: {getattr(error, 'strerror', None) or error}") from error


@pause_gc()
def parse(text: bytes, path: Path, expected: str) -> Any:
    """What the JSON in a file says; `path` and `expected` as for `read`.

    UTF-8, with or without a byte-order mark, or UTF-16 or UTF-32, which some shells write when they redirect.

    Raises:
        UsageError: it is empty or no JSON, or JSON with a key given twice, `NaN` or a number of thousands of digits.
    """
    if not text.strip():
        raise UsageError(f"{expected}, got {_quote(path)}, which is empty")
    try:
        written = text.decode(json.detect_encoding(text))
        content = json.loads(written, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
        if _HALF.search(written):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{expected}, got {_quote(path)}, which is no JSON{_describe(error)}") from error


def _describe(error: RecursionError | ValueError) -> str:
    """What makes a text no JSON of ours."""
    if isinstance(error, RecursionError):
        return " of ours: it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f": no {error.encoding} at byte {error.start}"
    if isinstance(error, UnicodeEncodeError):
        return " of ours: half of a surrogate pair stands alone in it"
    if isinstance(error, json.JSONDecodeError):
        return f", or only a part of one: {error}"
    return f" of ours: {str(error).partition(';')[0]}"


@pause_gc()
def validate(kind: type[_Record], content: Any, path: Path, expected: str) -> _Record:
    """The record that JSON already parsed describes; `path` and `expected` as for `read`.

    Raises:
        UsageError: a field is missing, unknown or wrong; the message names the first.
    """
    wide = _find_wide_object(content)
    if wide is not None:
        raise UsageError(
            f"{expected}, got {_quote(path)}, in which {wide} is wrong: more than {_MOST_FIELDS} keys, and no mapping"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"] if part != "[key]") or "the whole"
        raise UsageError(f"{expected}, got {_quote(path)}, in which {where} is wrong: {first['msg']}") from error


def load(kind: type[_Record], path: Path, expected: str) -> _Record:
    """The record in a file: what `read`, `parse` and `validate` make of it."""
    return validate(kind, parse(read(path, expected), path, expected), path, expected)


def _read_pipe(path: Path, expected: str) -> bytes:
    """The content of a pipe that is written to within `_PATIENCE_S`; opened as a file, it would wait for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        for _ in range(int(_PATIENCE_S / _PAUSE_S)):
            if (first := pipe.read(1)) != b"":  # None where it has a writer that has written nothing yet
                os.set_blocking(pipe.fileno(), True)
                with open(pipe.fileno(), "rb", closefd=False) as file:
                    return _read_bounded(file, path, expected, first or b"")
            time.sleep(_PAUSE_S)
    raise UsageError(f"{expected}, got {_quote(path)}, a pipe that nobody writes to")


def _read_bounded(file: BinaryIO, path: Path, expected: str, first: bytes = b"") -> bytes:
    limit = max_bytes()
    text = first + file.read(limit + 1)
    if len(text) > limit:
        raise UsageError(
            f"{expected}, of at most {limit} bytes, got {_quote(path)}, which is longer; {_LIMIT} sets another limit"
        )
    return text


def _quote(path: Path) -> str:
    return repr(str(path))


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:40]!r} is given twice")
        seen.add(key)
    raise AssertionError("unreachable: fewer keys than pairs")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


# --- objects wider than any record ------------------------------------------------------------------------------------


def _find_wide_object(content: Any) -> str | None:
    """Name of a field whose object has more keys than any record; None if there is none.

    pydantic lists every unknown field, at more than a kilobyte each. Sequences and mappings stop at the first mistake
    (`Many`, `Mapped`); a record has no such setting.
    """
    mappings = _mapping_fields()
    pending: list[tuple[str, Any]] = [("the whole", content)]
    while pending:
        name, value = pending.pop()
        if type(value) is list:
            pending += [(_ITEM, each) for each in value if type(each) in (dict, list)]
        elif type(value) is dict:
            if len(value) > _MOST_FIELDS and name not in mappings:
                return name[:40]
            # A mapping's keys are no fields' names.
            pending += [
                (_ITEM if name in mappings else key, each) for key, each in value.items() if type(each) in (dict, list)
            ]
    return None


@cache
def _mapping_fields() -> frozenset[str]:
    """Names of the fields of records that are mappings, whose keys may be any number."""
    records = [Record]
    for record in records:  # grows as it is read
        records += record.__subclasses__()
    return frozenset(
        name
        for record in records
        for name, field in record.model_fields.items()
        if typing.get_origin(field.annotation) is dict
    )
