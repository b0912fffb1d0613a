"""Hold the runs that the paper xMem (Middleware 2025) published against predictions, beside those of its estimators.

    python -m benchmarks.published.xmem          goes on where it stopped today (about ten minutes)

A figure is the most that NVML saw of a process's memory in four iterations, less what its first reading found. So it is
what the allocator has reserved, with what the libraries' kernels take meanwhile. A run that ran out has no figure:
there, what counts is whether that is predicted.

A figure leaves two things open.

- Its first reading. `train_loop.py` starts the thread that reads and then moves the model to the card: for language
  models two seconds later, for networks of convolutions at once. So it may already have found all of the model there,
  and the figure then lacks that much (`Run.placed_bytes`).
- The texts, which are drawn at random. Most trainings were run again in the same process, under a limit. Where that was
  no less than the first run took, their figures stand beside the first (`Run.again`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

import fxmem
from benchmarks import RESULTS
from fxmem.memory.allocator import CachingAllocator, replay
from fxmem.records.profile import Profile

from .results import describe_run
from .steps import Step, build_step

PUBLISHED = Path(__file__).with_suffix(".json")
TOOLS = ("xMem", "DNNMem", "SchedTune", "LLMem")
RELEASE = "2.6"
ITERATIONS = 4
CLOSE_PERCENT = 2.0
MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """A published run, and what is predicted for it."""

    path: str
    """In the repository."""
    card: str
    kind: str
    """`cnn` or `transformer`."""
    model: str
    optimizer: str
    batch: int
    zero_grad_mode: int | None
    ran_out: bool
    nbytes: int
    estimates: dict[str, int | None]
    """By tool."""
    part: str = ""
    """`later`: read to find why others are off; a rule follows from some of these (`driverless.SEEN`). `held out`: what
    was left of a folder, read after all rules were there."""
    again: tuple[int, ...] = ()
    """The same training run again, of language models."""
    placed_bytes: int = 0
    """What the allocator reserves for the model alone, where the first reading may have found it."""
    reserved_bytes: int | None = None
    """After as many iterations as were run."""
    plans: dict[str, int] = field(default_factory=dict)
    """Reserved bytes with the plans of each cuDNN that stands for theirs, and with what theirs may take instead."""
    between: tuple[int, int] | None = None
    """Least and most that is reserved with these; without convolutions, by where the driver places segments."""
    fits: bool | None = None
    refusal: str = ""

    @property
    def is_examined(self) -> bool:
        """Whether there is a prediction, or a reason why there is none."""
        return bool(self.refusal) or self.reserved_bytes is not None

    @property
    def group(self) -> str:
        """What it is counted with."""
        if self.part:
            return f"convolutional, {self.part if self.part == 'held out' else 'read later'}"
        if self.kind == "cnn":
            return "convolutional, RTX 3060 and 4060"
        return "transformers, A100" if self.card == "a100" else "transformers, RTX 3060 and 4060"

    @property
    def width_percent(self) -> float | None:
        """The width of the range by its middle; None without one."""
        if self.between is None:
            return None
        low, high = self.between
        return 200 * (high - low) / (high + low)

    @property
    def left_open(self) -> tuple[int, int]:
        """Least and most that the figure may stand for."""
        runs = self.nbytes, *self.again
        return min(runs), max(runs) + self.placed_bytes

    @property
    def is_within(self) -> bool:
        """Whether the range holds what the figure may stand for, or some of it."""
        low, high = self.left_open
        return self.between is not None and self.between[0] <= high and low <= self.between[1]

    def error_percent(self, tool: str = "fxmem", *, exact: bool = True) -> float | None:
        """Return a prediction by the figure, less one, in percent; None without one, or where the run ran out. Where
        not `exact`, by the nearest that the figure may stand for."""
        nbytes = self.reserved_bytes if tool == "fxmem" else self.estimates[tool]
        if nbytes is None or self.ran_out:
            return None
        low, high = (self.nbytes, self.nbytes) if exact else self.left_open
        return 100 * (nbytes / min(max(nbytes, low), high) - 1)


def read_published() -> tuple[str, list[Run]]:
    """Read the source and the runs."""
    table = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    runs = []
    for row in table["rows"]:
        estimates = {tool: row.pop(tool) for tool in TOOLS}
        runs.append(Run(**row, estimates=estimates))
    return table["source"], runs


def examine(run: Run) -> Run:
    """Predict a run."""
    settings = {"model": run.model, "batch": run.batch, "optimizer": run.optimizer}
    try:
        step = build_step(f"xmem.{run.kind}", {**settings, "zero_grad_mode": run.zero_grad_mode})
        assert isinstance(step, Step)
        analysis = fxmem.analyze(step.model, step.inputs, target=run.card, torch=RELEASE, **step.options)
    except Exception as error:
        refusal = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return replace(run, refusal=refusal)
    peak = analysis.peak
    plans = {each.cudnn: each.reserved_bytes for each in peak.by_cudnn}
    placed = _place(step.model) if run.kind == "cnn" else 0
    reserved = _reserve(analysis.profile, peak.room_bytes)
    found = replace(run, reserved_bytes=reserved, placed_bytes=placed, fits=peak.fits)
    orders = {reserved or 0, reserved or 0 if peak.upward is None else peak.upward.reserved_bytes}
    between = peak.plans_range or ((min(orders), max(orders)) if len(orders) > 1 else None)
    return replace(found, plans=plans, between=between)


def _reserve(profile: Profile, room_bytes: int | None) -> int | None:
    """What is reserved after the iterations that were run."""
    found = replay(profile, max_steps=ITERATIONS)
    if room_bytes is not None and (found.reserved_bytes or 0) > room_bytes:
        within = replay(profile, capacity_bytes=room_bytes, max_steps=ITERATIONS)
        found = within if within.shortage is None else found
    return found.reserved_bytes


def _place(model: nn.Module) -> int:
    """What is reserved for a model's parameters and buffers."""
    allocator = CachingAllocator()
    for tensor in (*model.parameters(), *model.buffers()):
        allocator.malloc(tensor.nbytes)
    return allocator.reserved_bytes


