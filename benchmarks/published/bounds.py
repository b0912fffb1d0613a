"""Check errors against the bounds beside the figures, and tighten the bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from .results import Row
from .tables import TABLES, cases_of, format_tables

SMALLEST_BOUND = 0.001
"""In percent. A figure of 10 GiB is then held to 100 KiB."""


def bound_of(error_percent: float) -> float:
    """The bound that a prediction with this error keeps from now on, in percent."""
    return max(SMALLEST_BOUND, round(abs(error_percent) * 1.0005 + 0.0005, 3))


def tighten(errors: Mapping[str, float], folder: Path = TABLES) -> int:
    """Write smaller bounds for these errors, by the name of the case; return how many rows changed."""
    changed = 0
    for path in sorted(folder.glob("*.json")):
        tables = json.loads(path.read_text(encoding="utf-8"))
        for table in tables:
            for case, row in zip(cases_of(table), table["rows"], strict=True):
                error = errors.get(case.name)
                if error is None or bound_of(error) >= row.get("bound", float("inf")):
                    continue
                row["bound"] = bound_of(error)
                changed += 1
        path.write_text(format_tables(tables), encoding="utf-8")
    return changed


def broken(rows: Iterable[Row]) -> list[str]:
    """List the cases whose error is larger than its bound, or that have a bound and no prediction any more."""
    found = []
    for row in rows:
        bound = row.case.bound
        if bound is None:
            continue
        if row.error_percent is None:
            found.append(f"{row.case.name}: no prediction any more: {row.refusal or row.case.not_run}")
        elif abs(row.error_percent) > bound:
            found.append(f"{row.case.name}: {row.error_percent:+.4f} %, the bound is {bound:g} %")
    return found
