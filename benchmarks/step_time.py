"""Fit the shares of a card's rates that steps reach, and judge estimated step times on models that were not fitted.

    python benchmarks/step_time.py     (`make step-time`; a minute)
    python benchmarks/step_time.py --collect DIR --seconds 600     analyse more steps of the tables in DIR first

Measured are the tables of timm (huggingface/pytorch-image-models at aa4b585, `results/benchmark-*.csv`, Apache-2.0):
step times of image models under autocast (float16), channels first, with `cudnn.benchmark` and TF32 allowed; training
is forward, loss, backward and SGD. `step_times.json.xz` keeps of them what was analysed: by step what its operators
compute and move, and the measured seconds by table. Models are taken in the order of a hash of their names, whoever
they are; half of them, by another bit of the hash, are fitted, and the error is that of the other half.

Tables do not say whether timm's fast norms (in half precision) were on. The fitted half of each table is compared with
both, and the nearer is taken: on for all but the RTX 5090's. The convolutions of models that can be are fused with what
follows (`--reparam`).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import lzma
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fxmem.hardware.cards import CATALOGUE, Rates

HERE = Path(__file__).parent
DATA = HERE / "step_times.json.xz"
PRO = Rates(fp32=110e12, tf32=220e12, half=439e12, bandwidth=1792e9)
"""NVIDIA RTX PRO 6000 Blackwell Max-Q datasheet; no card of the catalogue."""


class Table:
    """A table of measured steps."""

    def __init__(self, name: str, card: str, kind: str, file: str) -> None:
        self.name, self.card, self.kind, self.file = name, card, kind, file
        self.rates = CATALOGUE[card].rates if card in CATALOGUE else PRO

    def read(self, folder: Path) -> Iterator[tuple[str, int, int, float]]:
        """Model, image size, batch and seconds of each row."""
        for row in csv.DictReader((folder / self.file).read_text().splitlines()):
            get = {key.partition("_")[2]: value for key, value in row.items()}
            yield row["model"], int(get["img_size"]), int(get["batch_size"]), float(get["step_time"]) / 1e3


TABLES = (
    Table("RTX 4090, inference, torch 2.9.1", "rtx4090", "fast", "benchmark-infer-amp-nchw-pt291-cu128-4090.csv"),
    Table("RTX 5090, inference, torch 2.9.1", "rtx5090", "infer", "benchmark-infer-amp-nchw-pt291-cu130-5090.csv"),
    Table("RTX 3090, inference, torch 2.4", "rtx3090", "fast", "benchmark-infer-amp-nchw-pt240-cu124-rtx3090.csv"),
    Table("RTX PRO 6000 Max-Q, inference", "pro6000", "fast", "benchmark-infer-amp-nchw-pt291-cu130-pro6000maxq.csv"),
    Table("RTX 3090, training, torch 1.12", "rtx3090", "train", "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"),
)
KEYS = ("products", "convolutions", "bandwidth", "convolution_bandwidth", "launch_seconds")
START = np.log([0.9, 0.7, 0.85, 0.55, 2e-6])


def in_half(model: str) -> bool:
    """Whether a model is fitted; the others are held out."""
    return hashlib.sha256(model.encode()).digest()[0] % 2 == 0


# --- what a step computes and moves -----------------------------------------------------------------------------------


def analyse(kind: str, model: str, size: int, batch: int) -> list[list[int]]:
    """Rows of is convolution, is half, FLOPs, bytes moved, and how many operators are alike."""
    import timm
    import torch

    import fxmem
    from fxmem.hardware.step_time import is_half

    torch.backends.cuda.matmul.allow_tf32 = True
    timm.layers.set_fast_norm(kind == "fast")
    timm.layers.set_fused_attn(kind != "train")  # attention was written out in 2022

    def loss(out: Any) -> torch.Tensor:
        out = out[0] if isinstance(out, tuple) else out
        return torch.nn.functional.cross_entropy(out, torch.zeros(batch, dtype=torch.long, device=out.device))

    with torch.device("meta"):
        try:
            built = timm.create_model(model, img_size=size)
        except TypeError:
            built = timm.create_model(model)
    options: dict[str, Any] = {"mode": "infer", "inference_mode": True, "target": "rtx4090"}
    if kind == "train":
        optimizer = {"optimizer": "sgd:momentum=0.9,nesterov,forloop", "zero_grad": "before-backward"}
        options = {"loss": loss, **optimizer, "set_to_none": False, "target": "rtx3090"}
    else:
        built = timm.utils.reparameterize_model(built.eval())
    found = fxmem.analyze(built, torch.empty(batch, 3, size, size, device="meta"), precision="fp16", **options)
    profile = found.profile
    rows = Counter(
        (int("convolution" in op.name), int(is_half(profile, op)), op.flops or 0, op.moved_bytes or 0)
        for op in profile.ops
    )
    return sorted([*row, count] for row, count in rows.items())


def collect(folder: Path, seconds: float, kinds: Sequence[str]) -> None:
    """Analyse steps of the tables that are not in the data yet."""
    import timm

    data, known, end = load(), set(timm.list_models()), time.monotonic() + seconds
    done = {(step["kind"], step["model"], step["size"]) for step in data["steps"]}
    wanted: dict[tuple[str, str, int], dict[str, Any]] = {}
    for table in TABLES:
        for model, size, batch, taken in table.read(folder):
            step = wanted.setdefault((table.kind, model, size), {"batch": batch, "measured": {}})
            step["measured"].setdefault(table.name, taken * step["batch"] / batch)
    order = sorted(wanted, key=lambda key: hashlib.sha256(f"{key[1]} {key[2]}".encode()).hexdigest())
    for key in order:
        if time.monotonic() > end:
            break
        kind, model, size = key
        if key in done or kind not in kinds or model not in known:
            continue
        try:
            work = analyse(kind, model, size, wanted[key]["batch"])
        except Exception as error:
            print(f"{model} {size} {kind}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        data["steps"].append({"kind": kind, "model": model, "size": size, **wanted[key], "work": work})
    save(data)


def load() -> Any:
    """The data."""
    return json.loads(lzma.decompress(DATA.read_bytes())) if DATA.exists() else {"steps": []}


def save(data: Any) -> None:
    """Write the data, the same bytes for the same steps."""
    DATA.write_bytes(lzma.compress(json.dumps(data, separators=(",", ":")).encode()))


# --- fit and judge ----------------------------------------------------------------------------------------------------


class Steps:
    """The steps of one table, as arrays."""

    def __init__(self, table: Table, steps: list[Any]) -> None:
        self.table = table
        self.steps = [each for each in steps if each["kind"] == table.kind and table.name in each["measured"]]
        self.measured = np.array([each["measured"][table.name] for each in self.steps])
        self.fitted = np.array([in_half(each["model"]) for each in self.steps], dtype=bool)
        rows = [(index, *row) for index, each in enumerate(self.steps) for row in each["work"]]
        self.index, convolution, half, self.flops, self.moved, self.count = np.array(rows, dtype=np.float64).T
        self.index, self.convolution = self.index.astype(int), convolution > 0
        assert table.rates is not None
        rates = table.rates
        self.rate = np.where(half > 0, rates.half, np.where(self.convolution, rates.tf32, rates.fp32))
        self.bandwidth = rates.bandwidth

    def estimate(self, logs: np.ndarray) -> np.ndarray:
        """Seconds, as `fxmem.hardware.step_time` adds them up."""
        products, convolutions, bandwidth, convolution_bandwidth, launch = np.exp(logs)
        arithmetic = self.flops / (self.rate * np.where(self.convolution, convolutions, products))
        reached = np.where(self.convolution, convolution_bandwidth, bandwidth) * self.bandwidth
        each = np.maximum(arithmetic, self.moved / reached) + launch * ((self.flops > 0) | (self.moved > 0))
        return np.bincount(self.index, each * self.count, len(self.steps))


def fit(parts: Sequence[Steps]) -> np.ndarray:
    """The logarithms of the numbers that fit the fitted halves best: least mean error, nearly."""
    from scipy.optimize import minimize

    def cost(logs: np.ndarray) -> float:
        off = np.concatenate([np.log(part.estimate(logs) / part.measured)[part.fitted] for part in parts])
        return float(np.mean(np.sqrt(off**2 + 1e-3)) + 0.003 * np.sum((logs - START) ** 2))

    return np.asarray(minimize(cost, START, method="L-BFGS-B", options={"maxiter": 200}).x)


def row(name: str, part: Steps, logs: np.ndarray, held: np.ndarray) -> tuple[str, np.ndarray]:
    """A line of the table of results, and measured over estimated time."""
    ratio = part.measured[held] / part.estimate(logs)[held]
    off = np.abs(1 / ratio - 1) * 100
    worst = int(np.argmax(off))
    model = [step["model"] for step, is_held in zip(part.steps, held, strict=True) if is_held][worst]
    low, high = np.percentile(ratio, (10, 90))
    return (
        f"| {name} | {len(off)} | {off.mean():.1f} % | {np.median(off):.1f} % | {100 * np.mean(off <= 30):.0f} % | "
        f"{off[worst]:.0f} % ({model}) | {low:.2f} to {high:.2f} |"
    ), ratio


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="DIR", help="analyse more steps of the tables in DIR")
    parser.add_argument("--seconds", type=float, default=600, help="how long to analyse (600)")
    parser.add_argument("--kinds", nargs="+", default=["fast", "infer", "train"], help="which steps to analyse")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect, options.seconds, options.kinds)
    steps = load()["steps"]
    parts = [Steps(table, steps) for table in TABLES if any(table.name in step["measured"] for step in steps)]
    head = "| | steps held out | mean error | median | within 30 % | worst | measured / estimated, p10 to p90 |"
    lines, shares = [head, "|---" * 7 + "|"], []
    for part in parts:
        logs = fit([part])
        lines.append(row(part.table.name, part, logs, ~part.fitted)[0])
        shares.append(
            f"- {part.table.name}: " + ", ".join(f"{k} {v:.3g}" for k, v in zip(KEYS, np.exp(logs), strict=True))
        )
    lines += ["", "Fitted on all tables of other cards, judged on the whole of this one:", "", *lines[:2]]
    for part in parts:
        logs = fit([other for other in parts if other.table.card != part.table.card])
        lines.append(row(part.table.name, part, logs, np.ones(len(part.steps), dtype=bool))[0])
    together = fit(parts)
    shares.append("- all: " + ", ".join(f"{k} {v:.3g}" for k, v in zip(KEYS, np.exp(together), strict=True)))
    text = "\n".join([*lines, "", *shares]) + "\n"
    print(text)
    (HERE / "results" / f"step-time-{datetime.date.today().isoformat()}.md").write_text(text)


if __name__ == "__main__":
    main()
