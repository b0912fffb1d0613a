"""Compiled steps on the CPU, predicted and run for real: `python -m benchmarks.programs.compiled_cpu [NAME ...]`.

The steps are those of `tests.simulation.recording.compiled.models`. What oneDNN and the CPU's flash attention take for
themselves within a call is set aside, by the names in `SET_ASIDE`. Writes `benchmarks/results/compiled-DATE.md`; exit
code 1 if a step is more than 0.01 % off.
"""

from __future__ import annotations

import datetime
import sys
import time
import warnings

import torch

from benchmarks import RESULTS
from tests.simulation.recording.compiled.models import CASES
from tests.simulation.recording.compiled.real import SET_ASIDE, measure_compiled, predict_compiled
from tests.simulation.recording.compiled.test_programs import NAMES, measure, predict_program

_WITHIN = 1e-4


def compare(name: str, mode: str) -> tuple[str, int, int]:
    """A row of the table, what was predicted and what was measured."""
    begin = time.process_time()
    analysis = predict_compiled(CASES[name](), mode)
    predicted_seconds = time.process_time() - begin
    begin = time.process_time()
    real, breaks = measure_compiled(CASES[name](), mode)
    real_seconds = time.process_time() - begin
    predicted, measured = analysis.peak.requested_bytes, real.peak_without_kernel_scratch_bytes
    made = analysis.profile.step.compiled
    graphs = "" if made is None else f"{made.graphs}, {len(made.breaks)} ({len(breaks)})"
    off = f"{predicted - measured:+,}" if predicted != measured else "0"
    aside = real.peak_bytes - measured
    figures = (
        f"{predicted:,} | {measured:,} | {off} | {aside:,} | {graphs} | {predicted_seconds:.0f}, {real_seconds:.0f}"
    )
    return f"| {name} | {mode} | {figures} |", predicted, measured


def compare_program(name: str) -> tuple[list[str], int, int, int]:
    """Rows of a program's rounds; how many there are, how many exact and how many close."""
    mine, real = predict_program(name).rounds, measure(name).rounds
    pairs = [(a.requested_bytes, b.peak_without_kernel_scratch_bytes or 0) for a, b in zip(mine, real, strict=True)]
    rows = [f"| {name}.py | {number} | {a:,} | {b:,} | {a - b:+,} |" for number, (a, b) in enumerate(pairs, 1)]
    exact, close = sum(a == b for a, b in pairs), sum(abs(a - b) <= _WITHIN * b for a, b in pairs)
    return rows, len(pairs), exact, close


def main() -> int:
    """Print and write a row for each step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(CASES)
    rows, exact, close = [], 0, 0
    for name in names:
        for mode in ("train", "infer"):
            row, predicted, measured = compare(name, mode)
            rows.append(row)
            exact += predicted == measured
            close += abs(predicted - measured) <= _WITHIN * measured
            print(row, flush=True)
    said = f"{exact} of {len(rows)} to the byte, {close} within {_WITHIN:.2%}"
    print(said)
    programs: list[str] = []
    total = 0
    for name in NAMES if names == list(CASES) else ():
        found, count, _, near = compare_program(name)
        programs += found
        total, close = total + count, close + near
        print("\n".join(found), flush=True)
    if names == list(CASES):
        date = datetime.datetime.now(datetime.UTC).date()
        lines = [
            f"# Compiled steps on the CPU, predicted and real, {date}",
            "",
            f"torch {torch.__version__}, one thread, peaks in requested bytes. Inductor's own C++ kernels are not",
            f"built: allocations, extern kernels, engine and runtime are real. **{said}.** Set aside: scratch of",
            ", ".join(f"`{each}`" for each in SET_ASIDE) + ".",
            "",
            "| step | mode | predicted | real | off | set aside | graphs, breaks (real) | CPU s, predicted, real |",
            "|---|---|---:|---:|---:|---:|---|---|",
            *rows,
            "",
            "Rounds of the programs in `tests/simulation/recording/compiled/programs`:",
            "",
            "| program | round | predicted | real | off |",
            "|---|---:|---:|---:|---:|",
            *programs,
        ]
        (RESULTS / f"compiled-{date}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if close == len(rows) + total else 1


if __name__ == "__main__":
    sys.exit(main())
