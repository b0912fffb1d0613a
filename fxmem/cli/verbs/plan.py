"""`fxmem plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import Working, add_step, add_target, analyzed, is_report, parsed_budget
from fxmem.cli.output import add_text, check_output, json_or, layout

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget, PeakShare
    from fxmem.records.plan import Plan
    from fxmem.records.profile import Profile, Timeline

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "where to put activation checkpoints"
STRATEGIES = ("auto", "mincut", "flat", "nested", "modules", "sqrt", "chen", "norms")
APPLICATIONS = ("modules", "graph", "operators")
EFFORT = 4.0
"""`fxmem.planning.certificate.EFFORT`, which is not imported for --help."""
DESCRIPTION = (
    "Choose activation checkpoints that keep a training step within a budget at the least recomputation, apply them "
    "to a stand-in of the model "
    "and analyse it again. Without --budget: the whole curve of peak against extra FLOPs. From a report, without "
    "torch, the peak is an estimate."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    parser.add_argument(
        "--budget",
        metavar="BYTES|8GiB|60%",
        help="what the step may take; a share is of its peak without a plan; exit code 4 if no plan keeps it",
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default="auto", help="how regions are chosen (default auto: the cheapest)"
    )
    how = (
        "modules: whole modules run again; graph: regions begin and end anywhere, the forward is rewritten; "
        "operators: single results are made "
        "again, the program runs once (default: whichever is cheapest)"
    )
    parser.add_argument("--application", choices=APPLICATIONS, help=how)
    parser.add_argument(
        "--certificate",
        nargs="?",
        type=float,
        const=EFFORT,
        metavar="EFFORT",
        help=(
            f"also prove how few FLOPs any plan within the same peak runs again; the search ends after so much work "
            f"(default {EFFORT:g}; needs fxmem[opt])"
        ),
    )
    parser.add_argument("--code", action="store_true", help="print the edits of your own source instead of the table")
    add_text(parser, "plan")
    parser.add_argument("--svg", metavar="FILE.svg", help="also write the annotated graph, the plan's regions boxed")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.planning import certificate
    from fxmem.records.files import write_text
    from fxmem.show import graph
    from fxmem.show.text import plan as plan_reporting

    check_output(options)
    budget = parsed_budget(options)
    if options.certificate is not None:
        certificate.cp_sat()
    plan, profile, timeline = (_of_report if is_report(options.model) else _of_model)(options, budget)
    if options.certificate is not None:
        plan = plan.model_copy(update={"certificate": certificate.certify(profile, plan, options.certificate)})
    if options.svg is not None:
        write_text(Path(options.svg), graph.svg(profile, timeline, plan=plan))
    show = plan.to_code if options.code else lambda: plan_reporting.table(plan, **layout(options))
    return 0, json_or(options, plan.to_json(), show)


def _of_model(options: argparse.Namespace, budget: Budget | PeakShare | None) -> tuple[Plan, Profile, Timeline]:
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        from fxmem.whatif import verified_plan

        regions_only = options.certificate is not None  # what it speaks of
        plan = verified_plan.plan(
            analysis,
            options.strategy,
            budget,
            application=options.application,
            progress=progress,
            regions_only=regions_only,
        )
    return plan, analysis.profile, analysis.timeline


def _of_report(options: argparse.Namespace, budget: Budget | PeakShare | None) -> tuple[Plan, Profile, Timeline]:
    from fxmem.memory import report_reader
    from fxmem.planning import estimate

    report = report_reader.load_report(Path(options.model))
    line = report_reader.timeline(
        report
    )  # refuses a peak that is not the report's, which shares of it would be taken of
    return estimate.estimate(report, report.peak, options.strategy, budget, options.application), report, line
