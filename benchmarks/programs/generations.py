"""Generations of transformers, predicted and run for real on the CPU: `make generations`.

Two sections: ways to generate (caches, beams, sampling, encoder-decoders, images, state-space models), and the default
`generate` of every decoder family of `generation_cases.FAMILIES`. Each is analysed whole for the CPU and held to the
profiler's log of a real generation, kernels' scratch set aside; a family is also given to `fxmem.generate` for an H100.

    python -m benchmarks.programs.generations [--only NAME ...] [--rows FILE]

Each row is a line of the file of rows, by default one of today in the folder for temporary files: started again, it
goes on where it stopped. The summary is benchmarks/results/generations-DATE.md; exit code 1 if a row is off.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import RESULTS
from benchmarks.programs.generation_cases import FAMILIES, WAYS, Generate, family, tokens
from fxmem.errors import FxmemError
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.generation import generate
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu

_WITHIN = 1e-4
_NEW = 12


def compare(make: Callable[[], nn.Module], inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Peak bytes of a generation on the CPU: predicted, and measured without scratch of kernels."""
    torch.manual_seed(0)
    request = StepRequest(kwargs=inputs, mode="infer", target="cpu")
    predicted = analyze_step(make(), request).peak.requested_bytes
    torch.manual_seed(0)
    return predicted, measure_cpu(make(), request, steps=2).peak_without_scratch_bytes


def way_row(name: str) -> dict[str, Any]:
    """A way to generate, as a row."""
    make, inputs = WAYS[name]
    predicted, measured = compare(make, inputs())
    return {"predicted": predicted, "measured": measured}


def family_row(name: str) -> dict[str, Any]:
    """The default generation of a family, as a row."""
    ids = tokens(2, 20)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    run = generate(lambda: family(name), call, _NEW).run
    predicted, measured = compare(lambda: Generate(family(name), max_new_tokens=_NEW), call)
    return {
        "recorded": run.recorded_tokens,
        "growth": run.growth_bytes,
        "predicted": predicted,
        "measured": measured,
    }


def _examine(section: str, name: str) -> dict[str, Any]:
    begin = time.process_time()
    row: dict[str, Any] = {"section": section, "name": name}
    try:
        row |= (way_row if section == "ways" else family_row)(name)
    except FxmemError as error:
        row["refused"] = f"{type(error).__name__}: {error}"
    return {**row, "seconds": round(time.process_time() - begin, 1)}


def _is_right(row: dict[str, Any]) -> bool:
    return "refused" not in row and abs(row["predicted"] - row["measured"]) <= _WITHIN * row["measured"]


def _cells(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"| {row['name']} | | | {row['refused']} |" + (" |" if row["section"] == "families" else "")
    off = row["predicted"] - row["measured"]
    said = f"{off:+,}" if off else "0"
    cells = [row["name"], f"{row['predicted']:,}", f"{row['measured']:,}", said]
    if row["section"] == "families":
        cells.append("all" if row["growth"] is None else f"{row['recorded']}, {row['growth']:,} bytes a token")
    return f"| {' | '.join(cells)} |"


def _summary(rows: list[dict[str, Any]], section: str) -> Iterator[str]:
    mine = [row for row in rows if row["section"] == section]
    exact = sum("refused" not in row and row["predicted"] == row["measured"] for row in mine)
    yield f"**{exact} of {len(mine)} to the byte, {sum(map(_is_right, mine))} within {_WITHIN:.2%}.**"
    yield ""
    last, bar = (" tokens recorded, growth |", "---|") if section == "families" else ("", "")
    yield f"| generation | predicted | measured | off |{last}"
    yield f"|---|---:|---:|---:|{bar}"
    yield from map(_cells, mine)


def write(rows: list[dict[str, Any]]) -> None:
    """Write the table of all rows."""
    date = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"# Generations on the CPU, predicted and real, {date}",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, one thread, float32; peaks in requested",
        "bytes, scratch of single kernels set aside. Command: `make generations`.",
        "",
        "## Ways to generate",
        "",
        *_summary(rows, "ways"),
        "",
        "## Decoder families",
        "",
        f"The default `generate` of a tiny model of each family, batch 2, 20 + {_NEW} tokens. The last column is what",
        "`fxmem.generate` says of it for an H100.",
        "",
        *_summary(rows, "families"),
    ]
    (RESULTS / f"generations-{date}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Examine what has no row yet; write the table when all have one."""
    date = datetime.datetime.now(datetime.UTC).date()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--rows", type=Path, default=Path(tempfile.gettempdir()) / f"generations-{date}.jsonl")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    done = {(row["section"], row["name"]): row for row in known if row["name"] not in options.only}
    wanted = [*(("ways", name) for name in WAYS), *(("families", name) for name in FAMILIES)]
    chosen = [key for key in wanted if not options.only or key[1] in options.only]
    with options.rows.open("a", encoding="utf-8") as file:
        for key in chosen:
            if key not in done:
                done[key] = _examine(*key)
                print(_cells(done[key]), f"{done[key]['seconds']} s", flush=True)
                file.write(json.dumps(done[key]) + "\n")
                file.flush()
    rows = [done[key] for key in wanted if key in done]
    if len(rows) == len(wanted):
        write(rows)
    return 0 if all(_is_right(done[key]) for key in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
