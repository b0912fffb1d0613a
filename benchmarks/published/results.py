"""What a run found, kept as JSON and written as a Markdown table with every row."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fxmem

from .prediction import Prediction
from .tables import GRADES, STATISTICS, UNITS, Case
from .traces import Replay

EXPLAINED_FROM_PERCENT = 3.0
"""A larger error is listed with its reason."""
PACKAGES = ("torch", "torchvision", "timm", "transformers", "peft", "torchao", "diffusers")


INTRODUCTION = (
    "Others have measured steps on real cards and published the figures with their programs. Each row below is",
    "such a figure beside the prediction for the same step, misses included. The steps are written anew from what",
    "the programs do, and their settings are read from the source. Where a setting was settled after the first",
    "comparison, by another part of the source, the table says so.",
    "",
    "The tables are data, in `benchmarks/published/tables`: to add a figure, add a row there, and a function that",
    "builds its step in `benchmarks/published/steps`. `make published` then writes this page. The error of every",
    "row may only become smaller: the bound stands beside the figure, and a sample of the rows is predicted with",
    "every run of the tests.",
    "",
    "Rows of grade S were sent in: files of `fxmem validate --share` in `benchmarks/published/shared`, on a card or",
    "on a CPU. Those of a public model are predicted anew, the others stand as they were recorded.",
)
"""What the page begins with."""


@dataclass(frozen=True)
class Row:
    """A case with its prediction."""

    case: Case
    predicted: int | None
    error_percent: float | None
    refusal: str = ""

    @classmethod
    def of_recorded(cls, case: Case) -> Row:
        """Take the prediction that came with a figure, if one did."""
        return cls(case, case.recorded, case.recorded and 100 * (case.recorded / case.nbytes - 1))

    @classmethod
    def of(cls, case: Case, prediction: Prediction) -> Row:
        """Hold a case against its prediction."""
        return cls(case, prediction.peaks.get(case.statistic), prediction.error_percent(case), prediction.refusal)


# --- JSON -------------------------------------------------------------------------------------------------------------


def digest() -> str:
    """The package's sources as a hash: rows that other sources predicted are predicted anew."""
    return _hash(sorted(Path(fxmem.__file__).parent.rglob("*.py")))


