"""Hold fxmem's predictions against what was measured on cards. Needs no GPU.

    python -m benchmarks.accuracy.accuracy     every file of benchmarks/results/gpu, to accuracy.md (`make accuracy`)
      FILE.json ...      these files instead; the table goes to stdout
      --bounds           also keep what they say: how far off each number may be from now on (bounds.json), and what a
                         process takes of the card beside the allocator (fxmem/hardware/context_sizes.json)
      --predict h200     no measurement: every case predicted for a card, to see that it can be

Reads what `gpu.py` writes, and the format of earlier measurements: `about`, `cases` and `results` with `peak`,
`phases`, `resting` and `events` in which strings mark the phases. A case is predicted with the settings it was
measured with, for the card it was measured on, by the torch and cuDNN that are installed here; where those differ from
the measurement's, the table says so.

Errors are `predicted / measured - 1`. Single operators (`ops`) are compared by what they add to what rests between
steps, because in the earlier format one process measured many and a library's workspace stayed from one to the next.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.lib.workers import Lost, run_jobs
from fxmem.hardware.context import CONTEXT_SIZES, ContextSize
from fxmem.records.profile import Phase, Profile, Target
from fxmem.records.validation import Difference
from fxmem.show.text.verdict import describe_difference

__all__ = ["Measured", "Row", "compare", "read", "rows_of", "summary"]

RESULTS = benchmarks.RESULTS / "gpu"
TABLE = Path(__file__).parent / "accuracy.md"
BOUNDS = RESULTS / "bounds.json"
QUANTITIES = ("requested", "allocated", "reserved")
LISTED_FROM = 0.01
"""Cases further off than this in allocated bytes (operators: in requested bytes) are listed one by one."""
BEFORE = "before"
"""The row of the case `context` that says what was in use on the card before this process came."""
DIFFERENCES_LISTED = 4
MARGIN = 1.05
"""A bound is the error found when it was written, times this, and at least `SMALLEST_BOUND`: it catches a change, not a
rounding."""
SMALLEST_BOUND = 0.0005

PUBLISHED = (
    (
        "LLMem (Kim et al., IJCAI 2024)",
        "peak of fine-tuning decoder-only language models on one GPU",
        "up to 1.6 %",
        "abstract, https://doi.org/10.24963/ijcai.2024/699",
    ),
    (
        "torch-preflight",
        "peak of 8 training steps of GPT-2, BERT, DistilBERT and ResNet-50 on a T4",
        "3.7 % mean, 12.4 % worst",
        "docs/vram-estimation.md of highwaterlabs/torch-preflight",
    ),
    (
        "PyTorch's MemTracker",
        "its own tests: active bytes of stacks of linear layers, cuBLAS's workspace set aside",
        "10 % allowed either way",
        "test/distributed/_tools/test_mem_tracker.py of pytorch/pytorch",
    ),
)
"""Who, of what, how far off, and where they say so. For an idea of what is usual: not measured here, and not of the
same models."""
COLLECTIONS = ("torchvision", "timm", "transformers")


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One step, whichever format it was kept in."""

    name: str
    case: Mapping[str, Any]
    operator: str | None
    """Which of the case's operators; None for a model."""
    peaks: Mapping[str, int]
    """The largest `requested`, `allocated` and `reserved` bytes."""
    resting: int
    """Requested bytes between two steps."""
    events: tuple[int, ...]
    events_by_phase: Mapping[Phase, int]
    plain: bool = False
    """Kept in the earlier format, whose steps made their loss as `_plain_loss` does."""


