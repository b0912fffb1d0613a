"""`fxmem kv-cache` beside what vLLM logged at its start: `python -m benchmarks.published.serving`.

The logs are in benchmarks/published/serving.json. The table goes to benchmarks/results/serving-DATE.md.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import fxmem
from benchmarks import RESULTS
from fxmem.cli.specs import build_model
from fxmem.hardware import catalogue

FOLDER = Path(__file__).parent
GIB = 1 << 30


def build(case: dict[str, Any]) -> Any:
    """The model of a start, in bfloat16 on meta."""
    return build_model(case["model"], case["settings"], mode="infer", weights_dtype="bf16").module


def predict(case: dict[str, Any]) -> Any:
    """What `fxmem.kv_cache` says of a start."""
    card = catalogue.target(case["card"]).model_copy(update={"memory_bytes": int(case["memory"] * GIB)})
    asked = {name: case[name] for name in ("utilization", "max_batched_tokens", "max_seqs")}
    return fxmem.kv_cache(build(case), target=card, eager=True, **asked)


def row(case: dict[str, Any]) -> str:
    """A line of the table."""
    found = predict(case)
    weights, peak = found.weights_bytes / GIB, found.profile_peak_bytes / GIB
    known = "" if case["other"] is None else f"{case['other']:.2f}"
    if case["kv"] is None:
        left = "| | "
    else:
        predicted = found.kv_high_bytes / GIB + found.uncounted[0].low_bytes / GIB - case["other"]
        left = f"| {case['kv']:.2f} | {predicted:.2f}"
    return (
        f"| {case['name']} | {case['weights']:.2f} | {weights:.2f} | {case['peak']:.2f} | {peak:.2f} | "
        f"{peak - case['peak']:+.2f} | {known} {left} |"
    )


def main() -> None:
    """Write the table."""
    cases = json.loads((FOLDER / "serving.json").read_text())["starts"]
    lines = [
        "# `kv-cache` beside vLLM's logs",
        "",
        "GiB; logged, then predicted. The last column takes the logged memory outside torch for the one term that is",
        "not known before. Written by `python -m benchmarks.published.serving`; sources in "
        "`benchmarks/published/serving.json`.",
        "",
        "| start | weights | predicted | peak of the profile run | predicted | off | outside torch | left for keys and "
        "values | predicted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *map(row, cases),
    ]
    path = RESULTS / f"serving-{date.today()}.md"
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