def _hash(files: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for path in files:
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def fingerprint(case: Case) -> str:
    """All of a case that decides its prediction and its error, with the code of its step."""
    steps = Path(__file__).parent / "steps"
    deciding = (
        case.step,
        case.target,
        *([] if case.memory_gib is None else [case.memory_gib]),
        *([] if case.release is None else [case.release]),
        case.statistic,
        case.figure,
        case.unit,
        *map(dict, (case.settings, case.environment)),
        *([case.recorded] if case.not_run and case.recorded is not None else []),
    )
    code = _hash([steps / "loops.py", steps / f"{case.step.partition('.')[0]}.py"]) if case.step else ""
    return json.dumps([*deciding, case.less, code])


def read_kept(path: Path) -> dict[str, Row | None]:
    """Read the fingerprints of rows that this code has predicted before."""
    if not path.is_file():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["about"]["sources"] != digest():
        return {}
    return {row["fingerprint"]: row for row in kept["rows"]}


def read_any(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what a file says about its run, and its rows by name, whatever sources predicted them."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["about"], {row["case"]: row for row in kept["rows"]}


def restore_named(case: Case, kept: Mapping[str, Any]) -> Row | None:
    """Return the row of a case as it was predicted before; None for a case that was not."""
    row = kept.get(case.name)
    return None if row is None else Row(case, row["predicted"], row["error_percent"], row["refusal"])


def describe_run(date: str) -> dict[str, Any]:
    """Say what predicts rows now."""
    return {"date": date, "python": platform.python_version(), **_versions(), "sources": digest()}


def restore(case: Case, kept: dict[str, Any]) -> Row | None:
    """Return the kept row of a case, with the case as it stands now."""
    row = kept.get(fingerprint(case))
    return None if row is None else Row(case, row["predicted"], row["error_percent"], row["refusal"])


def write_json(path: Path, rows: Iterable[Row], replays: Iterable[Replay], about: Mapping[str, Any]) -> None:
    """Write what a run found, a line for each row."""
    lines = [
        json.dumps(
            {
                "case": row.case.name,
                "published": row.case.nbytes,
                "predicted": row.predicted,
                "error_percent": row.error_percent,
                "refusal": row.refusal,
                "fingerprint": fingerprint(row.case),
            },
            ensure_ascii=False,
        )
        for row in rows
    ]
    traces = [
        json.dumps({**asdict(replay), "segments": len(replay.segments), "card_segments": len(replay.card_segments)})
        for replay in replays
    ]
    text = f'{{\n"about": {json.dumps(about)},\n"rows": [\n' + ",\n".join(lines) + '\n],\n"traces": [\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + ",\n".join(traces) + "\n]\n}\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# --- figures in a few numbers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Absolute errors of some rows, in percent."""

    count: int
    mean: float
    median: float
    worst: float
    within: dict[float, int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Summary | None:
        """Summarise the rows that have an error; None where there are none."""
        errors = [abs(row.error_percent) for row in rows if row.error_percent is not None]
        if not errors:
            return None
        within = {limit: sum(error <= limit for error in errors) for limit in (0.1, 1.0, 3.0)}
        return cls(len(errors), statistics.fmean(errors), statistics.median(errors), max(errors), within)


def summarise(rows: Sequence[Row]) -> dict[tuple[str, str], Summary]:
    """Summarise rows by grade and statistic."""
    found = {}
    for grade in GRADES:
        for statistic in STATISTICS:
            chosen = [row for row in rows if (row.case.grade, row.case.statistic) == (grade, statistic)]
            summary = Summary.of(chosen)
            if summary is not None:
                found[grade, statistic] = summary
    return found


# --- Markdown ---------------------------------------------------------------------------------------------------------


def format_page(rows: Sequence[Row], replays: Sequence[Replay], about: Mapping[str, Any]) -> str:
    """Write the whole table, misses included."""
    versions = ", ".join(f"{name} {about[name]}" for name in PACKAGES if name in about)
    added = f", {about['added_rows']} rows added until {about['added']}" if "added" in about else ""
    written = f"{about['date']}{added}"
    lines = [
        "# Published measurements",
        "",
        *INTRODUCTION,
        "",
        *_wrap(f"Written by `make published` on {written}; no GPU was used. {versions}."),
        "",
        "An error is `predicted / published - 1`.",
        "",
        *(f"- Grade {grade}: {text}." for grade, text in GRADES.items()),
        *(f"- {statistic.capitalize()}: {text}." for statistic, text in STATISTICS.items()),
        "",
        "## Summary",
        "",
        "Mean, median and worst are of absolute errors.",
        "",
        *_summary_lines(rows),
        "",
        *_trace_lines(replays),
        *_miss_lines(rows),
        *_refusal_lines(rows),
        "## Every row",
        "",
    ]
    for table in dict.fromkeys(row.case.table for row in rows):
        lines += [*_table_lines([row for row in rows if row.case.table == table]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "| grade | statistic | rows | mean | median / worst | within 0.1 / 1 / 3 % |"
    yield "|---|---|---:|---:|---:|---:|"
    for (grade, statistic), found in summarise(rows).items():
        within = " / ".join(str(count) for count in found.within.values())
        yield (
            f"| {grade} | {statistic} | {found.count} | "
            f"{found.mean:.3f} % | {found.median:.4f} % / {found.worst:.2f} % | {within} |"
        )


def _trace_lines(replays: Sequence[Replay]) -> Iterator[str]:
    if not replays:
        return
    sources = sorted({replay.source.partition(",")[0] for replay in replays})
    yield from ("## Recorded requests of real cards, replayed through the allocator", "")
    yield from (*_wrap(f"Snapshots of {', '.join(sources)}."), "")
    yield from ("| snapshot | mallocs | cudaMallocs of the card / of the replay | reserved |", "|---|---:|---:|---:|")
    for replay in replays:
        equal = "all equal" if replay.is_exact else f"{replay.error_percent:+.3f} %"
        segments = f"{len(replay.card_segments)} / {len(replay.segments)}"
        yield f"| {replay.source.partition(', ')[2]} | {replay.mallocs:,} | {segments} | {equal} |"
    yield ""


def _miss_lines(rows: Sequence[Row]) -> Iterator[str]:
    far = [row for row in rows if row.error_percent is not None and abs(row.error_percent) > EXPLAINED_FROM_PERCENT]
    if not far:
        return
    yield from (f"## Further off than {EXPLAINED_FROM_PERCENT:.0f} %", "")
    for cause in dict.fromkeys(map(_cause, far)):
        yield from (*_wrap(f"{_sentence(cause)}:"), "", "| grade | statistic | case | error |", "|---|---|---|---:|")
        for row in (row for row in far if _cause(row) == cause):
            yield f"| {row.case.grade} | {row.case.statistic} | {row.case.name} | {row.error_percent:+.2f} % |"
        yield ""


def _cause(row: Row) -> str:
    return row.case.cause or (row.case.note if row.case.grade == "C" else "") or "not explained"


def _refusal_lines(rows: Sequence[Row]) -> Iterator[str]:
    without = [row for row in rows if row.error_percent is None]
    if not without:
        return
    yield from ("## Without a prediction", "")
    for table in dict.fromkeys(row.case.table for row in without):
        of_table = [row for row in without if row.case.table == table]
        why = of_table[0].case.not_run or of_table[0].refusal
        yield from _wrap(f"- {table}: {len(of_table)} rows; {why}.", "  ")
    yield ""


def _table_lines(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0].case
    yield from (f"### {first.table}", "")
    yield from _wrap(
        f"{_sentence(first.source)}. {first.card}, torch {first.torch}. Grade {first.grade}, {first.statistic}."
    )
    for text in (
        first.note,
        first.not_run if first.grade == "S" else "",
        f"Cause of the error: {first.cause}" if first.cause else "",
    ):
        yield from _wrap(f"{_sentence(text)}.") if text else ()
    yield from ("", "| step | published | predicted | error |", "|---|---:|---:|---:|")
    for row in rows:
        case = row.case
        predicted = "" if row.predicted is None else _figure(row.predicted / UNITS[case.unit], case)
        error = "" if row.error_percent is None else f"{row.error_percent:+.4f} %"
        label = case.name.removeprefix(f"{case.table}: ") if case.name != case.table else "as above"
        yield f"| {label} | {_figure(case.figure, case)} | {predicted} | {error} |"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 116, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _figure(value: float, case: Case) -> str:
    return f"{value:,.0f} B" if case.unit == "B" else f"{value:,.3f} {case.unit}"