@dataclass(frozen=True)
class Source:
    """A measurement file."""

    name: str
    card: Target
    versions: Mapping[str, str]
    """Of torch, CUDA, cuDNN and the model collections."""
    allocator_settings: str
    measured: tuple[Measured, ...]
    failed: Mapping[str, str]
    """Case to error."""
    context: ContextSize | None = None
    """What a process takes of the card beside the allocator; None if it was not measured."""
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By case with a checkpoint plan, the median milliseconds of a step without it and with it."""


def read(path: Path) -> Source:
    """Everything a measurement file says. Raises ValueError if it is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not {"about", "cases", "results"} <= document.keys() or document["about"].get("dry_run"):
        raise ValueError(
            f"expected {path} to hold measurements of a card (about, cases, results); a dry run measures none"
        )
    measured: list[Measured] = []
    failed: dict[str, str] = {}
    for name, result in document["results"].items():
        case = document["cases"][name]
        for operator, one in [(None, result)] if "ops" not in result else result["ops"].items():
            label = name if operator is None else f"{name} {operator}"
            if "error" in one:
                failed[label] = one["error"]
            elif one.get("alloc_retries"):
                failed[label] = "the card was short of memory"
            elif "measurement" in one:
                measured.append(_measurement(name, case, operator, one["measurement"]))
            elif "peak" in one:
                measured.append(_plain(name, case, operator, one))
    card, versions, settings = _machine(document["about"])
    context = _context(card, versions, document["results"].get("context", {}), path.stem)
    timed = {
        name: result["times"] for name, result in document["results"].items() if "without_ms" in result.get("times", {})
    }
    times = {
        name: (statistics.median(found["without_ms"]), statistics.median(found["with_ms"]))
        for name, found in timed.items()
    }
    return Source(path.stem, card, versions, settings, tuple(measured), failed, context, times)


def _context(card: Target, versions: Mapping[str, str], result: Mapping[str, Any], name: str) -> ContextSize | None:
    """From the last row of the case `context`: what is in use on the card, less the allocator's and what others had
    there before."""
    rows = {after: (used, reserved) for after, used, reserved in result.get("rows", ()) if used is not None}
    if len(rows) < 2:
        return None
    used, reserved = rows[next(reversed(rows))]
    nbytes = used - reserved - rows.get(BEFORE, (0, 0))[0]
    release = ".".join(versions["torch"].split(".")[:2])
    source = f"benchmarks/results/gpu/{name}.json"
    return ContextSize(
        card=card.full_name or card.name,
        capability=card.capability or (0, 0),
        torch=release,
        cuda=versions.get("CUDA", ""),
        nbytes=nbytes,
        source=source,
    )


def _machine(about: Mapping[str, Any]) -> tuple[Target, Mapping[str, str], str]:
    from fxmem.validation.measure_cuda import card_target

    machine, packages = about.get("machine"), about.get("packages", {})
    collections = {name: packages[name] for name in COLLECTIONS if name in packages}
    if machine is not None:
        card = card_target(machine["name"], tuple(machine["capability"]), machine["memory_bytes"])
        libraries = {
            "torch": machine["torch_version"],
            "CUDA": machine["cuda_version"],
            "cuDNN": machine["cudnn_version"],
        }
        return card, {**libraries, **collections}, machine["allocator_settings"]
    major, minor = (int(part) for part in about["capability"].split("."))
    cudnn = f"{about['cudnn'] // 10000}.{about['cudnn'] % 10000 // 100}.{about['cudnn'] % 100}"
    libraries = {"torch": about["torch"], "CUDA": about["cuda"], "cuDNN": cudnn}
    return (
        card_target(about["card"], (major, minor), about["total_memory"]),
        {**libraries, **collections},
        about.get("alloc_conf", ""),
    )


def _measurement(name: str, case: Mapping[str, Any], operator: str | None, found: Mapping[str, Any]) -> Measured:
    peaks = {
        "requested": found["peak_bytes"],
        "allocated": found["allocated_bytes"],
        "reserved": found["reserved_bytes"],
    }
    by_phase = {Phase(phase): count for phase, count in found["events_by_phase"].items()}
    return Measured(name, case, operator, peaks, found["resident_bytes"], tuple(found["events"]), by_phase)


def _plain(name: str, case: Mapping[str, Any], operator: str | None, found: Mapping[str, Any]) -> Measured:
    phase, sizes, by_phase = Phase.FORWARD, [], dict[Phase, int]()
    for event in found["events"]:
        if isinstance(event, str):
            # An operator's log has a part `grad` of its own, in which backward's first gradient is made.
            if event.startswith("<"):
                phase = Phase.BACKWARD if event == "<grad" else Phase(event[1:])
                by_phase.setdefault(phase, 0)
            continue
        if event:
            sizes.append(event)
            by_phase[phase] = by_phase.get(phase, 0) + 1
    peaks = {kind: found["peak"][kind] for kind in QUANTITIES}
    return Measured(name, case, operator, peaks, found["resting"]["requested"], tuple(sizes), by_phase, plain=True)


