"""Programs of many kinds, predicted and measured on the CPU: `make programs`.

The programs are those of `program_cases`. The peak of each is held to the profiler's log of a real step as
`fxmem validate` holds it: libraries' workspaces set aside where the prediction has none.

    python -m benchmarks.programs.programs [--only NAME ...]

The table is benchmarks/results/programs-DATE.md.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.programs.program_cases import PROGRAMS
from fxmem.errors import FxmemError
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.verdict import verdict

TOLERANCE = 1e-4
FAR = 5e-3


def run(name: str, mode: str) -> dict[str, Any]:
    """One program in one mode: predicted and measured."""

    def step() -> tuple[Any, StepRequest]:
        torch.manual_seed(0)
        case = PROGRAMS[name]()
        optimizer = case.optimizer if mode == "train" else None
        loss = case.loss if mode == "train" else None
        settings: Any = {"mode": mode, "loss": loss, "optimizer": optimizer, "precision": case.precision}
        return case.model.train(mode == "train"), StepRequest(args=case.inputs, target="cpu", name=name, **settings)

    row: dict[str, Any] = {"program": name, "mode": mode}
    try:
        measured = measure_cpu(*step(), steps=2)
    except Exception as error:
        return {**row, "eager": _line(error)}
    try:
        analysis = analyze_step(*step())
    except FxmemError as error:
        return {**row, "refused": _line(error)}
    said = verdict(analysis.profile, analysis.peak, measured, TOLERANCE)
    judged = next(each for each in said.comparisons if each.quantity is said.judged)
    unknowns = [unknown.what for unknown in analysis.profile.unknowns if unknown.topic == "memory"]
    error = judged.error
    return {**row, "predicted": judged.predicted_bytes, "measured": judged.measured_bytes, "error": error} | {
        "at": measured.peak_op or "between two operators",
        "unknowns": unknowns,
    }


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the results, in Markdown."""
    ran = [row for row in rows if "eager" not in row]
    found = [row for row in ran if "refused" not in row]
    close = sum(abs(row["error"]) <= TOLERANCE for row in found)
    far = sum(abs(row["error"]) > FAR and not row["unknowns"] for row in found)
    yield f"# Programs of many kinds, predicted and measured on the CPU, {datetime.date.today()}"
    yield ""
    yield (
        f"torch {torch.__version__}, one thread. {len({row['program'] for row in ran})} programs in {len(ran)} runs; "
        f"{len(ran) - len(found)} refused. Of the others **{close} of {len(found)} "
        f"({100 * close / max(1, len(found)):.1f} %)** are within {TOLERANCE:.2%}; {far} are more than {FAR:.1%} off "
        f"without a listed unknown."
    )
    yield ""
    yield "| program | mode | predicted | measured | error | ran at the peak |"
    yield "|---|---|---:|---:|---:|---|"
    for row in ran:
        yield f"| {row['program']} | {row['mode']} | " + (
            "refused | | | |"
            if "refused" in row
            else f"{row['predicted']:,} | {row['measured']:,} | {row['error']:+.4%} | {row['at']} |"
        )


def main() -> None:
    """Run the programs and write their table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="programs; default all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, make in PROGRAMS.items():
        if options.only and name not in options.only:
            continue
        torch.manual_seed(0)
        for mode in make().modes:
            row = run(name, mode)
            rows.append(row)
            if "eager" in row or "refused" in row or abs(row["error"]) > TOLERANCE:
                print(row, file=sys.stderr, flush=True)
    lines = list(summary(rows))
    print("\n".join(lines[:3]))
    if not options.only:
        (RESULTS / f"programs-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
