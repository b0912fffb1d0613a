"""Checkpoint plans side by side: fxmem's beside PyTorch's, timm's, transformers' and torch.compile's, and beside
published figures.

    pip install pulp pwlf                        for the SAC ILP; without them its rows say so
    python -m benchmarks.planning.plans                   every model (`make plans`; about an hour of one core)
    python -m benchmarks.planning.plans --only resnet18 gpt2
    python -m benchmarks.planning.plans --published       only the analyses at the papers' batch sizes

For each model and each contender: the peak of a real training step on the CPU without an optimizer (the profiler's
memory events, the scratch of convolution and attention kernels set aside), the FLOPs that run again, as a share of the
forward's, counted in a separate run, and the CPU time of its steps, which take turns with steps without checkpoints.
Then fxmem is asked for a plan within each rival's measured peak, and its plan is measured and counted the same way;
beside its time stands what fxmem estimates for a card. Of one contender's settings only those that no other of its
settings beats in both are answered.

Each model has a process of its own. A run that was interrupted goes on where it stopped; `--again` does the models it
is asked for anew, `--ours` of them what fxmem plans, after a change to its planners: the others' rows stay. Writes
`benchmarks/results/plans-DATE.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import logging
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fxmem
from benchmarks import RESULTS
from benchmarks.planning.plan_contenders import Ready, candidates, count
from benchmarks.planning.plan_models import CASES, Case
from benchmarks.planning.plan_table import (
    CARD,
    MEASURED,
    OURS,
    PUBLISHED,
    Published,
    Row,
    answer_to,
    challenged,
    markdown,
)
from fxmem.cli.specs import build_model
from fxmem.errors import ExceededError
from fxmem.hardware.step_time import step_seconds
from fxmem.records.plan import Plan
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import default_loss
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.whatif.plan_search import apply_regions

PACKAGES = ("torch", "torchvision", "timm", "transformers")
_TURNS = 4
"""Steps of each kind that are timed."""
OWN: tuple[tuple[str, str | None, float], ...] = (
    ("auto", None, 0.7),
    ("auto", None, 0.5),
    ("flat", "graph", 0.5),
    ("nested", "graph", 0.5),
    ("modules", "modules", 0.7),
)
"""What fxmem is asked for, beside rivals' peaks: strategy, application, and what is to be left of the bytes that are
neither parameters nor their gradients."""


# --- in a process of its own ------------------------------------------------------------------------------------------


class _Examination:
    """One model: makes its rows, of which some may be there already."""

    def __init__(self, name: str, case: Case, done: Sequence[Row]) -> None:
        self.name, self.case, self.had = name, case, {row.key: row for row in done}
        self.base = count(self.built(), case.args())
        with torch.device("meta"):
            model = case.build()
        self.analysis = fxmem.analyze(model, case.args(), target="cpu", optimizer=None)
        self.fixed_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
        """Parameters and their gradients."""
        self.measured: dict[str, Row] = {}
        """Plans of ours that have been run, by their regions."""

    def built(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.case.build()

    def peak(self, model: torch.nn.Module) -> int:
        torch.manual_seed(0)
        measured = measure_cpu(model, StepRequest(args=self.case.args(), optimizer=None), steps=2)
        return measured.peak_without_kernel_scratch_bytes

    def slowdown(self, ready: Ready) -> float:
        """CPU time of a step over that of one without checkpoints: the least of each, taken in turns."""
        models = [self.built(), ready.model]
        taken: list[list[float]] = [[], []]
        for _ in range(1 + _TURNS):
            for model, times in zip(models, taken, strict=True):
                began = time.process_time()
                default_loss(model(*self.case.args())).backward()  # type: ignore[no-untyped-call]
                times.append(time.process_time() - began)
                model.zero_grad(set_to_none=True)
        without, with_plan = (min(times[1:]) for times in taken)  # the first step of each sets up what is kept
        return with_plan / without

    @functools.cached_property
    def on_card(self) -> Analysis:
        """The same step on the card that estimates are for."""
        with torch.device("meta"):
            model = self.case.build()
        return fxmem.analyze(model, self.case.args(), target=CARD, optimizer=None)

    def estimated(self, plan: Plan) -> float | None:
        """The estimated time of the planned step over that of the step as it is, on the card."""
        planned = apply_regions(self.on_card, plan.regions, plan.application)
        before = step_seconds(self.on_card.profile)
        after = step_seconds(planned.profile, taped=plan.application is Application.OPERATORS and bool(plan.regions))
        return after / before if before and after else None

    def rows(self) -> Iterator[Row]:
        """Every row: the step as it is, the rivals, ours within their peaks, ours at budgets of our own."""
        none = Row(self.name, "none", "", extra_flops=self.base.forward, extra_products=self.base.forward_products)
        none = self.attempted(none, lambda row: dataclasses.replace(row, peak_bytes=self.peak(self.built())))
        yield none
        rivals = []
        for candidate in candidates(self.case):
            rivals.append(
                self.attempted(
                    Row(self.name, candidate.contender, candidate.setting),
                    lambda row, make=candidate.make: self.run(row, make()),
                )
            )
            yield rivals[-1]
        for strategy, title in (("sqrt", "sqrt(N)"), ("chen", "greedy search")):
            rivals.append(
                self.attempted(
                    Row(self.name, f"{title}, Chen et al.", ""),
                    lambda row, strategy=strategy: self.planned(row, strategy, None, None),
                )
            )
            yield rivals[-1]
        for rival in challenged(rivals, none.peak_bytes or 0):
            yield self.attempted(
                Row(self.name, OURS, answer_to(rival)),
                lambda row, nbytes=rival.peak_bytes: self.planned(row, "auto", None, nbytes),
            )
        for strategy, application, share in OWN:
            budget = round(self.fixed_bytes + share * ((none.peak_bytes or 0) - self.fixed_bytes))
            setting = f"{share:.0%} of what is no parameter or gradient, {strategy}"
            row = Row(self.name, OURS, setting)
            yield self.attempted(
                row, lambda row, a=application, s=strategy, nbytes=budget: self.planned(row, s, a, nbytes)
            )

    def attempted(self, row: Row, make: Callable[..., Row]) -> Row:
        """The row filled in, or with what went wrong; the one that is there, if one is."""
        if row.key in self.had:
            return self.had[row.key]
        began = time.monotonic()
        try:
            row = make(row)
        except Exception as error:  # a rival's, or a plan that is out of reach: the table says so
            cause = error.__cause__ or error
            said = re.sub(r"\S*/site-packages/", "", (str(cause).splitlines() or [""])[0])
            row = dataclasses.replace(row, failed=f"{type(cause).__name__}: {said}"[:300])
        return dataclasses.replace(row, seconds=round(time.monotonic() - began, 1))

    def run(self, row: Row, ready: Ready) -> Row:
        """Measured, and counted in a run apart."""
        with ready.settings() if ready.settings else contextlib.nullcontext():
            nbytes = self.peak(ready.model)
            slowdown = self.slowdown(ready)
        extra: int | None
        products: int | None
        if not ready.is_counted:
            extra = products = None
        elif ready.graphs is not None:
            extra, products = (sum(each) for each in zip(*ready.graphs, strict=True))
        else:
            counted = count(ready.model, self.case.args())
            extra, products = counted.total - self.base.total, counted.products - self.base.products
        return dataclasses.replace(
            row, peak_bytes=nbytes, extra_flops=extra, extra_products=products, slowdown=slowdown
        )

    def planned(self, row: Row, strategy: str, application: str | None, budget: int | None) -> Row:
        """fxmem's plan, applied and run."""
        plan = fxmem.plan(self.analysis, strategy, budget, application=application)
        row = dataclasses.replace(
            row, budget_bytes=plan.budget_bytes, promised_bytes=plan.after.requested_bytes, plan=described(plan)
        )
        key = repr((plan.application, plan.regions))
        if key not in self.measured:
            ready = Ready(fxmem.checkpoint(self.built(), plan) if plan.regions else self.built())
            self.measured[key] = dataclasses.replace(self.run(row, ready), estimated_slowdown=self.estimated(plan))
        known = self.measured[key]
        return dataclasses.replace(row, **{name: getattr(known, name) for name in MEASURED})


