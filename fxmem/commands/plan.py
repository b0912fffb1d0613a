"""`fxmem plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.commands.output import add_text, check_output, json_or, layout
from fxmem.commands.shared import Working, add_step, add_target, analyzed, check_budget, is_report

if TYPE_CHECKING:
    from fxmem.plan_records import Plan
    from fxmem.records import Profile, Timeline

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "where to put activation checkpoints"
STRATEGIES = ("auto", "mincut", "flat", "nested", "modules", "sqrt", "chen", "norms")
APPLICATIONS = ("modules", "graph", "operators")
EFFORT = 4.0
"""`fxmem.planning.certifying.EFFORT`, which is not imported for --help."""
DESCRIPTION = (
    "Choose activation checkpoints that keep a training step within a budget at the least recomputation, apply them to a stand-in of the model "
    "and analyse it again. Without --budget: the whole curve of peak against extra FLOPs. From a report, without torch, the peak is an estimate."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    parser.add_argument(
        "--budget", metavar="BYTES|8GiB|60%", help="what the step may take; a share is of its peak without a plan; exit code 4 if no plan keeps it"
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="auto", help="how regions are chosen (default auto: the cheapest)")
    how = (
        "modules: whole modules run again; graph: regions begin and end anywhere, the forward is rewritten; operators: single results are made "
        "again, the program runs once (default: whichever is cheapest)"
    )
    parser.add_argument("--application", choices=APPLICATIONS, help=how)
    parser.add_argument(
        "--certificate",
        nargs="?",
        type=float,
        const=EFFORT,
        metavar="EFFORT",
        help=f"also prove how few FLOPs any plan within the same peak runs again; the search ends after so much work (default {EFFORT:g}; needs fxmem[opt])",
    )
    parser.add_argument("--code", action="store_true", help="print the edits of your own source instead of the table")
    add_text(parser, "plan")
    parser.add_argument("--svg", metavar="FILE.svg", help="also write the annotated graph, the plan's regions boxed")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem import drawing
    from fxmem.files import write_text
    from fxmem.planning import certifying
    from fxmem.reporting import plans as plan_reporting

    check_output(options)
    check_budget(options)
    if options.certificate is not None:
        certifying.cp_sat()
    plan, profile, timeline = _of_report(options) if is_report(options.model) else _of_model(options)
    if options.certificate is not None:
        plan = plan.model_copy(update={"certificate": certifying.certify(profile, plan, options.certificate)})
    if options.svg is not None:
        write_text(Path(options.svg), drawing.svg(profile, timeline, plan=plan))
    show = plan.to_code if options.code else lambda: plan_reporting.table(plan, **layout(options))
    return 0, json_or(options, plan.to_json(), show)


def _of_model(options: argparse.Namespace) -> tuple[Plan, Profile, Timeline]:
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        from fxmem import promising

        regions_only = options.certificate is not None  # what it speaks of
        plan = promising.plan(analysis, options.strategy, options.budget, application=options.application, progress=progress, regions_only=regions_only)
    return plan, analysis.profile, analysis.timeline


def _of_report(options: argparse.Namespace) -> tuple[Plan, Profile, Timeline]:
    from fxmem import estimating, reports

    report = reports.load_report(Path(options.model))
    line = reports.timeline(report)  # refuses a peak that is not the report's, which shares of it would be taken of
    return estimating.estimate(report, report.peak, options.strategy, options.budget, options.application), report, line
