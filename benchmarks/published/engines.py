"""An engine that sleeps beside what vLLM logged: `python -m benchmarks.published.engines`.

The logs are the sleeps of benchmarks/published/serving.json. The table goes to benchmarks/results/engines-DATE.md.
"""

from __future__ import annotations

import json
import tempfile
from datetime import date
from typing import Any

import torch

import fxmem
from benchmarks import RESULTS
from benchmarks.published.serving import FOLDER, GIB, build
from fxmem.hardware import catalogue
from fxmem.simulation.engines.releases import find_engine
from fxmem.simulation.stand_ins import vllm

NAMES = ("weights", "kv", "freed", "asleep")


def predict(case: dict[str, Any]) -> dict[str, float]:
    """GiB of an engine alone on its card: what it has, what its sleep frees, and what is in use then."""
    card = catalogue.target(case["card"]).model_copy(update={"memory_bytes": int(case["memory"] * GIB)})
    settings = {name: case[name] for name in ("max_batched_tokens", "max_seqs", "max_model_len")}
    settings["max_num_batched_tokens"] = settings.pop("max_batched_tokens")
    settings["max_num_seqs"] = settings.pop("max_seqs")
    vllm._ENGINE = find_engine(case["engine"])
    config = build({**case, "settings": {}}).module.config
    with tempfile.TemporaryDirectory() as folder, fxmem.record(card) as run:
        config.save_pretrained(folder)
        from vllm import LLM

        llm = LLM(folder, gpu_memory_utilization=case["utilization"], enable_sleep_mode=True, **settings)
        free, total = torch.cuda.mem_get_info()
        llm.sleep(level=1)
        after, _ = torch.cuda.mem_get_info()
    (engine,) = run.program.engines
    sizes = (engine.weights_bytes, engine.kv_bytes, after - free, total - after)
    return {name: nbytes / GIB for name, nbytes in zip(NAMES, sizes, strict=True)}


def row(case: dict[str, Any]) -> str:
    """A line of the table."""
    found = predict(case)
    return f"| {case['name']} | " + " | ".join(f"{case[name]:.2f} / {found[name]:.2f}" for name in NAMES) + " |"


def main() -> None:
    """Write the table."""
    cases = json.loads((FOLDER / "serving.json").read_text())["sleeps"]
    lines = [
        "# An engine that sleeps beside vLLM's logs",
        "",
        "GiB; logged / predicted. Of what is in use asleep, the CUDA context alone is predicted. Written by",
        "`python -m benchmarks.published.engines`; sources in `benchmarks/published/serving.json`.",
        "",
        "| engine | weights | keys and values | freed by sleep | in use asleep |",
        "|---|---:|---:|---:|---:|",
        *map(row, cases),
    ]
    path = RESULTS / f"engines-{date.today()}.md"
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