def described(plan: Plan) -> str:
    """A plan in a few words."""
    titles = [region.title for region in plan.regions]
    shown = ", ".join(titles[:6]) + (f", … {len(titles)} in all" if len(titles) > 6 else "")
    return f"{plan.chosen}, {plan.application.value}: {shown}" if titles else "nothing to do"


@functools.lru_cache(1)
def _analyse(spec: str, batch: int, settings: tuple[tuple[str, Any], ...]) -> Analysis:
    """The step at 224 pixels, on the card that figures are predicted for."""
    images = torch.empty(batch, 3, 224, 224, device="meta")
    return fxmem.analyze(build_model(spec, dict(settings)).module, images, target=CARD, optimizer=None)


def at_their_size(published: Published) -> dict[str, Any]:
    """What fxmem's analysis says of the quickest plan with the same share of the memory, at the published batch and 224
    pixels; nothing is run."""
    analysis = _analyse(published.spec, published.batch, published.settings)
    whole = analysis.peak.requested_bytes
    try:
        plan = fxmem.plan(analysis, budget=published.share)
    except ExceededError as error:
        return {"unplanned_bytes": whole, "failed": str(error)[:300]}
    return {
        "unplanned_bytes": whole,
        "peak_bytes": plan.after.requested_bytes,
        "extra_fraction": plan.extra_fraction,
        "time_fraction": plan.after_seconds / plan.before_seconds - 1
        if plan.before_seconds and plan.after_seconds
        else None,
        "plan": described(plan),
    }


