"""What a card does with torch's operators, with programs of many kinds and with whole scripts: measured once, held ever
after.

    python -m benchmarks.programs.card_runs --measure     where a card is, for six minutes; again for the rest
      --dry-run                                           the same road on the CPU, a few of each, to see that it runs
    python -m benchmarks.programs.card_runs [FILE]        anywhere: predict what the file has, print where it differs;
      --only operator/sort script/lengths                 of KIND/NAME, what contains one of these

Kinds, each in worker processes side by side:

- `operator`: every operator of torch's own list (`benchmarks.programs.operators`), forward and backward.
- `program`: every program of `benchmarks.programs.program_cases`.
- `script`: every script of `card_programs`, whole, in a process of its own; what several share is in `card_parts`.
  What it prints is kept, and the log of the card's allocator, each entry with the line of the script that it comes
  from. In the prediction the same happens under `fxmem run`: both print what `torch.cuda` says of the memory, and both
  dump the log.
- `public`: the programs of `make scripts`, untouched, for `STEPS` steps of their optimizers, without a compiler
  (`compiled`: with it). Repositories that are checked out lie in FXMEM_SCRIPTS_WORK; data is made up there.

The result is one file under `benchmarks/results/gpu`, named after the card and the day; what is in it is not measured
again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gzip
import json
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.programs.scripts import run
from fxmem.records.profile import Phase, Target
from fxmem.records.validation import Difference
from fxmem.show.text.verdict import describe_difference

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "card_programs"
RUN = (str(Path(__file__).resolve()),)
"""By its path: some of the programs, and some packages, have a module `benchmarks` of their own."""
ALONE = "alone_"
"""Scripts of such a name want the whole card."""
CHUNK = 24
"""Operators or programs that one process measures."""
LIMIT_S = 300
MOST_EVENTS = 1_000_000
STEPS = 6
"""Of a public program's optimizers, unless it ends before."""
COMPILED = "nanoGPT, GPT-2 124M", "nanochat, base_train", "llama2.c, compiled", "modded-nanogpt, first Muon"
"""Public programs that are run with their compiler as well."""
WHOLE = "compiled", "public", "script"
"""Kinds that run in a process of their own."""
WORK = Path(os.environ.get("FXMEM_SCRIPTS_WORK", "build/scripts")).resolve()
LOGGED = {"alloc", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"}
"""Entries of the allocator's log that are kept."""


# --- one process ------------------------------------------------------------------------------------------------------


def measure(kind: str, names: Sequence[str], out: Path, *, dry_run: bool) -> None:
    """Measure operators or programs, one after another; each is a line of the file."""
    import torch

    from fxmem.validation.measure_cpu import measure_cpu
    from fxmem.validation.measure_cuda import measure_cuda

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with out.open("a") as file:
        for name in names:
            for mode, make in steps(kind, name):
                row: dict[str, Any] = {"kind": kind, "name": name, "mode": mode}
                try:
                    model, request = make()
                    found = (measure_cpu if dry_run else measure_cuda)(model, request, steps=3)
                    row |= found.model_dump(mode="json", exclude={"machine", "step", "process_bytes"})
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                print(json.dumps(row), file=file, flush=True)
                if "CUDA error" in row.get("error", ""):  # nothing runs in this process any more
                    return


def steps(kind: str, name: str, target: Any = "cpu") -> Iterator[tuple[str, Any]]:
    """By mode, what makes a model and the step it runs."""
    import torch

    from fxmem.simulation.step.request import StepRequest

    if kind == "program":
        from benchmarks.programs.program_cases import PROGRAMS

        def make_program(mode: str) -> tuple[Any, StepRequest]:
            torch.manual_seed(0)
            case = PROGRAMS[name]()
            train = mode == "train"
            settings: Any = {
                "mode": mode,
                "precision": case.precision,
                "target": target,
                "name": name,
                "keep_outputs": False,
            }
            training: Any = {"optimizer": case.optimizer, "loss": case.loss} if train else {"optimizer": None}
            return case.model.train(train), StepRequest(args=case.inputs, **settings, **training)

        for mode in PROGRAMS[name]().modes:
            yield mode, lambda mode=mode: make_program(mode)
        return
    from benchmarks.programs.operators import MODES, Operator, gradient_of_ones, sample

    info = _operators()[name]

    def make_operator(mode: str) -> tuple[Any, StepRequest]:
        train = mode == "train"
        arguments = sample(info, train)
        if arguments is None:
            raise ValueError("torch has no sample")
        torch.manual_seed(0)
        loss = gradient_of_ones if train else None
        settings: Any = {
            "mode": mode,
            "loss": loss,
            "optimizer": None,
            "target": target,
            "name": name,
            "keep_outputs": False,
        }
        return Operator(info.op, arguments).train(train), StepRequest(**settings)

    for mode in MODES:
        if mode == "infer" or info.supports_autograd:
            yield mode, lambda mode=mode: make_operator(mode)


@functools.cache
def _operators() -> dict[str, Any]:
    from benchmarks.programs.operators import full_name, operators

    return {full_name(info): info for info in operators()}


def record_script(command: Sequence[str], dump: str, steps: int = 0) -> None:
    """Run a script as a program with the allocator's log kept; on a card, and as well on a pretended one.

    `command` is what follows `python`. It ends after so many steps of its optimizers; 0: it runs to its end. What
    `_counts` says after each of these steps is kept.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    begin = functools.partial(
        torch.cuda.memory._record_memory_history, "all", context="alloc", stacks="python", max_entries=MOST_EVENTS
    )
    # a card that is not in use yet reads its allocator's settings when it comes into use: the script may make some
    begin() if torch.cuda.is_initialized() else torch.cuda._lazy_call(begin)
    counts: list[tuple[int, int, int]] = []
    if steps:

        def count(*_: Any) -> None:
            counts.append(_counts())
            if len(counts) == steps:
                raise SystemExit(0)

        register_optimizer_step_post_hook(count)
    is_module = command[0] == "-m"
    script = "" if is_module else str(Path(command[0]).resolve())
    sys.argv = list(command[is_module:])
    sys.path[0] = os.getcwd() if is_module else str(Path(script).parent)
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    finally:
        print("end", *(f"{each:,}" for each in _counts()))
        found = torch.cuda.memory._snapshot()
        events = []
        for entry in found["device_traces"][0]:
            if entry["action"] in LOGGED:
                lines = [each["line"] for each in entry.get("frames", ()) if _is_own(each["filename"], script)]
                events.append([entry["action"], entry["size"], lines[0] if lines else 0])
        statistics = {key: value for key, value in torch.cuda.memory_stats().items() if value}
        host = getattr(torch.cuda, "host_memory_stats", dict)() if torch.cuda.is_available() else {}
        kept = {"events": events, "statistics": dict(statistics), "host": dict(host), "process_bytes": _process_bytes()}
        with open(dump, "wb") as file:
            pickle.dump(kept | ({"steps": counts} if steps else {}), file)


def _is_own(file: str, script: str) -> bool:
    """Whether a file is the script; without one, whether it lies where the program was started."""
    return file == script if script else file.startswith(os.getcwd())


def _process_bytes() -> int | None:
    """What the driver says that this process has of the card. None where it does not say, or none is there."""
    import pynvml

    try:
        pynvml.nvmlInit()
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return None
    return next((each.usedGpuMemory for each in running if each.pid == os.getpid()), None)


def _counts() -> tuple[int, int, int]:
    """Of the card, what is allocated, the most that was, and the most that was reserved."""
    import torch

    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


# --- all of them, on a card -------------------------------------------------------------------------------------------


def _child(
    arguments: Sequence[str],
    limit_s: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, str, str]:
    """Exit code (None if it took too long), standard output, standard error."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ |= environment or {}
    environ["PYTHONPATH"] = _python_path(environment or {}, *sys.path)
    command = [sys.executable, *RUN, *arguments]
    with run.terminal() as keyboard:
        settings: Any = {"cwd": folder, "env": environ, "stdin": keyboard, "capture_output": True}
        try:
            done = subprocess.run(command, **settings, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired as late:
            return None, _text(late.stdout), _text(late.stderr)
    return done.returncode, _text(done.stdout), _text(done.stderr)


def _python_path(environment: Mapping[str, str], *more: str) -> str:
    """Where Python looks: this repository first."""
    return os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"), *more)))


def _text(said: bytes | None) -> str:
    return (said or b"").decode(errors="replace")


def _measure_chunk(kind: str, names: Sequence[str], end: float, dry_run: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    left = list(names)
    while left and time.monotonic() < end - 15:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "rows")
            limit = min(LIMIT_S, end - time.monotonic())
            said = _child(["--one", kind, "--answer", str(out), *["--dry-run"] * dry_run, "--names", *left], limit)
            new = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        rows += new
        done = {row["name"] for row in new}
        if not new:
            rows.append({"kind": kind, "name": left[0], "mode": "", "error": f"exit {said[0]}: {said[2][-200:]}"})
            done = {left[0]}
        left = [name for name in left if name not in done]
    return rows


def _measure_script(kind: str, name: str, end: float) -> list[dict[str, Any]]:
    if time.monotonic() > end - 20:
        return []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder, "dump.pickle")
        row: dict[str, Any] = {"kind": kind, "name": name, "mode": ""}
        if kind != "script":
            prepared = _child(["--one", "prepare", "--names", name], min(LIMIT_S, end - time.monotonic()))
            if prepared[0] != 0:
                return [{**row, "error": prepared[2][-1500:]}]
        command, start, environment, steps = command_of(kind, name)
        arguments = ["--one", "script", "--answer", str(dump), "--steps", str(steps), "--names", *command]
        code, out, err = _child(arguments, max(1, min(LIMIT_S, end - time.monotonic())), start, environment)
        row |= {"exit_code": code, **({"printed": out} if kind == "script" else {})}
        if code != 0:
            row["error"] = err[-1500:]
        if dump.exists():
            row |= pickle.loads(dump.read_bytes())
    return [{**row, "seconds": round(time.monotonic() - began, 1)}]


def command_of(kind: str, name: str) -> tuple[list[str], Path | None, dict[str, str], int]:
    """What follows `python`, the folder it is started in, its environment and for how many steps it runs (0: all).

    A public program is made ready.
    """
    if kind == "script":
        return [str(SCRIPTS / f"{name}.py")], None, {}, 0
    script = _public()[name]
    start = run.prepare(script, run.folder_of(script, WORK), sys.executable)
    environment = {**run.environment(script, start), "TORCHDYNAMO_DISABLE": "0" if kind == "compiled" else "1"}
    return script["command"], start, environment, 0 if script.get("until") == "end" else STEPS


@functools.cache
def _public() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in run.read_scripts()}


