"""`fxmem kv-cache` beside what engines logged at their start: `python -m benchmarks.published.serving`.

The logs are in benchmarks/published/serving.json. The table goes to benchmarks/results/serving-DATE.md.
"""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import fxmem
from benchmarks import RESULTS
from fxmem.cli.specs import build_model
from fxmem.hardware import catalogue
from fxmem.records.fits import ServeSize

FOLDER = Path(__file__).parent
GIB = 1 << 30
ASKED = ("engine", "utilization", "max_batched_tokens", "max_seqs", "mesh", "kv_dtype", "quantization")


def build(case: dict[str, Any]) -> Any:
    """The model of a start on meta, in the dtype that it has there."""
    return build_model(case["model"], case["settings"], mode="infer", weights_dtype=case.get("weights_dtype"))


def predict(case: dict[str, Any]) -> ServeSize:
    """What `fxmem.kv_cache` says of a start."""
    card = catalogue.target(case["card"]).model_copy(update={"memory_bytes": int(case["memory"] * GIB)})
    asked = {name: case[name] for name in ASKED if name in case}
    built = build(case)
    if built.packed is not None:
        asked.setdefault("quantization", built.packed.config)
    return fxmem.kv_cache(built.module, target=card, name=case["name"], **asked)


def read(found: ServeSize) -> dict[str, tuple[float, float]]:
    """The least and the most that is predicted of each term, in GiB or tokens."""
    graphs = found.graphs_low_bytes, found.graphs_high_bytes
    return {
        "weights": (found.weights_bytes / GIB, found.weights_bytes / GIB),
        "peak": (found.profile_peak_bytes / GIB, found.profile_peak_bytes / GIB),
        "kv": (found.kv_low_bytes / GIB, found.kv_high_bytes / GIB),
        "tokens": (found.low_tokens, found.high_tokens),
        **({} if graphs[0] is None or graphs[1] is None else {"graphs": (graphs[0] / GIB, graphs[1] / GIB)}),
    }


def off(logged: float, bounds: tuple[float, float]) -> float:
    """How far the middle of a prediction is from what was logged, of that."""
    return sum(bounds) / 2 / logged - 1


def main() -> None:
    """Write the table."""
    cases = json.loads((FOLDER / "serving.json").read_text())["starts"]
    rows, errors = [], defaultdict(list)
    for case in cases:
        cells, bounds = [], read(predict(case))
        for name, digits in (("weights", ".2f"), ("peak", ".2f"), ("graphs", ".2f"), ("kv", ".2f"), ("tokens", ",.0f")):
            logged, (low, high) = case.get(name), bounds.get(name, (0, 0))
            if logged is None or name not in bounds:
                cells.append("" if logged is None else f"{logged:{digits}} / not known")
                continue
            said = (
                f"{low:{digits}}" if f"{low:{digits}}" == f"{high:{digits}}" else f"{low:{digits}} to {high:{digits}}"
            )
            cells.append(f"{logged:{digits}} / {said} ({100 * off(logged, (low, high)):+.1f})")
            if case["engine"] != "vllm@0.6":
                errors[name].append(abs(off(logged, (low, high))))
        rows.append(f"| {case['name']} | {' | '.join(cells)} |")
    lines = [
        "# `kv-cache` beside engines' logs",
        "",
        "GiB and tokens; logged / predicted (how far its middle is off, in %). Written by",
        "`python -m benchmarks.published.serving`; sources in `benchmarks/published/serving.json`.",
        "",
        "| start | weights | profile run | CUDA graphs | keys and values | tokens |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        "From 0.11 on, in %: "
        + "; ".join(
            f"{name} median {100 * median(each):.2f}, worst {100 * max(each):.1f}, of {len(each)}"
            for name, each in errors.items()
        )
        + ".",
    ]
    path = RESULTS / f"serving-{date.today()}.md"
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
