"""One rank of many with real tensors, run by torch's own engine in a world without peers, against its prediction.

    python -m benchmarks.ranks

Writes `benchmarks/results/ranks-DATE.md`. Exit code 1 if one of them is off.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path

import torch

from tests.sharded_models import CONFIGURATIONS
from tests.simulation.ranks.test_truth import measured_and_predicted

_RESULTS = Path(__file__).parent / "results"


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
    for name, (world, rank, _, _) in CONFIGURATIONS.items():
        measured, predicted = measured_and_predicted(name)
        wrong += measured != predicted
        lines.append(f"| {name} | {world} | {rank} | {measured:,} | {predicted:,} | {predicted - measured} |")
        print(lines[-1], flush=True)
    path = _RESULTS / f"ranks-{datetime.datetime.now(datetime.UTC).date()}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