def measure_all(asked: argparse.Namespace) -> int:
    """Measure what is asked for and not in the file yet."""
    import torch

    from benchmarks.programs.program_cases import PROGRAMS
    from fxmem.validation.measure_cpu import cpu_machine
    from fxmem.validation.measure_cuda import card_machine

    end = time.monotonic() + 60 * asked.minutes
    machine = cpu_machine() if asked.dry_run else card_machine()
    card = "dry-run" if asked.dry_run else machine.name.lower().replace("nvidia ", "").split()[0]
    path = asked.out / f"{card}-runs-{datetime.date.today()}.json.gz"
    rows = read(path)["rows"] if path.is_file() else []
    done = {(row["kind"], row["name"]) for row in rows}
    everything = {
        "script": sorted(each.stem for each in SCRIPTS.glob("*.py")),
        "public": list(_public()),
        "compiled": list(COMPILED),
        "program": list(PROGRAMS),
        "operator": list(_operators()),
    }
    if asked.dry_run:
        everything = {kind: names[: 0 if kind in WHOLE else 6] for kind, names in everything.items()}
    todo = {
        kind: [name for name in names if _is_asked(asked, kind, name) and (kind, name) not in done]
        for kind, names in everything.items()
    }
    about = {
        "machine": machine.model_dump(mode="json"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "packages": _versions(),
        "date": datetime.date.today().isoformat(),
    }

    def keep(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        for row in new:
            if "error" in row:
                print(row["kind"], row["name"], row["mode"], row["error"][-160:].replace("\n", " "), flush=True)
        asked.out.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        text = json.dumps({"about": about, "rows": rows}, separators=(",", ":"))
        part.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))
        part.replace(path)

    for name in [name for name in todo["script"] if name.startswith(ALONE)]:
        keep(_measure_script("script", name, end))
    with ThreadPoolExecutor(asked.jobs) as pool:
        whole = [(kind, name) for kind in WHOLE for name in todo[kind] if not name.startswith(ALONE)]
        futures = [pool.submit(_measure_script, kind, name, end) for kind, name in whole]
        for kind in ("program", "operator"):
            for begin in range(0, len(todo[kind]), CHUNK):
                names = todo[kind][begin : begin + CHUNK]
                futures.append(pool.submit(_measure_chunk, kind, names, end, asked.dry_run))
        gathered: list[dict[str, Any]] = []
        for number, future in enumerate(as_completed(futures), 1):
            gathered += future.result()
            if number % 8 == 0 or number == len(futures):
                keep(gathered)
                gathered = []
    failed = sum("error" in row for row in rows)
    print(f"{path}: {len(rows)} rows, {failed} with an error; {60 * asked.minutes - (end - time.monotonic()):.0f} s")
    return 0


