"""How time and memory grow with the step: of everything that is done with a profile, and of the analysis itself.

    python -m benchmarks.speed.growth     (`make growth`; about an hour, one process at a time)
      --only records                      one part: records, analysis, llama, imports
      --only depth --beside ../other      by layers, this checkout and another one in turn

*records*: made-up steps of 10,000, 50,000 and 200,000 events (`long_profiles.py`) through liveness, the allocator, the
planners, tables, drawings, pages, exports, comparison and files. *analysis*: `fxmem.analyze` of MLPs and of Llama and
GPT-2 blocks, by layers, by width and by length of sequence. *llama*: Llama-3 of 8, 70 and 405 billion parameters,
training, as their published configurations say. *imports*: what importing fxmem takes beyond torch. *depth*: the
analysis by layers beside that of another checkout, each size in a process of its own, the two in turn.

CPU seconds (`time.process_time`; one thread) and the peak resident memory beyond what the process had before (`VmHWM`;
for `llama`, of the whole process); each table, and each size of *records*, is from a process of its own. The exponent
is that of a power of the size, fitted by least squares over the logarithms. Writes `benchmarks/results/growth-DATE.md`,
where parts that are not run stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.speed import growth_cases

CASES = Path(__file__).with_name("growth_cases.py")
ROUNDS = 5
"""Processes of which an import's time is the median."""

Row = Mapping[str, Any]


def measured(*arguments: object, checkout: Path | None = None) -> list[dict[str, Any]]:
    """What `growth_cases.py` prints, a JSON object a line; with the fxmem of another checkout if one is given."""
    alone = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""}
    path = {"PYTHONPATH": str(checkout or Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(CASES), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **alone, **path},
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> str:
    """Of the power of the size that fits best; a dash where a value is too small to say."""
    if min(values) <= 0 or len(set(sizes)) < 2:
        return "-"
    fit = statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values])
    return f"{fit.slope:.2f}"


# --- parts ------------------------------------------------------------------------------------------------------------


def records() -> Iterator[str]:
    """Every step over records, at each size."""
    sizes = growth_cases.EVENTS
    for form in growth_cases.FORMS:
        rows = [row for size in sizes for row in measured("records", size, form)]
        yield f"Form `{form}`, CPU seconds by events; the exponent is of the last two:"
        yield ""
        yield f"| step | {' | '.join(f'{size:,}' for size in sizes)} | exponent |"
        yield f"|---|{'---:|' * (len(sizes) + 1)}"
        for step in dict.fromkeys(row["step"] for row in rows):
            seconds = [row["seconds"] for row in rows if row["step"] == step]
            fitted = exponent(sizes[-2:], seconds[-2:]) if seconds[-1] >= 0.05 else "-"
            yield f"| {step} | {' | '.join(f'{each:.2f}' for each in seconds)} | {fitted} |"
        yield ""


def analysis() -> Iterator[str]:
    """The analysis, by each measure of size."""
    for name, (what, sizes) in growth_cases.ANALYSES.items():
        rows = measured("analysis", name)
        yield f"{what}:"
        yield ""
        yield "| size | nodes | events | CPU seconds | memory MiB | peak predicted |"
        yield "|---:|---:|---:|---:|---:|---:|"
        for row in rows:
            figures = f"{row['seconds']:.2f} | {row['memory'] / 2**20:.1f} | {row['peak'] / 2**30:.2f} GiB"
            yield f"| {row['size']} | {row['nodes']:,} | {row['events']:,} | {figures} |"
        seconds, memory = (exponent(sizes[1:], [row[each] for row in rows[1:]]) for each in ("seconds", "memory"))
        yield ""
        yield f"Exponents without the first row: seconds {seconds}, memory {memory}."
        yield ""


