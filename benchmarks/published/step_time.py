"""Fit the shares of a card's rates that steps reach, and judge estimated step times on models that were not fitted.

    python -m benchmarks.published.step_time     (`make step-time`; a minute)
    python -m benchmarks.published.step_time --collect DIR --seconds 600     more steps of the tables in DIR first

Measured are the tables of timm (huggingface/pytorch-image-models at aa4b585, `results/benchmark-*.csv`, Apache-2.0):
step times of image models under autocast (float16), channels first, with `cudnn.benchmark` and TF32 allowed; training
is forward, loss, backward and SGD. `step_times.json.xz` keeps of them what was analysed: by step what its operators
compute and move, and the measured seconds by table. Models are taken in the order of a hash of their names, whoever
they are; half of them, by another bit of the hash, are fitted, and the error is that of the other half.

Tables do not say whether timm's fast norms (in half precision) were on. The fitted half of each table is compared with
both, and the nearer is taken: on for all but the RTX 5090's. The convolutions of models that can be are fused with what
follows (`--reparam`).

An H100 was measured for this (`H100`: torch 2.11 and timm 1.0.31 as they are, channels first, single steps, the card
idle before and after). Its batches of 1 are bound by Python, and say what issuing an operator takes there. On the other
machines that is bounded by the quickest steps of their tables.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import itertools
import json
import lzma
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from fxmem.hardware.catalogue import CATALOGUE, Rates

HERE = Path(__file__).parent
DATA = HERE / "step_times.json.xz"
H100 = "step-times-h100.json"
PRO = Rates(fp32=110e12, tf32=220e12, half=439e12, bandwidth=1792e9)
"""Of the NVIDIA RTX PRO 6000 Blackwell Max-Q, no card of the catalogue: 110 TFLOP/s in float32, 1,792 GB/s, 3,511
sparse TOPS in FP4, of which half precision is an eighth and TF32 a sixteenth."""


class Table:
    """A table of measured steps."""

    def __init__(self, name: str, card: str, kind: str, file: str) -> None:
        self.name, self.card, self.kind, self.file = name, card, kind, file
        self.rates = CATALOGUE[card].rates if card in CATALOGUE else PRO
        self.mode = "train" if "train" in kind else "infer"

    def read(self, folder: Path) -> Iterator[tuple[str, int, int, float]]:
        """Model, image size, batch and seconds of each row."""
        if self.file == H100:
            for row in json.loads((folder / self.file).read_text())["rows"]:
                if not row["channels_last"]:
                    taken = statistics.median(row[f"{self.kind}_ms"]) / 1e3
                    yield row["model"], row["size"], int(self.kind.partition("_b")[2]), taken
            return
        for row in csv.DictReader((folder / self.file).read_text().splitlines()):
            get = {key.partition("_")[2]: value for key, value in row.items()}
            yield row["model"], int(get["img_size"]), int(get["batch_size"]), float(get["step_time"]) / 1e3


TABLES = (
    Table("RTX 4090, inference, torch 2.9.1", "rtx4090", "fast", "benchmark-infer-amp-nchw-pt291-cu128-4090.csv"),
    Table("RTX 5090, inference, torch 2.9.1", "rtx5090", "infer", "benchmark-infer-amp-nchw-pt291-cu130-5090.csv"),
    Table("RTX 3090, inference, torch 2.4", "rtx3090", "fast", "benchmark-infer-amp-nchw-pt240-cu124-rtx3090.csv"),
    Table("RTX PRO 6000 Max-Q, inference", "maxq", "fast", "benchmark-infer-amp-nchw-pt291-cu130-pro6000maxq.csv"),
    Table("RTX 3090, training, torch 1.12", "rtx3090", "train", "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"),
    Table("H100, inference of 128, torch 2.11", "h100", "infer_b128", H100),
    Table("H100, inference of 1, torch 2.11", "h100", "infer_b1", H100),
    Table("H100, training of 64, torch 2.11", "h100", "train_b64", H100),
)
KEYS = ("products", "convolutions", "bandwidth", "convolution_bandwidth", "launch_seconds", "issue_seconds")
START = np.log([0.9, 0.7, 0.85, 0.55, 2e-6, 2e-5])


def in_half(model: str) -> bool:
    """Whether a model is fitted; the others are held out."""
    return hashlib.sha256(model.encode()).digest()[0] % 2 == 0


# --- what a step computes and moves -----------------------------------------------------------------------------------


def analyse(kind: str, model: str, size: int, batch: int) -> list[list[int]]:
    """Rows of is convolution, is half, FLOPs, bytes moved, and how many alike follow each other; the published tables'
    steps, which no host bounds, have theirs added up, the largest first."""
    import timm
    import torch

    import fxmem
    from fxmem.hardware.step_time import list_dtypes

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
    elif "_b" in kind:
        training = {"loss": loss, "optimizer": "sgd-momentum"} if kind.startswith("train") else options
        options, built = {**training, "target": "h100"}, built.train(kind.startswith("train"))
    else:
        built = timm.utils.reparameterize_model(built.eval())
    found = fxmem.analyze(built, torch.empty(batch, 3, size, size, device="meta"), precision="fp16", **options)
    profile = found.profile
    ops = [
        [int("convolution" in op.name), int(dtype in ("float16", "bfloat16")), op.flops or 0, op.moved_bytes or 0]
        for op, dtype in zip(profile.ops, list_dtypes(profile), strict=True)
    ]
    if "_b" not in kind:
        ops.sort(reverse=True)
    return [[*row, len(list(alike))] for row, alike in itertools.groupby(ops)]


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
        self.first = np.flatnonzero(np.diff(self.index, prepend=-1))
        assert table.rates is not None
        rates = table.rates
        self.rate = np.where(half > 0, rates.half, np.where(self.convolution, rates.tf32, rates.fp32))
        self.bandwidth = rates.bandwidth

    def estimate(self, logs: np.ndarray) -> np.ndarray:
        """Seconds, as `fxmem.hardware.step_time` adds them up."""
        products, convolutions, bandwidth, convolution_bandwidth, launch, issue = np.exp(logs)
        arithmetic = self.flops / (self.rate * np.where(self.convolution, convolutions, products))
        reached = np.where(self.convolution, convolution_bandwidth, bandwidth) * self.bandwidth
        each = np.maximum(arithmetic, self.moved / reached) + launch * ((self.flops > 0) | (self.moved > 0))
        on_card, issued = self._sum_before(each * self.count), issue * self._sum_before(self.count)
        left = np.add.reduceat(each * self.count, self.first)[self.index] - on_card  # from the row's first operator on
        last = issue * self.count + left - each * (self.count - 1)
        return np.maximum.reduceat(issued + np.maximum(issue + left, last), self.first)

    def _sum_before(self, values: np.ndarray) -> np.ndarray:
        """The sum over the rows of the same step that come earlier."""
        total = np.cumsum(values) - values
        return total - total[self.first][self.index]


def fit(parts: Sequence[Steps], start: np.ndarray = START) -> np.ndarray:
    """The logarithms of the numbers that fit the fitted halves best: least mean error, nearly, and not far from where
    the search starts in what the steps leave open."""
    from scipy.optimize import minimize

    def cost(logs: np.ndarray) -> float:
        off = np.concatenate([np.log(part.estimate(logs) / part.measured)[part.fitted] for part in parts])
        return float(np.mean(np.sqrt(off**2 + 1e-3)) + 0.003 * np.sum((logs - start) ** 2))

    return np.asarray(minimize(cost, start, method="L-BFGS-B", options={"maxiter": 200}).x)


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


def key(part: Steps) -> tuple[str, str]:
    """What is fitted together."""
    return part.table.card, part.table.mode


def describe(logs: np.ndarray) -> str:
    """The fitted numbers."""
    return ", ".join(f"{name} {value:.3g}" for name, value in zip(KEYS, np.exp(logs), strict=True))


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="DIR", help="analyse more steps of the tables in DIR")
    parser.add_argument("--seconds", type=float, default=600, help="how long to analyse (600)")
    parser.add_argument("--kinds", nargs="+", default=[table.kind for table in TABLES], help="which steps to analyse")
    options = parser.parse_args()
    if options.collect:
        collect(options.collect, options.seconds, options.kinds)
    steps = load()["steps"]
    parts = [Steps(table, steps) for table in TABLES if any(table.name in step["measured"] for step in steps)]
    head = "| | steps held out | mean error | median | within 30 % | worst | measured / estimated, p10 to p90 |"
    lines, shares = [head, "|---" * 7 + "|"], []
    groups = [[part for part in parts if key(part) == each] for each in dict.fromkeys(map(key, parts))]
    at_inference: dict[str, np.ndarray] = {}
    for group in groups:
        logs = fit(group, at_inference.get(group[0].table.card, START))  # training starts from inference
        at_inference[group[0].table.card] = logs
        lines += [row(part.table.name, part, logs, ~part.fitted)[0] for part in group]
        shares.append(f"- {group[0].table.name}: {describe(logs)}")
    lines += ["", "Fitted on the other cards in the same mode, judged on the whole of this one:", "", *lines[:2]]
    for part in parts:
        others = [each for each in parts if each.table.card != part.table.card and each.table.mode == part.table.mode]
        lines.append(row(part.table.name, part, fit(others), np.ones(len(part.steps), dtype=bool))[0])
    for title, cards in (("GeForce", ("rtx3090", "rtx4090", "rtx5090")), ("others", ("maxq", "h100"))):
        for mode in ("infer", "train"):
            group = [part for part in parts if part.table.card in cards and part.table.mode == mode]
            shares.append(f"- {title}, {mode}: {describe(fit(group))}")
    text = "\n".join([*lines, "", *shares]) + "\n"
    print(text)
    (RESULTS / f"step-time-{datetime.date.today().isoformat()}.md").write_text(text)


if __name__ == "__main__":
    main()