def _versions() -> dict[str, str]:
    import importlib.metadata

    wanted = """torchvision timm transformers accelerate lightning peft triton nvidia-cudnn-cu13 nvidia-cublas deepspeed
        torchao trl datasets liger-kernel bitsandbytes"""
    found = {}
    for name in wanted.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _is_asked(asked: argparse.Namespace, kind: str, name: str) -> bool:
    return not asked.only or any(text in f"{kind}/{name}" for text in asked.only)


def read(path: Path) -> Any:
    """What a file of measurements says."""
    return json.loads(gzip.decompress(path.read_bytes()))


# --- predicting, anywhere ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """An operator or a program, predicted beside what the card did."""

    kind: str
    name: str
    mode: str
    predicted: int = 0
    """The largest requested bytes beyond what is there before the step."""
    measured: int = 0
    total: int = 0
    """Measured, with what is there before the step."""
    differences: tuple[Difference, ...] = ()
    unknown: tuple[str, ...] = ()
    """What the prediction says it does not know of memory."""
    is_bound: bool = False
    """Whether a shape hangs on data and is taken at its largest."""
    refused: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both logs have the same blocks for the same time."""
        return not self.refused and not self.differences and self.predicted == self.measured

    @property
    def error(self) -> float:
        """Of the peak."""
        return (self.predicted - self.measured) / max(1, self.total)


def hold(row: Mapping[str, Any], card: Target) -> Held:
    """Predict a measured operator or program for the card."""
    from fxmem.memory.log_diff import first_differences, predicted_events
    from fxmem.simulation.step.analysis import analyze_step

    names = row["kind"], row["name"], row["mode"]
    try:
        model, request = next(make for mode, make in steps(row["kind"], row["name"], card) if mode == row["mode"])()
        analysis = analyze_step(model, request)
    except Exception as error:
        return Held(*names, refused=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
    profile = analysis.profile
    before = sum(storage.nbytes for storage in profile.storages if storage.birth == 0)
    by_phase = {Phase(phase): count for phase, count in row["events_by_phase"].items()}
    return Held(
        *names,
        predicted=analysis.peak.requested_bytes - before,
        measured=row["peak_bytes"] - row["resident_bytes"],
        total=row["peak_bytes"],
        differences=first_differences(predicted_events(profile), row["events"], by_phase),
        unknown=tuple(unknown.what for unknown in profile.unknowns if unknown.topic == "memory"),
        is_bound=any("largest" in assumption.text for assumption in profile.assumptions),
    )


PEAKS = ("requested", "allocated", "reserved")
"""Of the allocator's statistics, in bytes."""


