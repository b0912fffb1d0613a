"""Read and write the tables of published figures.

A table has the fields its rows share (`SHARED`); a row (`ROW`) has the settings that vary, the figure, and the bound
that its prediction must keep. Figures stand as published, in the unit of their source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxmem.hardware import catalogue
from fxmem.records.profile import Target

TABLES = Path(__file__).parent / "tables"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}
STATISTICS = {
    "requested": "what the program asked for, summed over live blocks",
    "allocated": "torch.cuda.max_memory_allocated",
    "reserved": "torch.cuda.max_memory_reserved",
}
GRADES = {
    "A": "program, exact number and statistic are published",
    "B": "one thing is unknown or rounded",
    "C": "the publication contradicts itself",
    "S": "measured by `fxmem validate --share`, and sent in by who ran it",
}
SHARED = (
    *("name", "source", "card", "target", "torch", "statistic", "unit", "grade", "step", "settings", "less"),
    *("digits", "note", "cause", "not_run", "environment", "memory_gib", "release"),
)
ROW = ("at", "figure", "bound", "sample", *SHARED[2:])


@dataclass(frozen=True)
class Case:
    """One published figure with the step it was measured in."""

    table: str
    name: str
    source: str
    card: str
    """As published."""
    target: str
    """The card's name in fxmem's catalogue."""
    memory_gib: float | None
    """The card's memory, where the catalogue's card of this name has another one."""
    torch: str
    """The release it was measured with; with a question mark where it follows from dates."""
    release: str | None
    """The release that is predicted for; None for the one installed."""
    statistic: str
    grade: str
    figure: float
    unit: str
    step: str
    settings: Mapping[str, Any]
    less: Mapping[str, Any] | None
    """The settings of a second step whose prediction is subtracted, for the difference of two published rows."""
    digits: float | None
    """Half of the last published digit, in the unit of the figure; None for exact figures."""
    note: str
    cause: str
    """Why the prediction is off, where the reason is known."""
    not_run: str
    """Why no prediction is made."""
    environment: Mapping[str, str]
    bound: float | None
    """The largest error allowed, in percent; None until the first prediction."""
    sample: bool
    """Whether the test suite predicts this case each time."""
    recorded: int | None = None
    """The prediction that stands beside a figure which others sent in, in bytes: what a case that is not run has."""

    @property
    def nbytes(self) -> float:
        """The figure in bytes."""
        return self.figure * UNITS[self.unit]

    @property
    def place(self) -> Target:
        """What the prediction is for."""
        card = catalogue.with_torch(self.target, self.release)
        if self.memory_gib is None:
            return card
        return card.model_copy(update={"memory_bytes": int(self.memory_gib * UNITS["GiB"])})


def read_cases(folder: Path = TABLES) -> Iterator[Case]:
    """Read every case of the tables, in order of file and row."""
    for path in sorted(folder.glob("*.json")):
        for table in json.loads(path.read_text(encoding="utf-8")):
            yield from cases_of(table)


def cases_of(table: Mapping[str, Any]) -> Iterator[Case]:
    """Read the cases of one table."""
    unknown = set(table) - {*SHARED, "rows"}
    if unknown:
        raise ValueError(f"{table['name']}: a table has no field {sorted(unknown)}")
    for row in table["rows"]:
        unknown = set(row) - set(ROW)
        if unknown:
            raise ValueError(f"{table['name']}: a row has no field {sorted(unknown)}")
        merged = {**table, **row}
        at = row.get("at", {})
        label = ", ".join(f"{key}={value}" for key, value in at.items())
        less = merged.get("less")
        case = Case(
            table=table["name"],
            name=f"{table['name']}: {label}" if label else table["name"],
            source=table["source"],
            **{field: merged[field] for field in ("card", "target", "torch", "statistic", "grade", "figure", "unit")},
            step=merged.get("step", ""),
            settings={**table.get("settings", {}), **row.get("settings", {}), **at},
            less=None if less is None else {**table.get("settings", {}), **row.get("settings", {}), **less},
            memory_gib=merged.get("memory_gib"),
            release=merged.get("release"),
            digits=merged.get("digits"),
            **{field: merged.get(field, "") for field in ("note", "cause", "not_run")},
            environment=merged.get("environment", {}),
            bound=row.get("bound"),
            sample=row.get("sample", False),
        )
        _check(case)
        yield case


def _check(case: Case) -> None:
    for value, known in ((case.unit, UNITS), (case.statistic, STATISTICS), (case.grade, GRADES)):
        if value not in known:
            raise ValueError(f"{case.name}: `{value}` is none of {', '.join(known)}")
    if bool(case.step) == bool(case.not_run):
        raise ValueError(f"{case.name}: either a step or the reason why it is not run")


def format_tables(tables: Iterable[Mapping[str, Any]]) -> str:
    """Write tables as JSON with a line for each field and for each row."""
    texts = []
    for table in tables:
        fields = [f"  {_dump(key)}: {_dump(value)}" for key, value in table.items() if key != "rows"]
        rows = ",\n".join(f"   {_dump(row)}" for row in table["rows"])
        texts.append(" {\n" + ",\n".join(fields) + ',\n  "rows": [\n' + rows + "\n  ]\n }")
    return "[\n" + ",\n".join(texts) + "\n]\n"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
