"""`make published`: predict every published case, write the results of the day and README.md, hold the bounds.

python -m benchmarks.published                     goes on where it stopped today
python -m benchmarks.published --only liger rope   cases whose name or source contains all words; only prints
python -m benchmarks.published --bounds            also tightens the bounds in tables/
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import RESULTS
from fxmem.errors import UsageError
from fxmem.records.units import printable

from . import results
from .bounds import broken, tighten
from .prediction import predict
from .results import Row
from .shared import read_shared
from .tables import Case, read_cases
from .traces import replay_all

PAGE = Path(__file__).with_name("README.md")
SECONDS_BETWEEN_WRITES = 20.0
"""What a run that is cut short may lose."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 4 if a bound is broken, 2 if a file that was sent in is bad, else 0."""
    options = _parse(arguments)
    warnings.simplefilter("ignore")  # what model code says to its own users
    try:
        cases = [case for case in _read_all() if _is_chosen(case, options.only)]
    except UsageError as error:
        print(f"published: {printable(str(error))}", file=sys.stderr)
        return 2
    if options.only:
        rows = [_print(_predict(case)) for case in cases]
        if options.add:
            _add(rows)
        print()
    else:
        date = datetime.date.today().isoformat()
        rows = _run(cases, RESULTS / f"published-{date}", date, again=options.again)
    _print_summary(rows)
    worse = broken(rows)
    if options.bounds:
        errors = {row.case.name: row.error_percent for row in rows if row.error_percent is not None}
        print(f"{tighten(errors)} bounds are tighter")
    print("\n".join(worse), file=sys.stderr, end="\n" if worse else "")
    return 4 if worse else 0


def _read_all() -> Iterator[Case]:
    """Read the published cases, and those that were sent in."""
    yield from (*read_cases(), *read_shared())


def _is_chosen(case: Case, words: Sequence[str]) -> bool:
    text = f"{case.name} {case.source} {case.grade} {case.statistic}"
    return all(word in text for word in words)


def _predict(case: Case) -> Row:
    return Row.of_recorded(case) if case.not_run else Row.of(case, predict(case))


def _run(cases: Sequence[Case], stem: Path, date: str, *, again: bool) -> list[Row]:
    kept = {} if again else results.read_kept(stem.with_suffix(".json"))
    replays = list(replay_all())
    rows: list[Row] = []
    written = time.monotonic()
    for case in cases:
        rows.append(results.restore(case, kept) or _print(_predict(case)))
        if time.monotonic() - written > SECONDS_BETWEEN_WRITES:
            results.write_json(stem.with_suffix(".json"), rows, replays, results.describe_run(date))
            written = time.monotonic()
    about = results.describe_run(date)
    results.write_json(stem.with_suffix(".json"), rows, replays, about)
    PAGE.write_text(results.format_page(rows, replays, about), encoding="utf-8")
    return rows


def _add(rows: Sequence[Row]) -> None:
    """Put rows into the newest results and on the page, where all others stay as they were predicted."""
    path = max(RESULTS.glob("published-20*.json"))
    about, kept = results.read_any(path)
    known = {row.case.name: row for row in rows}
    whole = [known.get(case.name) or results.restore_named(case, kept) for case in _read_all()]
    anew = sum(row.case.name not in kept for row in rows)
    if anew:
        about["added_rows"] = about.get("added_rows", 0) + anew
        about["added"] = datetime.date.today().isoformat()
    found, replays = [row for row in whole if row is not None], list(replay_all())
    results.write_json(path, found, replays, about)
    PAGE.write_text(results.format_page(found, replays, about), encoding="utf-8")


def _print(row: Row) -> Row:
    found = row.refusal or row.case.not_run if row.error_percent is None else f"{row.error_percent:+10.4f} %"
    print(f"{row.case.grade} {row.case.statistic[:5]} {found}  {row.case.name}", flush=True)
    return row


def _print_summary(rows: Sequence[Row]) -> None:
    for (grade, statistic), found in results.summarise(rows).items():
        within = ", ".join(f"{count} within {limit:g} %" for limit, count in found.within.items())
        print(
            f"grade {grade} {statistic}: {found.count} rows, mean {found.mean:.3f} %, median {found.median:.4f} %, "
            f"worst {found.worst:.2f} %; {within}"
        )
    without = sum(row.error_percent is None for row in rows)
    if without:
        print(f"without a prediction: {without}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description="Hold published GPU measurements against predictions."
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases whose name or source has all words"
    )
    parser.add_argument("--add", action="store_true", help="with --only: put these rows into the newest results")
    parser.add_argument("--again", action="store_true", help="predict anew what was predicted today")
    parser.add_argument("--bounds", action="store_true", help="tighten the bounds beside the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