# --- running ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for and write the report."""
    parser = argparse.ArgumentParser(description="Checkpoint plans, ours and others', side by side.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"models among {', '.join(CASES)}")
    parser.add_argument("--again", action="store_true", help="also what is in the day's table already")
    parser.add_argument("--ours", action="store_true", help="of what is in the day's table already, fxmem's own rows")
    parser.add_argument("--published", action="store_true", help="only the analyses at published batch sizes")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the report goes")
    parser.add_argument("--examine", metavar="NAME", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.examine:
        _examine(asked.examine)
        return 0
    names = list(asked.only or CASES)
    if unknown := [name for name in names if name not in CASES]:
        print(f"expected models among {', '.join(CASES)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    found = _open(asked.out)
    found["cases"] = {name: case.text for name, case in CASES.items()}
    path = asked.out / f"plans-{found['date']}"
    for name in () if asked.published else names:
        _run(name, found, path, _stays(found["rows"], again=asked.again, ours=asked.ours))
    for each in () if asked.only else PUBLISHED:
        if each.spec and (asked.again or each.key not in found["published"]):
            found["published"][each.key] = at_their_size(each)
            print(f"{each.key}: {found['published'][each.key]}", file=sys.stderr, flush=True)
            _write(path, found)
    _write(path, found)
    print(f"{path}.md: {len(found['rows'])} rows")
    return 0


def _examine(name: str) -> None:
    """Rows to stdout as JSON, a line each; those that are there already come from stdin."""
    warnings.simplefilter("ignore")  # rivals', of what they do not support
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    for row in _Examination(name, CASES[name], [Row(**row) for row in json.load(sys.stdin)]).rows():
        print(json.dumps(dataclasses.asdict(row)), flush=True)


def _stays(rows: Iterable[dict[str, Any]], *, again: bool, ours: bool) -> list[dict[str, Any]]:
    """Rows that are not made anew."""
    return [] if again else [row for row in rows if not (ours and row["contender"] == OURS)]


def _run(name: str, found: dict[str, Any], path: Path, stays: Iterable[dict[str, Any]]) -> None:
    """The rows of one model, each written as it comes."""
    done = [row for row in stays if row["model"] == name]
    others = [row for row in found["rows"] if row["model"] != name]
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    command = [sys.executable, "-m", "benchmarks.planning.plans", "--examine", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        write, read = child.stdin, child.stdout
        if write is None or read is None:
            raise RuntimeError("a child without pipes")
        write.write(json.dumps(done))
        write.close()
        for line in read:
            if not line.startswith("{"):  # what a rival prints
                continue
            row = Row(**json.loads(line))
            rows[row.key] = dataclasses.asdict(row)
            kept = [old for old in done if Row(**old).key not in rows]
            found["rows"] = [*others, *rows.values(), *kept]
            _write(path, found)
            print(
                (
                    f"{name}: {row.contender}, {row.setting}: {row.failed or row.peak_bytes} {row.extra_flops} "
                    f"{row.seconds:g} s"
                ),
                file=sys.stderr,
                flush=True,
            )
    if child.returncode:
        print(f"{name}: its process ended with exit code {child.returncode}", file=sys.stderr, flush=True)
    else:
        found["rows"] = [*others, *rows.values()]


def _open(out: Path) -> dict[str, Any]:
    """The day's result as far as it is there and made with the same versions."""
    new: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    path = out / f"plans-{new['date']}.json"
    if path.is_file():
        old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {key: old.get(key) for key in new} == new:
            return old
    return {**new, "published": {}, "rows": []}


def _write(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(found, indent=1) + "\n"), (".md", markdown(found))):
        part = path.with_name(path.name + suffix + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path.with_name(path.name + suffix))


if __name__ == "__main__":
    sys.exit(main())