def depth(other: Path) -> Iterator[str]:
    """The analysis by layers, beside another checkout's."""
    commit = subprocess.run(
        ["git", "-C", str(other), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name in ("mlp-layers", "llama-layers"):
        what, sizes = growth_cases.ANALYSES[name]
        pairs = [
            [measured("analysis", name, size, checkout=checkout)[0] for checkout in (None, other)] for size in sizes
        ]
        yield f"{what}:"
        yield ""
        yield f"| size | CPU seconds | at {commit} | ratio | memory MiB | at {commit} |"
        yield "|---:|---:|---:|---:|---:|---:|"
        for size, (ours, theirs) in zip(sizes, pairs, strict=True):
            assert ours["peak"] == theirs["peak"], f"the two disagree about the peak of {name} {size}"
            seconds = f"{ours['seconds']:.2f} | {theirs['seconds']:.2f} | {ours['seconds'] / theirs['seconds']:.2f}"
            yield f"| {size} | {seconds} | {ours['memory'] / 2**20:.1f} | {theirs['memory'] / 2**20:.1f} |"
        fitted = [exponent(sizes[1:], [pair[which]["seconds"] for pair in pairs[1:]]) for which in (0, 1)]
        yield ""
        yield f"Exponents of the seconds without the first row: {fitted[0]}, {fitted[1]}."
        yield ""


def llama() -> Iterator[str]:
    """Large models as they are published."""
    yield (
        "| model | parameters | nodes | events | CPU seconds to build | to analyse | memory of the process, MiB | "
        "peak predicted |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name in growth_cases.LLAMAS:
        (row,) = measured("llama", name)
        sizes = f"{row['parameters'] / 1e9:.1f} B | {row['nodes']:,} | {row['events']:,}"
        yield (
            f"| {name} | {sizes} | {row['build']:.1f} | {row['seconds']:.1f} | {row['process'] / 2**20:.0f} | "
            f"{row['peak'] / 2**30:,.0f} GiB |"
        )
    yield ""


def imports() -> Iterator[str]:
    """CPU seconds of importing, over those of what every user of fxmem has imported anyway."""
    yield f"| after | import | CPU seconds, median of {ROUNDS} |"
    yield "|---|---|---:|"
    for before, after in growth_cases.IMPORTS:
        rows = [measured("import", before, after)[0] for _ in range(ROUNDS + 1)]
        seconds = statistics.median(row["seconds"] for row in rows[1:])  # the first compiles what is not yet compiled
        yield f"| {before or 'nothing'} | `{after}` | {seconds:.3f} |"
    yield ""


DEPTH = "The analysis by layers, beside another commit"
PARTS: Mapping[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "records": ("What is done with a profile", records),
    "analysis": ("The analysis", analysis),
    "llama": ("Llama-3, a training step of 1 x 2048 tokens in bfloat16 on an H200, as if it had the memory", llama),
    "imports": ("Imports", imports),
}


def main() -> None:
    """Run the parts and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=[*PARTS, "depth"], action="append", help="this part; repeatable")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout, for the part depth")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    path = options.out / f"growth-{datetime.date.today()}.md"
    done = _sections(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.only and "depth" in options.only and options.beside is None:
        parser.error("the part depth is beside another checkout: --beside FOLDER")
    parts = {**PARTS, **({} if options.beside is None else {"depth": (DEPTH, lambda: depth(options.beside))})}
    for part, (title, run) in parts.items():
        if not options.only or part in options.only:
            lines = []
            for line in run():
                print(line, flush=True)
                lines.append(line)
            done[title] = "\n".join(lines).rstrip()
            _write(path, done)


def _write(path: Path, done: Mapping[str, str]) -> None:
    """The page of the parts that are there."""
    said = f"`make growth`; {growth_cases.versions()}, Python {platform.python_version()}; {platform.machine()}."
    page = [
        f"# Growth, {datetime.date.today()}",
        "",
        f"{said} How each figure is taken is said in `benchmarks/speed/growth.py`.",
        "",
    ]
    for title in (*(title for title, _ in PARTS.values()), DEPTH):
        if title in done:
            page += [f"## {title}", "", done[title], ""]
    path.write_text("\n".join(page), encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """What is under each heading of a page written before."""
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title: body.strip("\n") for title, _, body in parts}


if __name__ == "__main__":
    main()
