"""Reading a report back from JSON, with no torch, trusting nothing in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from fxmem import liveness
from fxmem.errors import UsageError
from fxmem.plan_records import Plan
from fxmem.records import SCHEMA_VERSION, Report, Timeline

__all__ = ["MAX_BYTES", "load_plan", "load_report", "timeline"]

MAX_BYTES = 1 << 30
"""Largest report read; one of 200,000 storages takes some 60 MB."""

_EXPECTED = "expected a report written by `fxmem analyze --json`"
_FROM_STORAGES = ("requested_bytes", "phase", "tick", "op", "node", "by_kind")
"""What of a peak follows from the storages alone; the rest is the allocator's."""


def load_report(path: Path) -> Report:
    """The report in a file that `fxmem analyze --json` wrote; `-` is standard input.

    Raises:
        UsageError: no such file, not JSON, another version, fields missing or wrong, or a report that contradicts itself.
    """
    try:
        if str(path) == "-":
            text = _read(sys.stdin.buffer)
        else:
            with path.open("rb") as file:
                text = _read(file)
    except OSError as error:
        raise UsageError(f"{_EXPECTED}, got {str(path)!r}: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise UsageError(f"{_EXPECTED}, of at most {MAX_BYTES} bytes, got {str(path)!r}, which is longer")
    if not text.strip():
        raise UsageError(f"{_EXPECTED}, got {str(path)!r}, which is empty")
    try:
        report = Report.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(_complaint(path, text, error)) from error
    if report.schema_version != SCHEMA_VERSION:
        raise UsageError(_other_version(path, report.schema_version))
    # Every tick is a storage that comes or goes, but for tick 0. Checked first: what follows takes memory by the tick.
    if report.ticks > 2 * len(report.storages) + 1:
        raise UsageError(f"{_EXPECTED}, got {str(path)!r}, which says {report.ticks} ticks of {len(report.storages)} storages")
    liveness.check(report)
    return report


def load_plan(path: Path) -> Plan:
    """The plan in a file that `fxmem plan --json` wrote.

    Raises:
        UsageError: no such file, no JSON, fields missing or wrong.
    """
    expected = "expected --plan to name a plan written by `fxmem plan --json`"
    try:
        with path.open("rb") as file:
            text = _read(file)
    except OSError as error:
        raise UsageError(f"{expected}, got {str(path)!r}: {error.strerror}") from error
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise UsageError(f"{expected}, got {str(path)!r}, in which {where} is wrong: {first['msg']}") from error


def timeline(report: Report) -> Timeline:
    """The timeline of a report, with the peak as the report has it, the allocator's byte counts included.

    Raises:
        UsageError: the peak is not that of the report's storages.
    """
    line = liveness.timeline(report)
    for field in _FROM_STORAGES:
        if getattr(report.peak, field) != getattr(line.peak, field):
            raise UsageError(f"the report contradicts itself: peak.{field} is not what follows from its storages; write it anew with `fxmem analyze --json`")
    return line.model_copy(update={"peak": report.peak})


def _read(file: BinaryIO) -> bytes:
    return file.read(MAX_BYTES + 1)


def _complaint(path: Path, text: bytes, error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"{_EXPECTED}, got {str(path)!r}, which is no JSON, or only a part of one: {first['msg'].removeprefix('Invalid JSON: ')}"
    # A report of another version has other fields: that they differ is the lesser news.
    content: Any = json.loads(text)
    if isinstance(content, dict) and content.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        return _other_version(path, content["schema_version"])
    where = ".".join(str(part) for part in first["loc"]) or "the whole"
    return f"{_EXPECTED}, got {str(path)!r}, in which {where} is wrong: {first['msg']}"


def _other_version(path: Path, version: object) -> str:
    got = f"{str(version)[:20]!r} in {str(path)!r}"
    return f"expected a report of schema version {SCHEMA_VERSION!r}, got version {got}; write it anew with `fxmem analyze --json`"
