"""Hold what Megatron-LM took on eight B200, as others published it, against its own code, run untouched.

    python -m benchmarks.published.megatron CHECKOUT [--path FOLDER] [--only 'NAME*']

CHECKOUT is Megatron-LM at 23e00ed0. Beside fxmem's own dependencies it imports TransformerEngine and a few others, for
which FOLDER is put on the path: `pip install --target FOLDER --no-deps transformer-engine==2.11.0 onnx onnxscript
onnx_ir ml_dtypes nvdlfw_inspect six einops pybind11`. TransformerEngine's kernels are not needed. Megatron compiles its
data helper itself where there is a C++ compiler.

Rows and flags are in `megatron.toml`. Each rank that may be the largest is analysed in a process of its own. Writes
`benchmarks/results/megatron-DATE.md`; rows that ran before on the same day stay unless they are run again. Exit code 1
if a row is off by more than 0.5 %.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import RESULTS
from fxmem.memory.report_reader import load_report

ROWS: Final = Path(__file__).with_name("megatron.toml")
ROOT: Final = Path(__file__).parents[2]
MOST_OFF: Final = 0.005
_DIMENSIONS: Final = ("tensor", "pipeline", "context", "expert")


def make_flags(table: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """The arguments of `pretrain_gpt.py` for a row."""
    sizes = {each: row["parallel"].get(each, 1) for each in _DIMENSIONS}
    replicas = row.get("ranks", table["ranks"]) // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    tokens = str(row.get("tokens", 4096))
    flags = [*table["models"][row["model"]].split(), *table["flags"].split()]
    flags += ["--seq-length", tokens, "--max-position-embeddings", tokens]
    flags += ["--global-batch-size", str(row.get("micro_batches", 4) * replicas)]
    for name in ("tensor", "pipeline"):
        flags += [f"--{name}-model-parallel-size", str(sizes[name])]
    if sizes["context"] > 1:
        flags += ["--context-parallel-size", str(sizes["context"]), "--cp-comm-type", "a2a"]
    if row["model"] == "deepseek-v2":
        flags += ["--expert-model-parallel-size", str(sizes["expert"]), "--moe-router-num-groups", str(sizes["expert"])]
    return flags


def analyse(table: dict[str, Any], row: dict[str, Any], rank: int, checkout: Path, path: str) -> int:
    """Bytes that a rank allocates at its peak."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rank.json"
        options = ["--target", table["target"], "--ranks", str(row.get("ranks", table["ranks"])), "--rank", str(rank)]
        options += ["--steps", "2", "--compile", "as-is", "--json", str(report)]
        command = [sys.executable, "-m", "fxmem", "run", *options, "pretrain_gpt.py", *make_flags(table, row)]
        paths = [str(ROOT), str(checkout), *filter(None, [path, os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise SystemExit(f"{row['name']}, rank {rank}: {done.stdout[-500:]}\n{done.stderr[-2000:]}")
        return load_report(report).peak.allocated_bytes or 0


def main() -> None:
    """Analyse the rows, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="Megatron-LM at 23e00ed0")
    parser.add_argument("--path", default="", help="folder with TransformerEngine 2.11.0")
    parser.add_argument("--only", default="*", help="pattern of the rows' names")
    given = parser.parse_args()
    table = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    file = RESULTS / f"megatron-{datetime.date.today():%Y-%m-%d}.md"
    before = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in before if line.startswith("| ")}
    worst = 0.0
    for row in table["rows"]:
        if not fnmatch.fnmatch(row["name"], given.only):
            continue
        began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        found = {rank: analyse(table, row, rank, given.checkout.resolve(), given.path) for rank in row["analysed"]}
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        rank = max(found, key=lambda each: found[each])
        predicted, published = found[rank] / (1 << 30), row.get("allocated_gib")
        error = 0.0 if published is None else predicted / published - 1
        worst = max(worst, abs(error))
        beside = ("", "") if published is None else (f"{published:.2f}", f"{error:+.2%}")
        seconds = round((spent.ru_utime - began) / len(found))
        cells = (
            row["name"],
            beside[0],
            f"{predicted:.2f}",
            beside[1],
            str(rank),
            f"{seconds} s, {spent.ru_maxrss >> 10} MiB",
        )
        lines[row["name"]] = f"| {' | '.join(cells)} |"
        print(lines[row["name"]], flush=True)
    head = [
        "# Megatron-LM on eight B200, as published and as its own code is analysed",
        "",
        "`pretrain_gpt.py` of Megatron-LM 23e00ed0 with the Python of TransformerEngine 2.11.0, untouched, under",
        f"`fxmem run`, torch {torch.__version__}. Published by MooreThreads/SimuMax, of torch 2.10.0a0: the largest",
        "`max_memory_allocated` of all ranks, GiB. Rank: the largest of those that were analysed. Costs: processor",
        "time for each of them, and the most memory that one of them or of those before it took.",
        "",
        "| Case | Published | Predicted | Error | Rank | Costs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    wanted = [lines[row["name"]] for row in table["rows"] if row["name"] in lines]
    file.write_text("\n".join([*head, *wanted, ""]), encoding="utf-8")
    sys.exit(worst > MOST_OFF)


if __name__ == "__main__":
    main()
