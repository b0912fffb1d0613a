"""Reading a report back from JSON, with no torch, trusting nothing in it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.records import json_reader
from fxmem.records.advice import Advice
from fxmem.records.pause_gc import pause_gc
from fxmem.records.plan import Plan
from fxmem.records.profile import SCHEMA_VERSION, Report, Timeline

_Document = TypeVar("_Document", Report, Plan, Advice)
_EXPECTED = "expected a report written by `fxmem analyze --json`"
_EXPECTED_PLAN = "expected --plan to name a plan written by `fxmem plan --json`"
_FROM_STORAGES = ("requested_bytes", "phase", "tick", "op", "node", "by_kind")
"""What of a peak follows from the storages alone; the rest is the allocator's."""


@pause_gc()
def load_report(path: Path) -> Report:
    """The report in a file that `fxmem analyze --json` wrote; `-` is standard input. What is refused: `documents`, and
    `liveness.check`.

    Raises:
        UsageError: no such file, not JSON, another version, fields missing or wrong, or a report that contradicts
            itself.
    """
    report = _load(Report, path, _EXPECTED, "a report", "fxmem analyze --json")
    # Every tick is a storage that comes or goes, but for tick 0. Checked first: what follows takes memory by the tick.
    if report.ticks > 2 * len(report.storages) + 1:
        raise UsageError(
            f"{_EXPECTED}, got {str(path)!r}, which says {report.ticks} ticks of {len(report.storages)} storages"
        )
    liveness.check(report)
    return report


def load_plan(path: str | Path) -> Plan:
    """The plan in a file that `fxmem plan --json` wrote; `-` is standard input.

    Raises:
        UsageError: no such file, not JSON, another version, fields missing or wrong, or regions that are none.
    """
    path = Path(path)
    plan = _load(Plan, path, _EXPECTED_PLAN, "a plan", "fxmem plan --json")
    for region in plan.all_regions():
        first, last = region.first_node, region.last_node
        got = f"{_EXPECTED_PLAN}, got {str(path)!r}, in which a region"
        if not 0 <= first < last:
            raise UsageError(f"{got} covers nodes [{first}, {last})")
        if any(not first <= within.first_node < within.last_node <= last for within in region.regions):
            raise UsageError(f"{got} within [{first}, {last}) goes beyond it")
    return plan


def load_advice(path: Path) -> Advice:
    """The advice in a file that `fxmem advise --json` wrote; `-` is standard input.

    Raises:
        UsageError: no such file, not JSON, another version, or fields missing or wrong.
    """
    return _load(Advice, path, "expected the JSON that `fxmem advise --json` writes", "advice", "fxmem advise --json")


def timeline(report: Report) -> Timeline:
    """The timeline of a report. Its peak is the report's, the allocator's byte counts included.

    Raises:
        UsageError: the peak is not that of the report's storages.
    """
    line = liveness.timeline(report)
    for field in _FROM_STORAGES:
        if getattr(report.peak, field) != getattr(line.peak, field):
            raise UsageError(
                f"the report contradicts itself: peak.{field} is not what follows from its storages; write it anew "
                f"with `fxmem analyze --json`"
            )
    return line.model_copy(update={"peak": report.peak})


def _load(kind: type[_Document], path: Path, expected: str, what: str, command: str) -> _Document:
    """A document of another version has other fields: that they differ is the lesser news."""
    content = json_reader.parse(json_reader.read(path, expected), path, expected)
    version = content.get("schema_version", SCHEMA_VERSION) if isinstance(content, dict) else SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        got = f"{str(version)[:20]!r} in {str(path)!r}"
        raise UsageError(
            f"expected {what} of schema version {SCHEMA_VERSION!r}, got version {got}; write it anew with `{command}`"
        )
    return json_reader.validate(kind, content, path, expected)
