"""Hundreds of analyses in one process: its memory has to stay flat.

    python -m benchmarks.speed.leaks                 (`make leaks`)
    python -m benchmarks.speed.leaks --analyses 60   shorter

Three small models in turn (a CNN, an attention block, one with checkpoints), for a card and for the CPU, each analysed,
its report written as JSON and forgotten. After the first fifth, in which caches fill, resident memory and objects known
to the garbage collector are taken ten times at equal distances, after a collection; a straight line is fitted by least
squares. It fails (exit code 1) when the line grows by more than 5 % of the memory, or of the objects, over the run.
Writes `benchmarks/results/leaks-DATE.md`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmem
from benchmarks import RESULTS

ALLOWED = 0.05


class Attention(nn.Module):
    """One block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One head, of 64."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Checkpointed(nn.Module):
    """Two layers, the first of which runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first layer's region is recomputed."""
        return self.second(checkpoint(lambda y: torch.relu(self.first(y)), x, use_reentrant=False))


def cnn() -> nn.Module:
    """Convolution, normalisation, pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )


CASES = (
    (cnn, (4, 3, 32, 32), "h100", "bf16"),
    (Attention, (2, 16, 64), "h100", None),
    (Checkpointed, (8, 64), "cpu", None),
)


def resident_bytes() -> int:
    """Memory of this process, by Linux's `/proc`."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run, print, write and judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--analyses", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    if not Path("/proc/self/statm").exists():
        sys.exit("expected Linux, whose /proc says what a process holds")
    warm, taken = options.analyses // 5, []
    every = max((options.analyses - warm) // 10, 1)
    for index in range(options.analyses):
        make, shape, target, precision = CASES[index % len(CASES)]
        fxmem.analyze(make(), torch.zeros(shape), target=target, precision=precision).to_json()
        if index >= warm and (index - warm) % every == every - 1:
            gc.collect()
            taken.append((index + 1, resident_bytes(), len(gc.get_objects())))
            print(f"{taken[-1][0]:5} analyses  {taken[-1][1] / 2**20:8.1f} MiB  {taken[-1][2]:,} objects", flush=True)
    lines = [
        f"# {options.analyses} analyses in one process",
        "",
        f"torch {torch.__version__}, fxmem {fxmem.__version__}.",
        "",
    ]
    lines += [
        "| analyses | resident MiB | objects |",
        "| ---: | ---: | ---: |",
        *(f"| {count} | {rss / 2**20:.1f} | {objects:,} |" for count, rss, objects in taken),
        "",
    ]
    worst = 0.0
    for what, column in (("resident memory", 1), ("objects", 2)):
        slope = statistics.linear_regression([row[0] for row in taken], [row[column] for row in taken]).slope
        growth = slope * (taken[-1][0] - taken[0][0]) / statistics.mean(row[column] for row in taken)
        worst = max(worst, growth)
        lines.append(
            f"Growth of {what} over the run: {100 * growth:+.2f} % (fitted line; fails above {100 * ALLOWED:.0f} %)."
        )
    text = "\n".join(lines) + "\n"
    (options.out / f"leaks-{datetime.date.today()}.md").write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if worst > ALLOWED else 0)


if __name__ == "__main__":
    main()
