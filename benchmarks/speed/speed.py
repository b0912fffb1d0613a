"""Time and memory of the analysis itself, beside a bare FakeTensor step and PyTorch's own MemTracker.

    python -m benchmarks.speed.speed              (`make bench`; some minutes)
    python -m benchmarks.speed.speed --rounds 1   quicker and rougher

What is compared, for one training step with Adam, everything imported and warmed up (FakeTensorMode and fxmem both
remember calls they have seen, so that these are repeated steps):

- analyze: `fxmem.analyze` for an H100, its peak read: copying the model to fake tensors, one recorded step, the
  profile, the timeline;
- bare: forward, backward and `optimizer.step()` of the same model on fake CPU tensors, by PyTorch's C++ engine, nothing
  recorded;
- MemTracker: the same step inside `torch.distributed._tools.mem_tracker.MemTracker`.

The last two are on the CPU because the C++ engine refuses fake CUDA tensors on a machine without a GPU. They take turns
in one process, each after a garbage collection. Seconds are the process's CPU time, all of it on one thread, which
other work on the machine moves least; what counts is the ratio of medians, the seconds are one machine's. Peak memory
is a process's own (`ru_maxrss`), one process for each figure, less what a process has after the imports. Growth: the
analysis of Llama stacks of growing depth, and the exponent p of seconds ~ layers^p, fitted by least squares on
logarithms.

Writes `benchmarks/results/speed-DATE.json` and `.md`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from fxmem import __version__

PACKAGES = ("torch", "torchvision", "transformers")
TARGET = "h100"
LLAMA_LAYERS = 16
GROWTH_LAYERS = (8, 16, 32, 80)
MODELS = {
    "resnet152": "torchvision ResNet-152, batch 32",
    f"llama{LLAMA_LAYERS}": f"Llama-2-7B's widths, {LLAMA_LAYERS} layers, 1 x 2048 tokens, bfloat16 weights",
}
METHODS = {"analyze": "`fxmem.analyze`", "bare": "bare FakeTensor step", "memtracker": "MemTracker"}


# --- in a process of its own ------------------------------------------------------------------------------------------


def _build(name: str) -> tuple[Any, dict[str, Any]]:
    """A model on meta and the keyword arguments of its step."""
    import torch

    from fxmem.cli.specs import build_model

    if name == "resnet152":
        return build_model("torchvision:resnet152").module, {"x": torch.empty(32, 3, 224, 224, device="meta")}
    layers = int(name.removeprefix("llama"))
    module = build_model("hf:LlamaForCausalLM", {"num_hidden_layers": layers}, weights_dtype="bf16").module
    tokens = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    return module, {"input_ids": tokens, "labels": tokens}


def _make_analyze(module: Any, kwargs: dict[str, Any]) -> Callable[[], object]:
    import fxmem

    return lambda: fxmem.analyze(module, kwargs, optimizer="adam", target=TARGET).peak


def _make_step(module: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Callable[[], None]]:
    """The plain step on fake CPU tensors; (model, optimizer, step)."""
    import torch
    from torch._subclasses import FakeTensorMode

    from fxmem.simulation.step.fake_model import fake_inputs, fake_model
    from fxmem.simulation.step.step import default_loss

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(module, mode, torch.device("cpu"))
    inputs = fake_inputs(kwargs, mode, torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def step() -> None:
        with mode:
            loss = default_loss(model(**inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


def _make_bare(module: Any, kwargs: dict[str, Any]) -> Callable[[], object]:
    return _make_step(module, kwargs)[2]


def _make_memtracker(module: Any, kwargs: dict[str, Any]) -> Callable[[], object]:
    from torch.distributed._tools.mem_tracker import MemTracker

    model, optimizer, step = _make_step(module, kwargs)
    step()  # its state is there before the step that is tracked

    def track() -> object:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step()
        return tracker.get_tracker_snapshot("peak")

    return track


_MAKERS: Mapping[str, Callable[[Any, dict[str, Any]], Callable[[], object]]] = {
    "analyze": _make_analyze,
    "bare": _make_bare,
    "memtracker": _make_memtracker,
}


def _import_all() -> None:
    import logging
    import warnings

    import torch
    import torchvision
    import transformers
    from torch.distributed._tools.mem_tracker import MemTracker

    import fxmem

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    _ = torchvision, transformers, MemTracker, fxmem.analyze


def measure(model: str, methods: Sequence[str], rounds: int) -> dict[str, Any]:
    """CPU seconds of each method, taking turns, and this process's largest resident set before and after."""
    _import_all()
    imported_bytes = _peak_rss_bytes()
    runs: dict[str, Callable[[], object]] = {}
    if methods:
        module, kwargs = _build(model)
        runs = {method: _MAKERS[method](module, kwargs) for method in methods}
    for run in runs.values():
        run()  # warm: imports on first use, torch's caches of fake results
    seconds: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            gc.collect()  # what one leaves to be collected is not the next one's to pay for
            began = time.process_time()
            run()
            seconds[method].append(time.process_time() - began)
    return {"seconds": seconds, "imported_bytes": imported_bytes, "peak_rss_bytes": _peak_rss_bytes()}


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- the whole --------------------------------------------------------------------------------------------------------


