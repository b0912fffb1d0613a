"""One measurement of `growth.py`, in a process of its own; prints a JSON object a line."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EVENTS = (10_000, 50_000, 200_000)
FORMS = ("mirror", "loop")
ANALYSES = {
    "mlp-layers": ("MLP (Linear and ReLU, width 1024, batch 64), by layers", (4, 16, 64, 250, 1000)),
    "mlp-width": ("MLP of 16 layers, batch 64, by width", (256, 1024, 4096, 16384)),
    "llama-layers": (
        "Llama blocks (Llama-2-7B's widths, bfloat16, 1 x 2048 tokens), by layers",
        (4, 16, 64, 250, 1000),
    ),
    "llama-width": ("Llama, 8 layers, 1 x 2048 tokens, by width", (512, 2048, 8192)),
    "llama-sequence": ("Llama-2-7B's widths, 8 layers, by tokens", (512, 4096, 32768)),
    "gpt2-layers": ("GPT-2 blocks (GPT-2's widths, 4 x 1024 tokens), by layers", (4, 16, 64, 250, 1000)),
}
LLAMAS = {
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama-3.1-70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Llama-3.1-405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}
"""config.json of meta-llama/Llama-3.1-8B, -70B and -405B, where they differ."""
LLAMA_3 = {
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
"""The same, where they agree."""
IMPORTS = (
    ("", "torch"),
    ("torch", "fxmem"),
    ("torch", "fxmem.simulation.step.analysis"),
    ("", "fxmem"),
    ("", "fxmem.__main__"),
    ("", "fxmem.memory.report_reader"),
)
PACKAGES = ("torch", "transformers", "pydantic", "numpy")


def versions() -> str:
    """Of fxmem and what the figures depend on."""
    from fxmem import __version__

    return ", ".join([f"fxmem {__version__}", *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    gc.collect()
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def _status(field: str) -> int:
    """Bytes that Linux says of this process: `VmHWM`, the most it held; `VmRSS`, what it holds."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# --- records ----------------------------------------------------------------------------------------------------------


def records(events: str, form: Any) -> Iterator[dict[str, Any]]:
    """Seconds of each step over records."""
    from benchmarks.speed.long_profiles import long_report

    made, report = timed(lambda: long_report(int(events), form))
    yield {"step": "making the profile by hand", "seconds": made, "ticks": report.ticks, "nodes": len(report.nodes)}
    with tempfile.TemporaryDirectory() as folder:
        for name, work in record_steps(report, Path(folder) / "report.json"):
            yield {"step": name, "seconds": timed(_told(work))[0]}


