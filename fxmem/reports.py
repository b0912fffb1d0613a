"""Reading a report back from JSON, with no torch, trusting nothing in it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from fxmem import liveness
from fxmem.errors import UsageError
from fxmem.records import SCHEMA_VERSION, Report

__all__ = ["MAX_BYTES", "load_report"]

MAX_BYTES = 1 << 30
"""Largest report read; one of 200,000 storages takes some 60 MB."""


def load_report(path: Path) -> Report:
    """The report in a file that `fxmem analyze --json` wrote.

    Raises:
        UsageError: no such file, not JSON, another version, fields missing or wrong, or a report that contradicts itself.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UsageError(f"expected a report of at most {MAX_BYTES} bytes, got {str(path)!r} of {size}")
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"expected a report written by `fxmem analyze --json`, got {str(path)!r}: {error.strerror}") from error
    try:
        report = Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"expected a report written by `fxmem analyze --json`, got {str(path)!r}, in which {where} is wrong: {first['msg']}") from error
    if report.schema_version != SCHEMA_VERSION:
        raise UsageError(f"expected a report of schema version {SCHEMA_VERSION}, got version {report.schema_version} in {str(path)!r}; analyse the model again")
    liveness.check(report)
    return report
