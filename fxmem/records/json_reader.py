"""JSON documents that anybody may have written, read into records in bounded time and memory.

A report, a plan, a baseline or a target file is data: nothing in it is evaluated, imported or looked up. What is
refused, each in one line: a file larger than `max_bytes()`, a directory or a device, text that is no JSON or only a
part of one, nesting deeper than Python's parser goes, a number that is none (`NaN`, `Infinity`) or has thousands of
digits, a key given twice (RFC 8259, section 4, leaves open which one counts), a field that the record does not know,
and whatever the record itself refuses.
"""

from __future__ import annotations

import enum
import json
import os
import re
import stat
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from fxmem.errors import UsageError
from fxmem.records.pause_gc import uncollected

__all__ = ["max_bytes", "parsed", "read", "record"]

_Record = TypeVar("_Record", bound=BaseModel)

_LIMIT = "FXMEM_MAX_FILE_BYTES"
_DEFAULT_LIMIT = 256 << 20
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

    A pipe is read to its end, however long its writer takes.

    Raises:
        UsageError: there is no such file, it is a directory or a device, or it is longer than `max_bytes()`.
    """
    try:
        if str(path) == "-":
            return _bounded(_stdin(expected), path, expected)
        # A device may never end, and opening one may do something: looked at first.
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
            raise UsageError(f"{expected}, got {_named(path)}, which is a device or a socket")
        with path.open("rb") as file:
            return _bounded(file, path, expected)
    except OSError as error:
        raise UsageError(f"{expected}, got {_named(path)}: {error.strerror or error}") from error
    except ValueError as error:  # a null character in the name
        raise UsageError(f"{expected}, got {_named(path)}: {error}") from error


@uncollected()
def parsed(text: bytes, path: Path, expected: str) -> Any:
    """What the JSON in a file says; `path` and `expected` as for `read`.

    UTF-8, with or without a byte-order mark, or UTF-16 or UTF-32, which some shells write when they redirect.

    Raises:
        UsageError: it is empty or no JSON, or JSON with a key given twice, `NaN` or a number of thousands of digits.
    """
    if not text.strip():
        raise UsageError(f"{expected}, got {_named(path)}, which is empty")
    try:
        written = text.decode(json.detect_encoding(text))
        content = json.loads(written, object_pairs_hook=_unique, parse_constant=_no_number)
        if _HALF.search(written):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError as error:
        raise UsageError(
            f"{expected}, got {_named(path)}, which is no JSON of ours: it is nested too deeply"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{expected}, got {_named(path)}, which is no JSON: no {error.encoding} at byte {error.start}"
        ) from error
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{expected}, got {_named(path)}, which is no JSON of ours: half of a surrogate pair stands alone in it"
        ) from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{expected}, got {_named(path)}, which is no JSON, or only a part of one: {error}") from error
    except ValueError as error:
        raise UsageError(
            f"{expected}, got {_named(path)}, which is no JSON of ours: {str(error).partition(';')[0]}"
        ) from error


@uncollected()
def record(kind: type[_Record], content: Any, path: Path, expected: str) -> _Record:
    """The record that JSON already parsed describes; `path` and `expected` as for `read`.

    Raises:
        UsageError: a field is missing, unknown or wrong; the message names the first.
    """
    # pydantic lists every mistake, at more than a kilobyte each. Its sequences stop at the first one (`records.Many`);
    # these cannot be told to.
    for where, what in _unbounded(kind, [content], lambda _: ""):
        raise UsageError(f"{expected}, got {_named(path)}, in which {where} is wrong: {what}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "the whole"
        raise UsageError(f"{expected}, got {_named(path)}, in which {where} is wrong: {first['msg']}") from error


def _bounded(file: BinaryIO, path: Path, expected: str) -> bytes:
    limit = max_bytes()
    text = file.read(limit + 1)
    if len(text) > limit:
        raise UsageError(
            f"{expected}, of at most {limit} bytes, got {_named(path)}, which is longer; {_LIMIT} sets another limit"
        )
    return text


def _stdin(expected: str) -> BinaryIO:
    if sys.stdin is None:
        raise UsageError(f"{expected} on stdin, which is closed")
    return sys.stdin.buffer


def _named(path: Path) -> str:
    return repr(str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:40]!r} is given twice")
        seen.add(key)
    raise AssertionError("unreachable: fewer keys than pairs")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


# --- what would be as many mistakes as the file is long ---------------------------------------------------------------


def _unbounded(
    kind: type[BaseModel], contents: Sequence[Any], place: Callable[[int], str]
) -> Iterator[tuple[str, str]]:
    """Keys that records do not know or lack, and values that a mapping does not take, and where. Goes by columns, hence
    quick.

    `place` is where the content of an index stands.
    """
    places, objects = (
        [index for index, each in enumerate(contents) if type(each) is dict],
        [each for each in contents if type(each) is dict],
    )
    if not objects:
        return
    known, required = (
        frozenset(kind.model_fields),
        frozenset(name for name, field in kind.model_fields.items() if field.is_required()),
    )
    for index, each in zip(places, objects, strict=True):
        if not known.issuperset(each):
            yield place(index) + next(key for key in each if key not in known)[:40], "Extra inputs are not permitted"
        if not required <= each.keys():
            yield (
                place(index) + next(name for name in kind.model_fields if name in required and name not in each),
                "Field required",
            )
    for name, field in kind.model_fields.items():
        inner, mapping = _held(field.annotation)
        if inner is None and mapping is None:
            continue
        for index, each in zip(places, objects, strict=True):
            if mapping is not None and type(each.get(name)) is dict:
                yield from _bad_mapping(mapping, each[name], f"{place(index)}{name}.")
        if inner is not None and mapping is None:
            column = [each[name] if type(each.get(name)) is list else [each.get(name)] for each in objects]

            def nested(flat: int, column: list[list[Any]] = column, name: str = name) -> str:
                for index, items, each in zip(places, column, objects, strict=True):
                    if flat < len(items):
                        return f"{place(index)}{name}." + (f"{flat}." if type(each.get(name)) is list else "")
                    flat -= len(items)
                raise AssertionError("unreachable: an index into the column")

            yield from _unbounded(inner, [value for items in column for value in items], nested)


def _held(annotation: Any) -> tuple[type[BaseModel] | None, tuple[Any, Any] | None]:
    """The record that a field holds, one or many of, and the types of its keys and values if it is a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, None
    inner, mapping = None, None
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict:
        mapping = arguments[0], arguments[1]
    for argument in arguments:
        found, further = _held(argument)
        inner, mapping = inner or found, mapping or further
    return inner, mapping


def _bad_mapping(types: tuple[Any, Any], mapping: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    keys, values = types
    base = typing.get_args(values)[0] if typing.get_origin(values) is typing.Annotated else values
    known = frozenset(keys) if issubclass(keys, enum.StrEnum) else frozenset(mapping)
    for key in mapping:
        if key not in known:
            yield f"{where}{key[:40]}", f"expected one of {', '.join(sorted(known))}"
    for key, value in mapping.items():
        if issubclass(base, BaseModel):
            yield from _unbounded(base, [value], lambda _, key=key: f"{where}{key[:40]}.")  # type: ignore[misc]
        elif base is str and type(value) is not str:
            yield f"{where}{key[:40]}", "Input should be a string"
        elif base is int and (type(value) is not int or value < 0):
            yield f"{where}{key[:40]}", "Input should be a whole number of at least 0"
