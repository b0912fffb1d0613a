"""How good and how fast the planners are: `python -m benchmarks.planning.planning_speed`.

Quality: ResNet-50, batch 32 at 224 pixels, on the CPU without an optimizer; for each strategy and budget the peak of
the analysis of the applied plan, and the forward FLOPs that run again. Speed: CPU time of the planner alone (tables and
one plan), beside that of the analysis, for deeper and deeper models. Written to benchmarks/results/planning-DATE.md.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator

import torch
import torchvision

import fxmem
from benchmarks import RESULTS, make_inputs
from fxmem.cli.specs import build_model
from fxmem.cli.specs.inputs import parse_input
from fxmem.errors import ExceededError
from fxmem.planning import OperatorPlanner, Planner
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis, analyze_step
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif import verified_plan

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.28, 0.26, 0.25)


def resnet(depth: int, batch: int) -> Analysis:
    """A training step on the CPU, without an optimizer."""
    with torch.device("meta"):
        model = getattr(torchvision.models, f"resnet{depth}")()
    return fxmem.analyze(model, torch.zeros(batch, 3, 224, 224, device="meta"), target="cpu", optimizer=None)


def llama(layers: int) -> Analysis:
    """A small Llama of so many layers."""
    small = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 2000,
    }
    built = build_model("hf:LlamaForCausalLM", {"num_hidden_layers": layers, **small})
    args, kwargs = make_inputs([parse_input("input_ids:8x512"), parse_input("labels:8x512")])
    return analyze_step(built.module, StepRequest(args=args, kwargs=kwargs, name="llama", target="cpu", optimizer=None))


def quality() -> Iterator[str]:
    """Rows of peak and extra FLOPs."""
    analysis = resnet(50, 32)
    yield "| plan | regions | peak | extra FLOPs |"
    yield "|---|---|---:|---:|"
    for strategy in ("sqrt", "chen"):
        for application in (Application.MODULES, Application.GRAPH):
            yield _row(f"{strategy}", fxmem.plan(analysis, strategy, application=application))
    for application in Application:
        for share in SHARES:
            try:
                plan = fxmem.plan(analysis, budget=share, application=application)
            except ExceededError:
                yield f"| budget {share:.0%} | {application.value} | out of reach | |"
            else:
                yield _row(f"budget {share:.0%}: {plan.chosen}", plan)


def _row(name: str, plan: fxmem.Plan) -> str:
    share = plan.after.requested_bytes / plan.before.requested_bytes
    return f"| {name} | {plan.application.value} | {share:.1%} | +{plan.extra_fraction or 0:.1%} |"


def speed() -> Iterator[str]:
    """Rows of CPU seconds."""
    yield "| model | nodes | analysis | plan, modules | plan, graph | plan, operators |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, make in (
        *((f"ResNet-{depth}", lambda depth=depth: resnet(depth, 16)) for depth in (18, 50, 101, 152)),
        *((f"Llama, {n} layers", lambda n=n: llama(n)) for n in (10, 20, 40, 80)),
    ):
        begin = time.process_time()
        analysis = make()
        taken = [time.process_time() - begin]
        for application in Application:
            planner = _planner(analysis, application)
            begin = time.process_time()
            with contextlib.suppress(ExceededError):  # which takes longer than a plan
                planner.plan("auto", analysis.peak.requested_bytes // 2)
            taken.append(time.process_time() - begin)
        yield (
            f"| {name} | {len(analysis.profile.nodes)} | {taken[0]:.2f} s | {taken[1]:.2f} s | {taken[2]:.2f} s | "
            f"{taken[3]:.2f} s |"
        )


def _planner(analysis: Analysis, application: Application) -> Planner | OperatorPlanner:
    """Of the kind for an application; that for operators finds its survey made, which is an analysis."""
    if application is not Application.OPERATORS:
        return Planner(analysis.profile, application)
    found = verified_plan.survey(analysis)
    return OperatorPlanner(analysis.profile, lambda: found)


def main() -> None:
    """Run both and write the page."""
    head = [
        "# Checkpoint planners",
        "",
        f"torch {torch.__version__}; made by `python -m benchmarks.planning.planning_speed`.",
    ]
    page = [
        *head,
        "",
        "ResNet-50, batch 32; shares of the unplanned peak and of forward FLOPs:",
        "",
        *quality(),
        "",
        "CPU time, in one process:",
        "",
        *speed(),
        "",
    ]
    path = RESULTS / f"planning-{datetime.date.today()}.md"
    path.write_text("\n".join(page), encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
