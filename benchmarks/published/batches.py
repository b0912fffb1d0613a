"""Hold the largest batches that timm published for an RTX 3090 against predictions, from both sides.

    python -m benchmarks.published.batches              goes on where it stopped (hours)
    python -m benchmarks.published.batches --every 16   one model of sixteen

timm's benchmark tries batches of 512, 384, 256, 192, ... until one fits 24 GB. So the step of the published batch fits,
and that of the batch tried before does not. Of the program (0.6.6, `benchmark.py --amp`): autocast to float16, cross
entropy in it, SGD with Nesterov momentum, gradients set to zero and kept. Of torch 1.12: optimizers without `foreach`,
no cuBLAS workspace in the allocator.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxmem.hardware import catalogue
from fxmem.hardware.context import room_bytes

from .__main__ import RESULTS
from .prediction import predict_step

PUBLISHED = Path(__file__).parent / "batches.json"
GIB = 1 << 30
CAPACITY_BYTES = round(23.69 * GIB) - 1_687 * 10**6
"""What an RTX 3090 leaves to the allocator: the total that torch reports, less a process as measured with torch
1.8.2+cu111 (pytorch/pytorch#55277: 1,687 MB), whose kernels are loaded at the start as those of torch 1.12+cu113."""
SEQUENCE = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
BEFORE_TORCH_2 = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}


@dataclass(frozen=True)
class Row:
    """A model with its published batch and what is predicted for it and for the batch tried before."""

    model: str
    size: int
    batch: int
    next_batch: int
    allocated_bytes: int | None = None
    """The peak of the published batch."""
    next_reserved_bytes: int | None = None
    """The peak of the segments of the batch that did not fit."""
    refusal: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the published batch is predicted to fit; None without a prediction."""
        return None if self.allocated_bytes is None else self.allocated_bytes <= CAPACITY_BYTES

    @property
    def next_fits(self) -> bool | None:
        """Whether the batch that did not fit is predicted to fit; None without a prediction."""
        return None if self.next_reserved_bytes is None else self.next_reserved_bytes <= CAPACITY_BYTES


def read_published() -> tuple[str, list[Row]]:
    """Read the source and the models whose batch was bounded by memory."""
    table = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = [Row(model, size, batch, SEQUENCE[SEQUENCE.index(batch) - 1]) for model, batch, size in table["rows"]]
    return table["source"], rows


def examine(row: Row) -> Row:
    """Predict both batches of a model."""
    found: dict[str, int] = {}
    for batch, statistic, field in (
        (row.batch, "allocated", "allocated_bytes"),
        (row.next_batch, "reserved", "next_reserved_bytes"),
    ):
        settings = {"model": row.model, "batch": batch, "size": row.size}
        prediction = predict_step("vision.timm_benchmark", "rtx3090", settings, BEFORE_TORCH_2)
        if prediction.refusal:
            return Row(row.model, row.size, row.batch, row.next_batch, refusal=prediction.refusal)
        found[field] = prediction.peaks[statistic]
    return Row(row.model, row.size, row.batch, row.next_batch, **found)


# --- results ----------------------------------------------------------------------------------------------------------


def format_page(source: str, rows: Sequence[Row], date: str) -> str:
    """Write what the rows say, and those that contradict the publication."""
    judged = [row for row in rows if row.fits is not None]
    wrong = [row for row in judged if not row.fits or row.next_fits]
    room = room_bytes(catalogue.target("rtx3090")) or 0
    fit = sum((row.allocated_bytes or 0) <= room for row in judged)
    over = sum((row.next_reserved_bytes or 0) > room for row in judged)
    lines = [
        "# Largest batches of timm's models on an RTX 3090 against predictions",
        "",
        f"Written by `python -m benchmarks.published.batches` on {date}; no GPU was used. Source: {source}.",
        f"The allocator is taken to have {CAPACITY_BYTES / GIB:.2f} GiB of the card.",
        "",
        f"- {len(judged)} models predicted, {len(rows) - len(judged)} refused.",
        f"- The published batch fits: {sum(bool(row.fits) for row in judged)} of {len(judged)}.",
        f"- The batch tried before does not: {sum(not row.next_fits for row in judged)} of {len(judged)}.",
        f"- By fxmem's own room, {room / GIB:.2f} GiB, beside the least context of torch 1.13 and later: {fit} and "
        f"{over}.",
        "",
        "| model | image | batch | predicted, GiB | batch before | predicted, GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(wrong, key=lambda row: row.model):
        peaks = [(nbytes or 0) / GIB for nbytes in (row.allocated_bytes, row.next_reserved_bytes)]
        lines.append(f"| {row.model} | {row.size} | {row.batch} | {peaks[0]:.2f} | {row.next_batch} | {peaks[1]:.2f} |")
    lines += ["", *(f"- {row.model}: {row.refusal}" for row in rows if row.refusal)]
    return "\n".join(lines).rstrip() + "\n"


def _kept(path: Path) -> dict[str, Row]:
    if not path.is_file():
        return {}
    return {row["model"]: Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))}


def _write(stem: Path, source: str, rows: Sequence[Row], date: str) -> None:
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(format_page(source, rows, date), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the models that have no result of the day yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.batches")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one model of N")
    options: Any = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # what model code says to its own users
    source, published = read_published()
    date = datetime.date.today().isoformat()
    stem = RESULTS / f"published-batches-{date}"
    rows = _kept(stem.with_suffix(".json"))
    for row in published[:: options.every]:
        if row.model not in rows:
            rows[row.model] = examine(row)
            print(rows[row.model], flush=True)
            _write(stem, source, list(rows.values()), date)
    return 0


if __name__ == "__main__":
    sys.exit(main())
