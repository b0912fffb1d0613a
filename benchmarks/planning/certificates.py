"""How far checkpoint plans may be from the cheapest: `python -m benchmarks.planning.certificates`.

Training steps on the CPU without an optimizer, three budgets each; the plan that fxmem makes (applied and analysed
again), the bound that CP-SAT proves for any plan within that budget, and the CPU time of the proof. Written to
benchmarks/results/certificates-DATE.md.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import torch
import torchvision

import fxmem
from benchmarks import RESULTS, make_inputs
from benchmarks.planning.certificate import certify
from fxmem.cli.specs import build_model
from fxmem.cli.specs.inputs import parse_input
from fxmem.errors import ExceededError
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis, analyze_step
from fxmem.simulation.step.request import StepRequest

SHARES = (0.8, 0.6, 0.4)


def image(name: str, batch: int) -> Analysis:
    """A torchvision model at 224 pixels."""
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    return fxmem.analyze(model, torch.zeros(batch, 3, 224, 224, device="meta"), target="cpu", optimizer=None)


def gpt2() -> Analysis:
    """GPT-2 small on 8 sequences of 256 tokens."""
    built = build_model("hf:GPT2LMHeadModel", {})
    args, kwargs = make_inputs([parse_input("input_ids:8x256"), parse_input("labels:8x256")])
    return analyze_step(built.module, StepRequest(args=args, kwargs=kwargs, name="gpt2", target="cpu", optimizer=None))


def rows() -> Iterator[str]:
    """Rows of the table."""
    yield "| model | plan | budget | peak | extra FLOPs | at least needed | gap | proof |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    steps = [
        (name, image(name, batch))
        for name, batch in (("resnet18", 32), ("resnet50", 32), ("vgg16", 16), ("vit_b_16", 8))
    ]
    for name, analysis in (*steps, ("gpt2", gpt2())):
        for application in (Application.MODULES, Application.GRAPH):
            for share in SHARES:
                try:
                    plan = fxmem.plan(analysis, budget=share, application=application)
                except ExceededError:
                    yield f"| {name} | {application.value} | {share:.0%} | out of reach | | | | |"
                    continue
                except fxmem.errors.UsageError:
                    continue  # not to be traced symbolically
                yield _row(name, share, analysis, plan)


def _row(name: str, share: float, analysis: Analysis, plan: fxmem.Plan) -> str:
    begin = time.process_time()
    proven = certify(analysis.profile, plan)
    taken = time.process_time() - begin
    forward, peak = plan.forward_flops or 1, plan.after.requested_bytes / plan.before.requested_bytes
    whole = (
        sum(op.flops or 0 for op in analysis.profile.ops if op.phase == "forward")
        if plan.forward_flops is None
        else forward
    )
    least, gap = (proven.lower_bound_flops or 0) / whole, (proven.gap_flops or 0) / whole
    said = "optimal" if proven.optimal else f"{100 * gap:.1f} %" if proven.gap_flops is not None else "unknown"
    how = f"{taken:.1f} s" if proven.complete else f"{taken:.1f} s, ended at the limit"
    extra = "unknown" if plan.extra_flops is None else f"+{plan.extra_flops / whole:.1%}"
    return (
        f"| {name} | {plan.application.value}, {plan.chosen} | {share:.0%} | {peak:.1%} | {extra} | +{least:.1%} "
        f"| {said} | {how} |"
    )


def main() -> None:
    """Make the table and write the page."""
    page = [
        "# Certificates of checkpoint plans",
        "",
        f"torch {torch.__version__}; made by `python -m benchmarks.planning.certificates`; CPU time on one core.",
        "",
        (
            "Shares of the unplanned peak and of the forward's FLOPs. `at least needed` holds for any checkpoints "
            "within "
            "the budget, nested to any"
        ),
        (
            "depth: with borders anywhere (graph), or of whole modules (modules). `gap` is what the plan may run again "
            "needlessly, at most. The bound"
        ),
        "leaves out what recomputation itself holds, so that some of the gap is the bound's.",
        "",
        *rows(),
        "",
    ]
    (RESULTS / f"certificates-{datetime.date.today()}.md").write_text("\n".join(page), encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
