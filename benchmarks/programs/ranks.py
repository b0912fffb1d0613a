"""One rank of many with real tensors against its prediction: in a world without peers, and over gloo.

Without peers it is run by torch's own engine in one process. Over gloo all ranks run, each in a process of its own.

    python -m benchmarks.programs.ranks

Writes `benchmarks/results/ranks-DATE-torch-RELEASE.md`. Exit code 1 if one of them is off. A configuration that torch
itself cannot run with real tensors is named, and is no failure.
"""

from __future__ import annotations

import datetime
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem
from benchmarks import RESULTS
from fxmem.errors import AnalysisError
from tests.sharded_models import COMPILED, CONFIGURATIONS
from tests.simulation.ranks import gloo
from tests.simulation.ranks.test_truth import measured_and_predicted

_OVER_GLOO: Final = {
    2: (
        *("fsdp", "fsdp, accumulation", "fsdp, no resharding", "fsdp, selectively checkpointed", "fsdp, checkpointed"),
        *("fsdp, compiled layers", "fsdp, compiled layers, no resharding", "fsdp, compiled checkpoints"),
        *("fsdp1", "fsdp1, no resharding", "fsdp1, checkpointed", "fsdp1, accumulation"),
        *("tp", "tp with sequence parallel", "ddp", "ddp, views", "zero-1", "1f1b", "gpipe"),
        *("main gradients", "ring", "ring, alltoall"),
    ),
    3: ("fsdp, uneven shards, the last rank", "fsdp, uneven, accumulation", "fsdp1, bf16 with fp32 reduction"),
    4: (
        *("fsdp", "fsdp, bf16 with fp32 reduction", "hsdp", "fsdp x tp, checkpointed", "mesh of tp"),
        *("ddp", "zero-1", "1f1b", "gpipe"),
    ),
}
"""By number of ranks, the kinds of `tests/simulation/ranks/programs/spread.py`."""
_REPEATS: Final = 5
_RAISED: Final = "a real step on the CPU raised: "
"""How the error of a step of real tensors begins, which is torch's own."""


def _analyse_rank(world: int) -> float:
    """Seconds of CPU time that rank 0 of a Llama of eight layers takes to analyse."""
    begin = time.process_time()
    tokens = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    fxmem.analyze(
        lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=8)),
        {"input_ids": tokens, "labels": tokens},
        target="h100",
        precision="bf16",
        mesh={"fsdp": world},
        rank=0,
    )
    return time.process_time() - begin


def measure_costs() -> list[str]:
    """What an analysis costs by the world's size."""
    _analyse_rank(2)  # what torch does once
    pairs = [(_analyse_rank(8), _analyse_rank(1024)) for _ in range(_REPEATS)]
    few, many = (min(times) for times in zip(*pairs, strict=True))
    return [
        f"CPU time of rank 0 of 1,024 beside rank 0 of 8 (Llama, 8 layers; least of {_REPEATS}): {many / few:.2f} "
        f"({many:.2f} s, {few:.2f} s).",
    ]


def _name_error(error: AnalysisError) -> str:
    """The error in a line; of torch's own, without the place in its source."""
    ours, raised, theirs = str(error).splitlines()[0].partition(_RAISED)
    where = r' at "[^"]+":\d+, please report a bug to PyTorch'
    return f"torch itself raises {re.sub(where, '', theirs)}" if raised else ours


def main() -> int:
    """Print and write a row for each configuration."""
    warnings.simplefilter("ignore")
    lines = [
        f"One rank of many, real tensors against the prediction, torch {torch.__version__}; requested bytes at peak.",
        "",
        "| configuration | world | rank | measured | predicted | off |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    wrong = 0
    for name, (world, rank, _, _) in (CONFIGURATIONS | COMPILED).items():
        try:
            measured, predicted = measured_and_predicted(name)
        except AnalysisError as error:
            wrong += _RAISED not in str(error)
            lines.append(f"| {name} | {world} | {rank} | {_name_error(error)} | | |")
        else:
            wrong += measured != predicted
            lines.append(f"| {name} | {world} | {rank} | {measured:,} | {predicted:,} | {predicted - measured} |")
        print(lines[-1], flush=True)
    for world, kinds in _OVER_GLOO.items():
        with tempfile.TemporaryDirectory() as folder:
            found = gloo.measure(Path(folder), *((kind, world) for kind in kinds))
        for (kind, _, rank), once in found.items():
            measured, predicted = gloo.compare(kind, world, rank, once)
            off = predicted - measured
            wrong += abs(off) > gloo.NUMBER
            lines.append(f"| {kind}, over gloo | {world} | {rank} | {measured:,} | {predicted:,} | {off} |")
            print(lines[-1], flush=True)
    lines += ["", *measure_costs()]
    print(lines[-1], flush=True)
    release = ".".join(torch.__version__.split(".")[:2])
    path = RESULTS / f"ranks-{datetime.datetime.now(datetime.UTC).date()}-torch-{release}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