def _plain_loss(out: Any) -> Any:
    """Differs from fxmem's default in a few bytes: adding up several outputs, it begins with the number 0."""
    import torch

    if getattr(out, "loss", None) is not None:
        return out.loss
    if isinstance(out, torch.Tensor):
        return out.float().sum()
    values = out.values() if isinstance(out, dict) else out
    return sum(_plain_loss(value) for value in values if isinstance(value, torch.Tensor))


# --- predicting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One step to predict."""

    case: Mapping[str, Any]
    name: str
    operator: str | None
    card: Target
    allocator_settings: str
    measured: Measured | None


@dataclass(frozen=True)
class Row:
    """A step's numbers, predicted and measured."""

    name: str
    family: str
    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    """Empty if nothing was measured."""
    differences: tuple[Difference, ...] = ()
    unknown: tuple[str, ...] = ()
    """What the prediction says it could not count in memory."""
    failure: str = ""
    """Why there is no prediction."""

    def error(self, quantity: str) -> float | None:
        """`predicted / measured - 1`; None unless both are there and something was measured."""
        if quantity not in self.predicted or self.measured.get(quantity, 0) <= 0:
            return None
        return self.predicted[quantity] / self.measured[quantity] - 1

    @property
    def judged(self) -> float | None:
        """The error that counts: of allocated bytes, for an operator of requested ones."""
        return self.error("requested" if self.family == "ops" else "allocated")