# --- the page ---------------------------------------------------------------------------------------------------------


def format_page(source: str, runs: Sequence[Run], about: dict[str, Any]) -> str:
    """Write the errors of all tools, by kind and by run."""
    packages = ", ".join(f"{name} {about[name]}" for name in ("torch", "torchvision", "transformers"))
    lines = [
        "# xMem's runs against predictions",
        "",
        f"Written by `make -C benchmarks published-xmem` on {about['date']}; no GPU was used. {packages}.",
        f"Source: {source}.",
        "An error is `predicted / published - 1`. One rule of fxmem follows from such runs (`driverless.SEEN`): the "
        "workspace of large 1 x 1 convolutions on compute capability 8.6.",
        "",
        "A network of convolutions may have been on the card, whole or in part, at the first reading, from which its "
        "figure is counted. The texts of a language model are drawn at random, and most of its trainings were "
        "run more than once. So a figure may stand for what lies between the least of these and the most, with the "
        "model (`benchmarks/published/xmem.py`).",
    ]
    for exact, title in ((True, "as published"), (False, "by the nearest that the figure may stand for")):
        lines += ["", f"## Median of the absolute error, and how many are within 2 %: {title}", ""]
        lines += ["| runs | fxmem | xMem | DNNMem | SchedTune |", "|---|---:|---:|---:|---:|"]
        for group in dict.fromkeys(run.group for run in runs):
            among = [run for run in runs if run.group == group]
            cells = (_summarise(among, tool, exact=exact) for tool in ("fxmem", *TOOLS[:3]))
            lines.append(f"| {group} ({sum(not run.ran_out for run in among)}) | {' | '.join(cells)} |")
    ranged = [run for run in runs if run.between and not run.ran_out]
    if ranged:
        versions = ", ".join(dict.fromkeys(version for run in ranged for version in run.plans))
        lines += [
            "",
            f"The cuDNN of these runs cannot be asked. The range is that of {versions}. Without convolutions it is by "
            "where the driver places segments, for runs in which that moves what is reserved.",
        ]
    for group in dict.fromkeys(run.group for run in ranged):
        widths = [run.width_percent or 0.0 for run in ranged if run.group == group]
        held = sum(run.is_within for run in ranged if run.group == group)
        lines.append(
            f"Of the {len(widths)} runs of {group}, {held} are within it; it is {statistics.median(widths):.1f} % wide "
            "in the median."
        )
    for ran_out, what in ((True, "ran out of memory"), (False, "did not")):
        among = [run for run in runs if run.ran_out is ran_out and run.fits is not None]
        lines += [
            "",
            f"Of {len(among)} runs that {what}, {sum(run.fits is not ran_out for run in among)} are predicted to.",
        ]
    lines += [
        "",
        "## Each run",
        "",
        "fxmem's error as published, and by the nearest that the figure may stand for; the others' as published.",
        "",
        "| run | published, MiB | may stand for, MiB | fxmem | | xMem | DNNMem | SchedTune |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        name = f"{run.model}, {run.optimizer}, {run.batch}, {run.card}"
        figure = "ran out" if run.ran_out else f"{run.nbytes / MIB:,.0f}"
        open_to = "" if run.ran_out else " to ".join(f"{each / MIB:,.0f}" for each in run.left_open)
        own = ("fits" if run.fits else "runs out") if run.ran_out else _percent(run.error_percent())
        cells = _percent(run.error_percent(exact=False)), *(_percent(run.error_percent(tool)) for tool in TOOLS[:3])
        lines.append(f"| {name} | {figure} | {open_to} | {run.refusal or own} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2f} %"


def _summarise(runs: Iterable[Run], tool: str, *, exact: bool) -> str:
    errors = [abs(error) for run in runs if (error := run.error_percent(tool, exact=exact)) is not None]
    if not errors:
        return ""
    within = sum(error <= CLOSE_PERCENT for error in errors)
    return f"{statistics.median(errors):.2f} % / {round(100 * within / len(errors))} %"


# --- results ----------------------------------------------------------------------------------------------------------


def _read_kept(path: Path) -> dict[str, Run]:
    if not path.is_file():
        return {}
    return {row["path"]: Run(**row) for row in json.loads(path.read_text(encoding="utf-8"))}


def _write(stem: Path, source: str, runs: Sequence[Run], about: dict[str, Any]) -> None:
    lines = ",\n".join(json.dumps(asdict(run)) for run in runs)
    stem.with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(format_page(source, runs, about), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the runs that have no result of the day yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.xmem")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="runs whose path has all words; prints")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # what model code says to its own users
    source, published = read_published()
    date = datetime.date.today().isoformat()
    stem = RESULTS / f"published-xmem-{date}"
    kept = {} if options.only else _read_kept(stem.with_suffix(".json"))
    runs = {run.path: kept.get(run.path, run) for run in published}
    for path in [run.path for run in published if all(word in run.path for word in options.only)]:
        if not runs[path].is_examined:
            runs[path] = examine(runs[path])
            print(path, runs[path].refusal or _percent(runs[path].error_percent()), flush=True)
            if not options.only:
                _write(stem, source, [run for run in runs.values() if run.is_examined], describe_run(date))
    return 0


if __name__ == "__main__":
    sys.exit(main())