@dataclasses.dataclass(frozen=True)
class HeldScript:
    """A script, predicted beside what it did on the card."""

    name: str
    lines: int
    """How many lines with a number it printed on the card, and steps of a public program."""
    missing: tuple[str, ...]
    """Those of them that the prediction does not print."""
    ending: str
    """How the prediction ended; empty where well."""
    peaks: tuple[tuple[int, int], ...]
    """Of `PEAKS`, predicted and measured, since the script last reset them; empty where one of both is not known."""


def run_script(kind: str, name: str, card: Target) -> tuple[list[str], str, dict[str, Any]]:
    """The lines that a script prints under `fxmem run`, how it ended, and what `record_script` kept there."""
    compiles = ["--compile", "as-is"] if kind == "compiled" or name.startswith("compile_") else []
    command, start, environment, steps = command_of(kind, name)
    environ = {**os.environ, **environment, "PYTHONPATH": _python_path(environment)}
    with tempfile.TemporaryDirectory() as folder, run.terminal() as keyboard:
        target = Path(folder, "card.json")
        target.write_text(card.model_dump_json())
        dump = Path(folder, "dump")
        ours = ["--one", "script", "--answer", str(dump), "--steps", str(steps), "--names", *command]
        verb = ["run", "--target", str(target), "--until", "end", "--write", *compiles, "--", *RUN]
        settings: Any = {"cwd": start, "env": environ, "stdin": keyboard, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-m", "fxmem", *verb, *ours], **settings, check=False)
        kept = pickle.loads(dump.read_bytes()) if dump.exists() else {}
    last = done.stderr.strip().splitlines()[-1:]
    return done.stderr.splitlines(), "" if done.returncode == 0 else " ".join(last), kept


def hold_script(row: Mapping[str, Any], card: Target) -> HeldScript:
    """Predict a measured script for the card."""
    wanted = [line for line in row.get("printed", "").splitlines() if any(word.isdigit() for word in line.split())]
    wanted += _step_lines(row)
    printed, ending, kept = run_script(row["kind"], row["name"], card)
    left = Counter([*printed, *_step_lines(kept)])
    missing = []
    for line in wanted:
        if left[line]:
            left[line] -= 1
        else:
            missing.append(line)
    found = kept.get("statistics", {}), row.get("statistics", {})
    peaks = [tuple(each.get(f"{what}_bytes.all.peak", 0) for each in found) for what in PEAKS]
    known = tuple(peaks) if all(map(all, peaks)) else ()
    name = f"compiled: {row['name']}" if row["kind"] == "compiled" else row["name"]
    return HeldScript(name, len(wanted), tuple(missing), ending, known)


def _step_lines(row: Mapping[str, Any]) -> list[str]:
    """What is allocated after each step, and the most that was allocated and reserved."""
    return [f"step {number} {' '.join(map(str, counts))}" for number, counts in enumerate(row.get("steps", ()))]


def card_of(document: Mapping[str, Any]) -> Target:
    """The card that was measured."""
    from fxmem.validation.measure_cuda import card_target

    machine = document["about"]["machine"]
    return card_target(machine["name"], tuple(machine["capability"]), machine["memory_bytes"])


def latest() -> Path:
    """The newest file that is kept. Raises FileNotFoundError without one."""
    found = sorted((RESULTS / "gpu").glob("*-runs-*.json.gz"))
    if not found:
        raise FileNotFoundError("expected a file of measurements in benchmarks/results/gpu; --measure makes one")
    return found[-1]


def report(held: Sequence[Held], scripts: Sequence[HeldScript], name: str) -> Iterator[str]:
    """What was found, in Markdown."""
    yield f"# Operators, programs and scripts beside a card: {name}, predicted on {datetime.date.today()}"
    yield ""
    yield "Equal: the same blocks for the same time. Peaks are requested bytes beyond what is there before the step."
    yield ""
    yield "| what | runs | equal, block by block | peak equal | within 1 % | refused |"
    yield "|---|---:|---:|---:|---:|---:|"
    for kind in ("operator", "program"):
        of_kind = [each for each in held if each.kind == kind]
        ran = [each for each in of_kind if not each.refused]
        if not of_kind:
            continue
        equal, same = sum(each.is_equal for each in ran), sum(each.predicted == each.measured for each in ran)
        near = sum(abs(each.error) <= 0.01 for each in ran)
        yield f"| {kind}s | {len(of_kind)} | {equal} | {same} | {near} | {len(of_kind) - len(ran)} |"
    if scripts:
        yield from ("", f"| script | {' | '.join(PEAKS)} | lines of bytes | printed alike | first that differs |")
        yield "|---|---:|---:|---:|---:|---:|---|"
        for each in scripts:
            off = " | ".join(f"{ours / theirs - 1:+.3%}" if ours != theirs else "0" for ours, theirs in each.peaks)
            first = f"`{each.missing[0][:70]}`" if each.missing else ""
            ending = f" ({each.ending[:80]})" if each.ending else ""
            alike = each.lines - len(each.missing)
            yield f"| {each.name} | {off or ' | | '} | {each.lines} | {alike} | {first}{ending} |"
    far = sorted((each for each in held if not each.refused and each.error), key=lambda each: -abs(each.error))
    if far:
        yield from (
            "",
            "| run | peak off | of it unknown or a bound | first block that differs |",
            "|---|---:|---|---|",
        )
    for each in far:
        why = "unknown" if each.unknown else "bound" if each.is_bound else ""
        first = " ".join(next(describe_difference(each.differences[0]))) if each.differences else ""
        yield f"| {each.kind}/{each.name} {each.mode} | {each.error:+.2%} | {why} | {first} |"
    refused = [each for each in held if each.refused]
    if refused:
        yield from ("", "Refused:", "", *(f"- {each.kind}/{each.name} {each.mode}: {each.refused}" for each in refused))


def hold_all(asked: argparse.Namespace) -> int:
    """Predict all of a file, and print the table."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = asked.file or latest()
    document = read(path)
    card = card_of(document)
    rows = [row for row in document["rows"] if _is_asked(asked, row["kind"], row["name"]) and "error" not in row]
    rows = [row for row in rows if row["kind"] not in WHOLE or "events" in row or "printed" in row]
    held, scripts = [], []
    for row in rows:
        if row["kind"] in WHOLE:
            scripts.append(hold_script(row, card))
            print(scripts[-1].name, scripts[-1].lines, len(scripts[-1].missing), file=sys.stderr, flush=True)
        else:
            held.append(hold(row, card))
    lines = list(report(held, scripts, path.name.removesuffix(".json.gz")))
    print("\n".join(lines))
    if not asked.only:
        kind = "card-public" if "public" in path.name else "card-runs"
        (RESULTS / f"{kind}-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or predict."""
    asked = _parse(arguments)
    if asked.one == "script":
        record_script(asked.names, str(asked.answer), asked.steps)
        return 0
    if asked.one == "prepare":
        command_of("public", asked.names[0])
        return 0
    if asked.one:
        measure(asked.one, asked.names, asked.answer, dry_run=asked.dry_run)
        return 0
    if asked.measure or asked.dry_run:
        return measure_all(asked)
    return hold_all(asked)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure programs on this machine's card, or hold predictions to it.")
    parser.add_argument("file", nargs="?", type=Path, help="measurements to hold predictions to; default the newest")
    parser.add_argument("--measure", action="store_true", help="measure on this machine's card")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="of KIND/NAME, what contains one of these")
    parser.add_argument("--jobs", type=int, default=10, help="processes side by side where it is measured (default 10)")
    parser.add_argument("--minutes", type=float, default=6, help="time for all of the measurement (default 6)")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", metavar="DIR", help="where the file goes")
    parser.add_argument("--dry-run", action="store_true", help="a few operators and programs on the CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