def _child(model: str, methods: Sequence[str], rounds: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed.speed",
        "--measure",
        model,
        ",".join(methods),
        "--rounds",
        str(rounds),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{model} {' '.join(methods)}: {answer}", file=sys.stderr, flush=True)
    return answer


def _own_bytes(model: str, method: str) -> int:
    """What a process needs to do it once, beyond the imports."""
    alone = _child(model, [method], 0)
    return int(alone["peak_rss_bytes"] - alone["imported_bytes"])


def run_all(rounds: int) -> dict[str, Any]:
    """Every figure of the report."""
    comparison = []
    for model in MODELS:
        seconds = _child(model, list(METHODS), rounds)["seconds"]
        for method in METHODS:
            comparison.append(
                {
                    "model": model,
                    "method": method,
                    "seconds": seconds[method],
                    "rss_above_imports_bytes": _own_bytes(model, method),
                }
            )
    growth = []
    for layers in GROWTH_LAYERS:
        model = f"llama{layers}"
        seconds = _child(model, ["analyze"], max(1, rounds // 2))["seconds"]["analyze"]
        growth.append({"layers": layers, "seconds": seconds, "rss_above_imports_bytes": _own_bytes(model, "analyze")})
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"fxmem": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": rounds,
        "comparison": comparison,
        "growth": growth,
        "growth_exponents": {
            "seconds": exponent([(row["layers"], statistics.median(row["seconds"])) for row in growth]),
            "rss_above_imports_bytes": exponent([(row["layers"], row["rss_above_imports_bytes"]) for row in growth]),
        },
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """p of y ~ x^p, by least squares on logarithms."""
    fit = statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points])
    return round(fit.slope, 3)


def markdown(found: Mapping[str, Any]) -> str:
    """The report for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"# Speed, {found['date']}",
        "",
        f"`make bench`; {versions}, Python {found['python']}; {found['machine']}. Medians of {found['rounds']} "
        f"rounds in turns. "
        "Seconds of CPU time on one thread; what counts is the ratios. "
        "Memory is the process's peak less what it has after the imports. The methods are described in "
        "`benchmarks/speed/speed.py`.",
        "",
        "| model | method | CPU seconds | of the bare step | memory MiB |",
        "|---|---|---:|---:|---:|",
    ]
    bare = {row["model"]: statistics.median(row["seconds"]) for row in found["comparison"] if row["method"] == "bare"}
    for row in found["comparison"]:
        seconds = statistics.median(row["seconds"])
        cells = [
            MODELS[row["model"]],
            METHODS[row["method"]],
            f"{seconds:.2f}",
            f"{seconds / bare[row['model']]:.2f}",
            _mib(row["rss_above_imports_bytes"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    exponents = found["growth_exponents"]
    slope = statistics.linear_regression(
        [row["layers"] for row in found["growth"]], [row["rss_above_imports_bytes"] for row in found["growth"]]
    ).slope
    lines += [
        "",
        f"`fxmem.analyze` of Llama stacks (`{TARGET}`, 1 x 2048 tokens) by depth: seconds grow as "
        f"layers^{exponents['seconds']:.2f}, "
        f"memory as layers^{exponents['rss_above_imports_bytes']:.2f} "
        f"(what the analysis needs whatever the depth, and {_mib(slope)} MiB for each layer).",
        "",
        "| layers | CPU seconds | per layer | memory MiB |",
        "|---:|---:|---:|---:|",
    ]
    for row in found["growth"]:
        seconds = statistics.median(row["seconds"])
        lines.append(
            f"| {row['layers']} | {seconds:.2f} | {seconds / row['layers']:.3f} | "
            f"{_mib(row['rss_above_imports_bytes'])} |"
        )
    return "\n".join([*lines, ""])


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all and write the report."""
    parser = argparse.ArgumentParser(description="Time and memory of the analysis.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed (default 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the report goes")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "METHODS"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.measure:
        model, methods = asked.measure
        print(json.dumps(measure(model, [method for method in methods.split(",") if method], asked.rounds)))
        return 0
    found = run_all(asked.rounds)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"speed-{found['date']}"
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
