"""Measure what a card really takes, for predictions to be held against: one command, under nine minutes on a
data-centre card.

    python -m benchmarks.accuracy.gpu                     (`make validate-gpu`)
    python -m benchmarks.accuracy.gpu --only resnet50     cases whose name contains this; --list shows the names
    python -m benchmarks.accuracy.gpu --dry-run           the same road with tiny versions on the CPU

At the end, alone on the card: how long the steps with a checkpoint plan of fxmem's take, beside the same steps without
it.

Each case runs in a process of its own with a time limit, several side by side: three warm-up steps, then the one that
is measured (`fxmem.validation.measure_cuda`). The result is one JSON file under `benchmarks/results/gpu/`, named after
card, torch and cuDNN: `about` (the machine and every version), `cases`, and by case the whole measurement: peaks by
phase, what rests between steps, the allocator's log. A case that failed is there with its error. What is measured
already is kept, so a run that was cut short goes on; with `--out DIR` and nothing there yet, from the file under
`benchmarks/results/gpu`. A case that ran short of memory because of its neighbours is run again alone.

Needs torch, torchvision, timm, transformers and pydantic. Exits with 3 if there is no card or one of these is missing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import benchmarks
from fxmem import __version__
from fxmem.errors import FxmemError

RESULTS = benchmarks.RESULTS / "gpu"
STEPS = 4
"""Warm-up steps and the one that is measured. Steps three and four of a loop use the same blocks in nearly every
model."""
PACKAGES = ("torch", "torchvision", "timm", "transformers", "triton", "nvidia-cudnn-cu13", "nvidia-cublas")
NEEDED = ("torch", "pydantic", "torchvision", "timm", "transformers")
GIB = 1 << 30
TIMED = 3, 10, 2
"""Steps that are not timed and steps that are, without and then with a plan; and how often that."""
RUN = ("-m", "benchmarks.accuracy.gpu")
"""What Python is given to run this module in a process of its own."""
RESERVE_S = 30
"""No case is begun in the last seconds of the time that is given."""


# --- in a process of its own ------------------------------------------------------------------------------------------


def about(dry_run: bool) -> dict[str, Any]:
    """What has to be known to read the numbers."""
    from fxmem.validation.measure_cuda import card_machine, card_target

    found: dict[str, Any] = {
        "fxmem": __version__,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "steps": STEPS,
        "dry_run": dry_run,
    }
    if dry_run:
        return {**found, "name": "dry-run"}
    machine = card_machine()
    target = card_target(machine.name, machine.capability or (0, 0), machine.memory_bytes)
    torch_version = machine.torch_version.partition("+")[0]
    return {
        **found,
        "name": f"{target.name}-torch{torch_version}-cudnn{machine.cudnn_version}",
        "machine": machine.model_dump(mode="json"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(name: str, dry_run: bool) -> dict[str, Any]:
    """Run one case."""
    import torch

    from benchmarks.accuracy.cases import build, every_case, kernel_settings
    from benchmarks.accuracy.probes import gradient_of_ones, probes

    case = every_case()[name]
    if case.family == "context":
        return {"rows": _context(dry_run), "columns": ["after", "card_used_bytes", "reserved_bytes"]}
    with kernel_settings(case):
        if case.is_model:
            torch.manual_seed(0)
            built = build(case, "cpu", tiny=dry_run)
            optimizer = case.optimizer_spec if case.mode == "train" else None
            step = {"mode": case.mode, "loss": None, "optimizer": optimizer, "precision": case.precision}
            return _measured(lambda: (built.module, built.args, built.kwargs), step, dry_run)
        step = {"mode": "train", "loss": gradient_of_ones, "optimizer": None, "precision": None}
        return {"ops": {op: _tried(make, step, dry_run) for op, make in probes(case, "cpu", tiny=dry_run).items()}}


def timed(name: str, dry_run: bool) -> dict[str, Any]:
    """Of a case with a plan: milliseconds of single steps without it and with it, in turns."""
    import torch

    import fxmem
    from benchmarks.accuracy.cases import build, every_case, kernel_settings, plan_for
    from fxmem.simulation.step.request import StepRequest
    from fxmem.simulation.step.step import make_optimizer, run_step

    device, (warm_up, count, turns) = ("cpu", (1, 1, 1)) if dry_run else ("cuda", TIMED)
    case = every_case()[name]
    with kernel_settings(case):
        torch.manual_seed(0)
        built = build(case, "cpu", tiny=dry_run, unplanned=True)
        plan, model = plan_for(case, built, tiny=dry_run), built.module.to(device)
        request = StepRequest(
            args=tuple(value.to(device) for value in built.args),
            kwargs={key: value.to(device) for key, value in built.kwargs.items()},
            precision=case.precision,
        )
        optimizer = make_optimizer(case.optimizer_spec, model.parameters())

        def milliseconds() -> float:
            began = time.perf_counter()
            run_step(model, request, optimizer=optimizer, device_type=device, mark=lambda _: None)
            if device == "cuda":
                torch.cuda.synchronize()
            return round(1e3 * (time.perf_counter() - began), 3)

        found: dict[str, Any] = {"without_ms": [], "with_ms": []}
        for _ in range(turns):
            for kind, change in (
                ("without_ms", fxmem.uncheckpoint),
                ("with_ms", lambda model: fxmem.checkpoint(model, plan)),
            ):
                change(model)
                found[kind] += [milliseconds() for _ in range(warm_up + count)][warm_up:]
    return found


def _tried(make: Callable[[], Any], step: Mapping[str, Any], dry_run: bool) -> dict[str, Any]:
    """One operator; others of its case are measured even if it cannot run."""
    import torch

    torch.manual_seed(0)
    try:
        return _measured(lambda: (make(), (), {}), step, dry_run)
    except Exception as error:
        kind = "" if isinstance(error, FxmemError) else f"{type(error).__name__}: "
        said = " ".join(str(error).split()).replace(f"{Path(__file__).parents[2]}{os.sep}", "")
        return {"error": f"{kind}{said}"[:500]}


def _measured(
    make: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]], step: Mapping[str, Any], dry_run: bool
) -> dict[str, Any]:
    from fxmem.simulation.step.request import StepRequest
    from fxmem.validation.measure_cpu import measure_cpu
    from fxmem.validation.measure_cuda import measure_cuda

    model, args, kwargs = make()
    request = StepRequest(args=args, kwargs=kwargs, keep_outputs=False, **step)
    if dry_run:
        return {"measurement": measure_cpu(model, request, steps=2).model_dump(mode="json")}
    import torch

    found = measure_cuda(model, request, steps=STEPS)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    # Cases run side by side, so what is on the card beside the allocator's memory is not this process's alone.
    return {
        "measurement": found.model_copy(update={"process_bytes": None}).model_dump(mode="json"),
        **({"alloc_retries": retries} if retries else {}),
    }


def _context(dry_run: bool) -> list[list[Any]]:
    """Memory in use on the whole card as libraries load, so it is only worth something on a card nobody else uses.

    The first row is what was in use before this process came, which only the driver's tool can say.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    from fxmem.validation.measure_cuda import nvidia_smi

    device = "cpu" if dry_run else "cuda"
    said = "" if dry_run else nvidia_smi("memory.used") or ""
    rows: list[list[Any]] = [["before", int(said) << 20, 0]] if said.isdigit() else []

    def note(after: str) -> None:
        if dry_run:
            rows.append([after, None, None])
            return
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        rows.append([after, total - free, torch.cuda.memory_reserved()])

    note("context")
    x = torch.zeros(1024, 1024, device=device, requires_grad=True)
    note("first tensor")
    (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    note("matmul, both threads")
    _ = x.bfloat16() @ x.bfloat16()
    note("bf16 matmul")
    image = torch.zeros(8, 64, 56, 56, device=device, requires_grad=True)
    nn.Conv2d(64, 64, 3, device=device)(image).sum().backward()
    note("convolution")
    q = torch.zeros(2, 8, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    note("attention")
    nn.LayerNorm(1024, device=device)(x).softmax(-1).sum().backward()
    note("layer norm, softmax")
    torch.optim.AdamW([x]).step()
    note("adamw")
    return rows


# --- all of them ------------------------------------------------------------------------------------------------------


class Runner:
    """Runs cases in processes of their own and keeps the result file up to date."""

    def __init__(self, path: Path, document: dict[str, Any], asked: argparse.Namespace, end: float) -> None:
        self.path, self.document, self.asked, self.end = path, document, asked, end

    def run_all(self, names: Sequence[str], jobs: int) -> list[str]:
        """Measure these, `jobs` side by side; those there was no time for."""
        left: list[str] = []
        with ThreadPoolExecutor(jobs) as pool:
            futures: dict[Future[dict[str, Any] | None], str] = {
                pool.submit(self.run, name, jobs): name for name in names
            }
            for future in as_completed(futures):
                name, result = futures[future], future.result()
                if result is None:
                    left.append(name)
                    continue
                self.document["results"][name] = result
                print(f"{name}: {_summary(result)}", file=sys.stderr, flush=True)
                write(self.path, self.document)
        return left

    def run(self, name: str, jobs: int) -> dict[str, Any] | None:
        """One case; None if there is no time to begin it."""
        remaining = self.end - time.monotonic()
        if remaining < RESERVE_S:
            return None
        began = time.monotonic()
        result = child(
            ["--one", name],
            dry_run=self.asked.dry_run,
            limit_s=min(self.asked.limit, remaining),
            threads=max(1, (os.cpu_count() or 1) // jobs),
        )
        return {**result, "seconds": round(time.monotonic() - began, 1)}

    def time_all(self, names: Sequence[str]) -> list[str]:
        """Time these one after the other; those there was no time for."""
        left: list[str] = []
        for name in names:
            remaining = self.end - time.monotonic()
            if remaining < RESERVE_S:
                left.append(name)
                continue
            found = child(
                ["--times", name],
                dry_run=self.asked.dry_run,
                limit_s=min(self.asked.limit, remaining),
                threads=os.cpu_count() or 1,
            )
            self.document["results"][name]["times"] = found
            print(f"{name}: {_times(found)}", file=sys.stderr, flush=True)
            write(self.path, self.document)
        return left


def _times(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    without, with_plan = statistics.median(found["without_ms"]), statistics.median(found["with_ms"])
    return f"a step takes {without:.1f} ms, with the plan {with_plan:.1f} ms"


def child(arguments: Sequence[str], *, dry_run: bool, limit_s: float, threads: int) -> dict[str, Any]:
    """What a process of this script answers, or an `error` if it does not."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable,
            *RUN,
            *arguments,
            "--answer",
            str(answer),
            *(["--dry-run"] if dry_run else []),
        ]
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {limit_s:.0f} s"}
        if answer.is_file():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        said = " ".join(done.stderr.split())[-300:]
        return {"error": f"its process ended with exit code {done.returncode}: {said}", "exit_code": done.returncode}


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    part.replace(path)


def is_done(result: Mapping[str, Any] | None) -> bool:
    """Whether there is a measurement that counts: neither an error nor one in which the allocator had to give memory
    back."""
    return result is not None and "error" not in result and not result.get("alloc_retries")


def _summary(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    took = f"{result['seconds']} s"
    if "ops" in result:
        failed = sum("error" in one for one in result["ops"].values())
        return f"{len(result['ops'])} operators, {failed} failed, {took}"
    measurement = result.get("measurement")
    if measurement is None:
        return took
    short = ", short of memory" if result.get("alloc_retries") else ""
    bytes_ = measurement["allocated_bytes"] or measurement["peak_bytes"]
    return f"{bytes_ / (1 << 20):,.1f} MiB{short}, {took}"


def _shuffled(names: Sequence[str]) -> list[str]:
    """The same order every time, the variants of one large model apart; `context` first, for it runs alone."""
    return sorted(names, key=lambda name: (name != "context", zlib.crc32(name.encode())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 0 if all of it is there, 1 if something failed or was not reached, 3 without a
    card."""
    asked = _parse(arguments)
    if asked.answer is not None:
        return _answer(asked)
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        print(
            (
                f"gpu.py: expected {', '.join(NEEDED)}; not installed: {', '.join(missing)} (docs/measuring.md says "
                f"how to "
                f"bring them along)"
            ),
            file=sys.stderr,
        )
        return 3
    from benchmarks.accuracy.cases import every_case

    names = [name for name in every_case() if asked.only in name]
    if asked.list or not names:
        print(
            "\n".join(names) if names else f"no case has {asked.only!r} in its name; --list shows them",
            file=sys.stdout if names else sys.stderr,
        )
        return 0 if names else 2
    end = time.monotonic() + 60 * asked.minutes
    found = child(["--about"], dry_run=asked.dry_run, limit_s=120, threads=1)
    if "error" in found:
        print(f"gpu.py: {found['error']}", file=sys.stderr)
        return int(found.get("exit_code", 1))
    path, kept = asked.out / f"{found['name']}.json", RESULTS / f"{found['name']}.json"
    cases = {name: case.as_dict() for name, case in every_case().items()}
    document = {"about": found, "cases": cases, "results": {}}
    earlier = next((file for file in (path, kept) if file.is_file()), None)
    if earlier is not None and not asked.again:
        document["results"] = json.loads(earlier.read_text(encoding="utf-8"))["results"]
    todo = [name for name in _shuffled(names) if not is_done(document["results"].get(name))]
    memory = (found.get("machine") or {}).get("memory_bytes") or 0
    jobs = asked.jobs or (2 if asked.dry_run else max(1, min(6, memory // (20 * GIB))))
    runner = Runner(path, document, asked, end)
    left = runner.run_all([name for name in todo if name == "context"], 1)
    left += runner.run_all([name for name in todo if name != "context"], jobs)
    if jobs > 1:
        again = [name for name in todo if name not in left and _is_short_of_memory(document["results"][name])]
        left += runner.run_all(again, 1)
    planned = [name for name in names if every_case()[name].plan and is_done(document["results"].get(name))]
    untimed = runner.time_all(
        [name for name in planned if "without_ms" not in document["results"][name].get("times", {})]
    )
    write(path, document)
    failed = [name for name in names if name not in left and not is_done(document["results"].get(name))]
    failed += [name for name in planned if "error" in document["results"][name].get("times", {})]
    left += untimed
    for name in failed:
        result = document["results"][name]
        print(f"  {name}: {(_times(result['times']) if is_done(result) else _summary(result))[:160]}")
    print(f"{path}: {len(names) - len(failed) - len(left)} measured, {len(failed)} failed, {len(left)} not reached")
    return 1 if failed or left else 0


def _is_short_of_memory(result: Mapping[str, Any]) -> bool:
    return bool(result.get("alloc_retries")) or "out of memory" in str(result.get("error", "")).lower()


def _answer(asked: argparse.Namespace) -> int:
    """In a child: write the answer to the file that is named. An error is an answer, except that of a missing card."""
    from fxmem.errors import EnvironmentLacksError

    try:
        found = (
            about(asked.dry_run)
            if asked.about
            else timed(asked.times, asked.dry_run)
            if asked.times
            else measure(asked.one, asked.dry_run)
        )
    except EnvironmentLacksError as error:
        found = {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    asked.answer.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure steps on this machine's card.")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="the names of the cases, and nothing else")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes side by side (default: one for each 20 GiB of the card, at most 6)",
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="time for all of it (default 8.5)")
    parser.add_argument("--limit", type=float, default=150.0, metavar="SECONDS", help="time for one case (default 150)")
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the file goes")
    parser.add_argument("--dry-run", action="store_true", help="tiny versions on the CPU, to see that everything runs")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--times", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