def _told(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same, for which a budget out of reach is an answer as good as a plan: it takes no less."""
    from fxmem.errors import ExceededError

    def run() -> Any:
        with contextlib.suppress(ExceededError):
            return work()

    return run


def record_steps(report: Any, path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything that is done with a report, without torch; the second reads what the first wrote."""
    from fxmem.hardware.step_time import step_seconds
    from fxmem.memory import allocator, by_layer, by_line, comparison, liveness, report_reader
    from fxmem.planning import estimate
    from fxmem.records.units import Application
    from fxmem.show import export, graph, html, plots, text

    timeline = liveness.timeline(report)
    yield "save", lambda: path.write_text(report.model_dump_json(), encoding="utf-8")
    yield "load, checked", lambda: report_reader.load_report(path)
    yield "liveness: check", lambda: liveness.check(report)
    yield "liveness: timeline", lambda: liveness.timeline(report)
    yield "liveness: live bytes of nodes", lambda: liveness.node_live_bytes(report)
    yield "liveness: scratch bytes of nodes", lambda: liveness.node_scratch_bytes(report)
    yield "allocator: replay", lambda: allocator.replay(report)
    yield (
        "allocator: replay, expandable segments",
        lambda: allocator.replay(report, settings=allocator.AllocatorSettings(expandable_segments=True)),
    )
    yield "allocator: levels by tick", lambda: allocator.levels(report, allocator.DEFAULT_SETTINGS)
    yield "table", lambda: text.table(report, timeline, width=100)
    yield "by layer", lambda: by_layer.by_layer(report)
    yield "by line", lambda: by_line.by_line(report)
    yield "compare with itself", lambda: comparison.compare(report, report)
    yield "least time", lambda: step_seconds(report)
    plain = graph.DrawingOptions()
    unfolded = graph.DrawingOptions(fold=False)
    yield "SVG, folded (built-in layout)", lambda: graph.render(report, timeline, plain)
    yield "SVG, unfolded (built-in layout)", lambda: graph.render(report, timeline, unfolded)
    yield "timeline's SVG", lambda: plots.timeline_svg(plots.PlottedStep(report, timeline))
    yield "icicle's SVG", lambda: plots.icicle_svg(report, timeline)
    yield "page (built-in layout)", lambda: html.report_html(report, timeline, html.PageOptions())
    for to in export.EXPORTERS:
        yield f"export: {to}", lambda to=to: export.export(report, timeline, to)
    for application in (Application.MODULES, Application.GRAPH):
        for strategy, budget in (("sqrt", None), ("chen", None), ("norms", None), ("flat", 0.6), ("nested", 0.6)):
            name = f"plan: {strategy}, {application.value}"
            yield name, lambda s=strategy, b=budget, a=application: estimate.estimate(report, report.peak, s, b, a)


# --- analyses ---------------------------------------------------------------------------------------------------------


def analysis(name: str, *only: str) -> Iterator[dict[str, Any]]:
    """Seconds and memory of analyses, from the smallest on, after one that fills what is filled once."""
    import torch

    from fxmem.simulation.step.analysis import analyze_step
    from fxmem.simulation.step.request import StepRequest

    torch.set_num_threads(1)
    sizes = ANALYSES[name][1]
    for number, size in enumerate((sizes[0], *(map(int, only) if only else sizes))):
        module, args, kwargs = _model(name, size)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier ones freed is not to be had again
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = _status("VmRSS")
        seconds, done = timed(
            lambda m=module, a=args, k=kwargs: analyze_step(m, StepRequest(args=a, kwargs=k, name=name))
        )
        if number:
            figures = {"seconds": seconds, "memory": _status("VmHWM") - before, "peak": done.peak.requested_bytes}
            yield {"size": size, "nodes": len(done.profile.nodes), "events": done.profile.ticks, **figures}
        del done


def _model(name: str, size: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model of an analysis on meta, and its inputs."""
    import torch

    family, _, measure = name.partition("-")
    if family == "mlp":
        layers, width = (size, 1024) if measure == "layers" else (16, size)
        with torch.device("meta"):
            parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
            return torch.nn.Sequential(*parts), (torch.zeros(64, width),), {}
    if family == "gpt2":
        return _language_model("hf:GPT2LMHeadModel", {"n_layer": size, "attn_implementation": "sdpa"}, 4, 1024)
    width = size if measure == "width" else 4096
    wide = {
        "hidden_size": width,
        "intermediate_size": width * 43 // 16,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
    }
    tokens = size if measure == "sequence" else 2048
    layers = size if measure == "layers" else 8
    return _language_model(
        "hf:LlamaForCausalLM",
        {**wide, "num_hidden_layers": layers, "max_position_embeddings": tokens, "dtype": "bfloat16"},
        1,
        tokens,
    )


def _language_model(
    spec: str, settings: dict[str, Any], batch: int, tokens: int
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from benchmarks import make_inputs
    from fxmem.cli.specs import build_model
    from fxmem.cli.specs.inputs import parse_input

    built = build_model(spec, settings)
    return (
        built.module,
        *make_inputs([parse_input(f"{name}:{batch}x{tokens}:int64") for name in ("input_ids", "labels")]),
    )


def llama(name: str) -> Iterator[dict[str, Any]]:
    """Seconds and the whole process's memory for a published model."""
    import torch

    from fxmem.simulation.step.analysis import analyze_step
    from fxmem.simulation.step.request import StepRequest

    torch.set_num_threads(1)
    build, (module, args, kwargs) = timed(
        lambda: _language_model("hf:LlamaForCausalLM", {**LLAMA_3, **LLAMAS[name]}, 1, 2048)
    )
    seconds, done = timed(lambda: analyze_step(module, StepRequest(args=args, kwargs=kwargs, name=name, target="h200")))
    profile, parameters = done.profile, sum(parameter.numel() for parameter in module.parameters())
    figures = {
        "nodes": len(profile.nodes),
        "events": profile.ticks,
        "peak": done.peak.requested_bytes,
        "process": _status("VmHWM"),
    }
    yield {"parameters": parameters, "build": build, "seconds": seconds, **figures}


def imported(before: str, after: str) -> Iterator[dict[str, Any]]:
    """Seconds of an import after another."""
    if before:
        importlib.import_module(before)
    yield {"seconds": timed(lambda: importlib.import_module(after))[0]}


if __name__ == "__main__":
    for row in {"records": records, "analysis": analysis, "llama": llama, "import": imported}[sys.argv[1]](
        *sys.argv[2:]
    ):
        print(json.dumps(row), flush=True)