def prepare() -> None:
    """Import once what every prediction needs."""
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def predict(job: Job) -> Row:
    """Predict one step and hold it against what was measured."""
    from benchmarks.accuracy.cases import Case

    label = job.name if job.operator is None else f"{job.name} {job.operator}"
    family = str(job.case["family"])
    try:
        profile = _profile(Case.read(job.case), job)
    except Exception as error:
        return Row(label, family, {}, {}, failure=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
    return compare(profile, label, family, job.allocator_settings, job.measured)


def _profile(case: Any, job: Job) -> Profile:
    from benchmarks.accuracy.cases import build, kernel_settings
    from benchmarks.accuracy.probes import gradient_of_ones, probes
    from fxmem.simulation.step.analysis import analyze_step
    from fxmem.simulation.step.request import StepRequest

    with kernel_settings(case):
        if job.operator is not None:
            operator = probes(case, "meta")[job.operator]()
            step = {"loss": gradient_of_ones, "optimizer": None, "keep_outputs": False}
            return analyze_step(operator, StepRequest(name=job.operator, target=job.card, **step)).profile
        built = build(case, "meta")
        loss = _plain_loss if job.measured is not None and job.measured.plain else None
        step = {"mode": case.mode, "loss": loss, "optimizer": case.optimizer_spec, "precision": case.precision}
        step["keep_outputs"] = False  # as it was measured: a step in a function
        return analyze_step(
            built.module, StepRequest(args=built.args, kwargs=built.kwargs, name=job.name, target=job.card, **step)
        ).profile


def compare(profile: Profile, label: str, family: str, allocator_settings: str, measured: Measured | None) -> Row:
    """A profile's numbers beside the measured ones."""
    from fxmem.memory.allocator import complete_timeline
    from fxmem.memory.log_diff import first_differences, predicted_events

    peak = complete_timeline(profile, {"PYTORCH_ALLOC_CONF": allocator_settings}).peak
    sizes = {"requested": peak.requested_bytes, "allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes}
    predicted = {quantity: size for quantity, size in sizes.items() if size is not None}
    unknown = tuple(unknown.what for unknown in profile.unknowns if unknown.topic == "memory")
    if family == "ops":
        predicted = {
            "requested": peak.requested_bytes
            - sum(storage.nbytes for storage in profile.storages if storage.birth == 0)
        }
    if measured is None:
        return Row(label, family, predicted, {}, unknown=unknown)
    found = dict(measured.peaks) if family != "ops" else {"requested": measured.peaks["requested"] - measured.resting}
    differences = (
        first_differences(predicted_events(profile), measured.events, dict(measured.events_by_phase))
        if measured.events
        else ()
    )
    return Row(label, family, predicted, found, differences, unknown)


def rows_of(source: Source, *, workers: int = 2, chosen: Callable[[Measured], bool] = lambda _: True) -> list[Row]:
    """Every measured step of a file predicted and compared, in the file's order."""
    jobs = [
        Job(m.case, m.name, m.operator, source.card, source.allocator_settings, m) for m in source.measured if chosen(m)
    ]
    return _run(jobs, workers)


def _run(jobs: Sequence[Job], workers: int) -> list[Row]:
    if workers == 0:
        return [predict(job) for job in jobs]
    order = {(job.name, job.operator): position for position, job in enumerate(jobs)}
    found: dict[int, Row] = {}
    for job, result in run_jobs(jobs, predict, prepare=prepare, workers=workers, limit_s=180, jobs_per_worker=60):
        label = job.name if job.operator is None else f"{job.name} {job.operator}"
        row = Row(label, str(job.case["family"]), {}, {}, failure=result.reason) if isinstance(result, Lost) else result
        found[order[job.name, job.operator]] = row
        print(f"{len(found)}/{len(jobs)} {_line(row)}", file=sys.stderr, flush=True)
    return [found[position] for position in sorted(found)]


def _line(row: Row) -> str:
    if row.failure:
        return f"{row.name}: {row.failure}"
    errors = ", ".join(
        f"{quantity} {error:+.2%}" for quantity in QUANTITIES if (error := row.error(quantity)) is not None
    )
    sizes = ", ".join(f"{quantity} {size / (1 << 20):,.1f} MiB" for quantity, size in row.predicted.items())
    return f"{row.name}: {errors or sizes}{' (unknown: ' + '; '.join(row.unknown) + ')' if row.unknown else ''}"


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Absolute errors of a group of steps in one number."""

    count: int
    mean: float
    median: float
    worst: float
    worst_name: str


def summary(rows: Iterable[Row], quantity: str) -> Summary | None:
    """Over the rows that have the number on both sides; None if none has."""
    errors = [(abs(error), row.name) for row in rows if (error := row.error(quantity)) is not None]
    if not errors:
        return None
    values = [error for error, _ in errors]
    worst, name = max(errors)
    return Summary(len(values), statistics.fmean(values), statistics.median(values), worst, name)


def table(sources: Sequence[tuple[Source, Sequence[Row]]]) -> str:
    """All of it as Markdown."""
    lines = [
        "# How far predictions are from what cards report",
        "",
        "Written by `make accuracy` from the measurements kept under `results/gpu`; every prediction is made anew, "
        "without a GPU. An error is "
        "`predicted / measured - 1`; mean, median and worst are of its absolute value. Requested: what the program "
        "asked for. Allocated: the "
        "allocator's blocks, `torch.cuda.max_memory_allocated()`. Reserved: its segments, "
        "`torch.cuda.max_memory_reserved()`. Single "
        "operators are compared by the requested bytes they add to what rests between steps.",
        "",
    ]
    if not sources:
        lines += ["Nothing is measured yet: `make validate-gpu` on a machine with an NVIDIA GPU.", ""]
    for source, rows in sources:
        lines += [*_source_lines(source, rows), ""]
    ours = [line for source, rows in sources for line in _our_line(source, rows)]
    lines += [
        "## Beside what others publish",
        "",
        (
            "Others' figures are their authors', not measured here, of other models and settings; for an idea of "
            "what is "
            "usual."
        ),
        "",
        "| tool | of what | error | source |",
        "|---|---|---|---|",
        *ours,
        *(f"| {tool} | {what} | {error} | {where} |" for tool, what, error, where in PUBLISHED),
        "",
    ]
    return "\n".join(lines)


def _our_line(source: Source, rows: Sequence[Row]) -> Iterator[str]:
    found = summary([row for row in rows if row.family != "ops"], "allocated")
    if found is not None:
        what = (
            f"allocated bytes of {found.count} training and inference steps on "
            f"{source.card.full_name or source.card.name}, workspaces included"
        )
        yield f"| fxmem | {what} | {found.mean:.1%} mean, {found.worst:.1%} worst | this page |".replace("%", " %")


def _source_lines(source: Source, rows: Sequence[Row]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    settings = f"; allocator settings `{source.allocator_settings}`" if source.allocator_settings else ""
    context = (
        f" A process takes {source.context.nbytes / (1 << 20):,.0f} MiB beside the allocator."
        if source.context is not None
        else ""
    )
    yield from (
        f"## {source.card.full_name or source.card.name}",
        "",
        f"`{source.name}`: {versions}{settings}.{_predicted_by(source)}{context}",
        "",
    )
    yield from ("| steps | number | count | mean | median | worst | which |", "|---|---|---:|---:|---:|---:|---|")
    families = [*dict.fromkeys(row.family for row in rows)]
    models = [row for row in rows if row.family != "ops"]
    for label, group in [
        *((family, [row for row in rows if row.family == family]) for family in families),
        ("all models", models),
    ]:
        for quantity in QUANTITIES:
            found = summary(group, quantity)
            if found is not None:
                yield (
                    f"| {label} | {quantity} | {found.count} | {found.mean:.2%} | {found.median:.2%} | "
                    f"{found.worst:.2%} | `{found.worst_name}` |"
                )
    far = sorted(
        (row for row in rows if row.judged is not None and abs(row.judged) > LISTED_FROM),
        key=lambda row: -abs(row.judged or 0),
    )
    if far:
        yield from ("", f"### Further off than {LISTED_FROM:.0%}", "")
    for row in far:
        errors = ", ".join(
            f"{quantity} {error:+.2%}" for quantity in QUANTITIES if (error := row.error(quantity)) is not None
        )
        yield f"- `{row.name}`: {errors}{'; not counted: ' + ', '.join(row.unknown) if row.unknown else ''}"
        for difference in row.differences[:DIFFERENCES_LISTED]:
            yield f"    - {' '.join(next(describe_difference(difference)))}"
    yield from _plan_lines(source)
    without = {**source.failed, **{row.name: row.failure for row in rows if row.failure}}
    if without:
        yield from ("", "### Without a number", "", *(f"- `{name}`: {why}" for name, why in sorted(without.items())))


def _plan_lines(source: Source) -> Iterator[str]:
    """What checkpoint plans do to peak and time, as measured."""
    if not source.times:
        return
    allocated = {measured.name: measured.peaks["allocated"] for measured in source.measured}
    yield from (
        "",
        "### Steps with a checkpoint plan, measured",
        "",
        "| step | allocated, of that without | time of a step | of that without |",
        "|---|---:|---:|---:|",
    )
    for name, (without, with_plan) in source.times.items():
        unplanned = allocated.get(name.partition("-plan-")[0])
        share = f"{allocated[name] / unplanned:.1%}" if unplanned and name in allocated else "-"
        yield f"| {name} | {share} | {with_plan:.1f} ms | {with_plan / without:.1%} |"


def _predicted_by(source: Source) -> str:
    import torch

    from fxmem.validation.measure_cuda import cudnn_version

    here = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn_version(),
        **{name: _installed(name) for name in COLLECTIONS},
    }
    other = [f"{name} {here[name]}" for name, version in source.versions.items() if version != here[name]]
    return f" Predicted by {', '.join(other)}." if other else ""


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# --- bounds -----------------------------------------------------------------------------------------------------------


def bounds_of(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """How far off each number of each step may be from now on."""
    return {
        row.name: {
            q: round(max(abs(error) * MARGIN, SMALLEST_BOUND), 5)
            for q in QUANTITIES
            if (error := row.error(q)) is not None
        }
        for row in rows
        if not row.failure
    }


def beyond(rows: Iterable[Row], bounds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What is further off than its bound, in words; a step without a prediction is, if it has a bound."""
    found = []
    for row in rows:
        for quantity, bound in bounds.get(row.name, {}).items():
            error = row.error(quantity)
            if error is None:
                found.append(
                    f"{row.name}: {quantity} has no prediction any more{': ' + row.failure if row.failure else ''}"
                )
            elif abs(error) > bound:
                found.append(f"{row.name}: {quantity} is {error:+.3%} off, the bound is {bound:.3%}")
    return found


def keep_contexts(found: Iterable[ContextSize | None], path: Path = CONTEXT_SIZES) -> None:
    """Write these into the table that predictions read, in place of what it has from the same sources."""
    new = [row for row in found if row is not None]
    sources = {row.source for row in new}
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["source"] not in sources]
    rows += [row.model_dump(mode="json") for row in new]
    rows.sort(key=lambda row: (row["capability"], row["card"], row["state"], row["torch"], row["cuda"], row["nbytes"]))
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def kept(folder: Path = RESULTS) -> list[Path]:
    """The measurement files of a folder."""
    return sorted(path for path in folder.glob("*.json") if path.name != BOUNDS.name)


# --- running ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; 4 if something is further off than its bound, 1 if a prediction failed, else 0."""
    asked = _parse(arguments)
    if asked.predict is not None:
        return _predict_all(asked.predict, asked.jobs, asked.only)
    paths = asked.files or kept()
    try:
        sources = [read(path) for path in paths]
    except (OSError, ValueError, KeyError) as error:
        print(f"accuracy.py: {error}", file=sys.stderr)
        return 2
    compared = [
        (source, rows_of(source, workers=asked.jobs, chosen=lambda m: asked.only in m.name)) for source in sources
    ]
    text = table(compared)
    if asked.files or asked.only:
        print(text)
    else:
        TABLE.write_text(text, encoding="utf-8")
        print(f"{TABLE}: {sum(len(rows) for _, rows in compared)} steps of {len(compared)} files")
    bounds = json.loads(BOUNDS.read_text(encoding="utf-8")) if BOUNDS.is_file() else {}
    if asked.bounds:
        bounds |= {source.name: {**bounds.get(source.name, {}), **bounds_of(rows)} for source, rows in compared}
        BOUNDS.parent.mkdir(parents=True, exist_ok=True)
        BOUNDS.write_text(json.dumps(bounds, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        keep_contexts([source.context for source in sources])
    worse = [line for source, rows in compared for line in beyond(rows, bounds.get(source.name, {}))]
    print("\n".join(worse), file=sys.stderr, end="\n" if worse else "")
    return 4 if worse else 1 if any(row.failure for _, rows in compared for row in rows) else 0


def _predict_all(card: str, workers: int, only: str) -> int:
    """Predict every case of `benchmarks/accuracy/cases.py` for a card, and say which cannot be."""
    from benchmarks.accuracy.cases import every_case
    from benchmarks.accuracy.probes import probes
    from fxmem.hardware.catalogue import target

    wanted = target(card)
    jobs: list[Job] = []
    for name, case in every_case().items():
        operators = [None] if case.is_model else list(probes(case, "meta")) if case.family == "ops" else []
        jobs += [Job(case.as_dict(), name, operator, wanted, "", None) for operator in operators if only in name]
    rows = _run(jobs, workers)
    failed = [row for row in rows if row.failure]
    unknown: dict[str, int] = {}
    for row in rows:
        for what in row.unknown:
            unknown[what] = unknown.get(what, 0) + 1
    print(f"{len(rows) - len(failed)} of {len(rows)} steps predicted for {wanted.name}")
    for row in failed:
        print(f"  {row.name}: {row.failure}")
    for what, count in sorted(unknown.items(), key=lambda item: -item[1]):
        print(f"  not counted in {count}: {what}")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold predictions against what was measured on cards.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE.json", help="measurements (default: all that are kept)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes; 0 runs all in this one (default 2)")
    parser.add_argument(
        "--bounds",
        action="store_true",
        help="hold every number to the error it has now, and keep the size of the CUDA context",
    )
    parser.add_argument("--predict", metavar="CARD", help="predict every case for a card, with nothing measured")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
