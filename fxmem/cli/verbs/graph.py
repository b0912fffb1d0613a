"""A picture: the graph of the step, or its timeline.

Draw the graph of a step, annotated; or, with `--by time`, the bytes alive over it. Of a report, needs no torch.

    fxmem graph torchvision:resnet50 -o graph.svg --open
    fxmem graph --plan plan.json -o plan.svg
    fxmem graph report.json --by time -o timeline.svg
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from fxmem.cli.options import OPEN, OVERLAYS, PLAN, SUBJECT, by_form, check_form, drawing
from fxmem.cli.output import check_drawing, write_drawing, write_file
from fxmem.cli.parser import argument, flag, grouped, number
from fxmem.cli.step import PlannedSubject, read_budget, read_planned_step
from fxmem.errors import UsageError
from fxmem.records.units import Heat

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget, BudgetShare
    from fxmem.records.profile import Profile
    from fxmem.show.plots import StepAfter

_WIDTH = number("--width PIXELS", "width of the plot, at least 280", least=280, default=960)
_OF_GRAPH = grouped(
    "the graph",
    flag("--before", "with --plan: colours and peak as they are without it"),
    argument("--heat", choices=get_args(Heat), default="saved", help="the quantity that colours the boxes"),
    number("--depth", "levels of modules told apart (default: the heaviest are open, up to --max-boxes)"),
    argument("--focus MODULE|peak", help="draw only this module, or the one in which the peak falls"),
    flag("--no-fold", help="draw equal siblings one by one"),
    drawing("about how many boxes there may be"),
)
_OF_PLOTS = grouped("the timeline", *(each for each in OVERLAYS if each is not PLAN), _WIDTH)
FORMS = {None: (PLAN, *_OF_GRAPH), "time": (PLAN, *_OF_PLOTS), "module": _OF_PLOTS[-1:]}
"""The options of each value of `--by`."""

ARGUMENTS = (
    *SUBJECT,
    argument(
        "-o",
        "--output FILE.svg",
        required=True,
        help="what to write, by its ending: .svg, .png, .pdf or, of the graph, .dot; .png and .pdf need vl-convert "
        "(pip install 'fxmem[image]')",
    ),
    OPEN,
    by_form(
        FORMS,
        "time: the bytes alive over the step, by kind; module: those at its peak, by module (default: the graph of "
        "operators, in the boxes of their modules)",
    ),
    PLAN,
    *_OF_GRAPH,
    *_OF_PLOTS,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem graph`; return the exit code and the text for stdout."""
    check_form(options, FORMS)
    check_drawing(options, "--output", options.output, *([".dot"] if options.by is None else []))
    budget = read_budget(options)
    subject = read_planned_step(options)
    if options.by is None:
        _draw_graph(options, subject)
    else:
        write_drawing(options, options.output, _plot(options, subject, budget))
    return 0, ""


def _draw_graph(options: argparse.Namespace, subject: PlannedSubject) -> None:
    from fxmem.show import graph

    drawing = graph.DrawingOptions(
        heat=options.heat,
        fold=not options.no_fold,
        depth=options.depth,
        focus=options.focus,
        max_boxes=options.max_boxes,
        plan=subject.plan,
        before=options.before,
    )
    if Path(options.output).suffix == ".dot":
        write_file(options, options.output, graph.dot_source(subject.report, subject.timeline, drawing))
    else:
        write_drawing(options, options.output, graph.render(subject.report, subject.timeline, drawing).svg)


def _plot(options: argparse.Namespace, subject: PlannedSubject, budget: Budget | BudgetShare | None) -> str:
    from fxmem.memory.allocator import known_levels, read_settings
    from fxmem.show import plots

    _, report, timeline, plan = subject
    if options.by == "module":
        return plots.icicle_svg(report, timeline, width=options.width)
    return plots.timeline_svg(
        plots.PlottedStep(report, timeline, known_levels(report, timeline, read_settings(os.environ))),
        after=load_after(options, report) or plots.step_after(plan),
        budget_bytes=None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes,
        width=options.width,
    )


def load_after(options: argparse.Namespace, report: Profile) -> StepAfter | None:
    """Load the report of the step with a plan, if `--after` names one.

    Raises:
        UsageError: it is of other inputs, or for another target.
    """
    from fxmem.memory import report_reader
    from fxmem.memory.liveness import shorten_step
    from fxmem.show.plots import StepAfter

    if options.after is None:
        return None
    after = report_reader.load_report(Path(options.after))
    names = (report.target.name, after.target.name)
    for what, one, other in (("inputs", report.inputs, after.inputs), ("target", *names)):
        if one != other:
            raise UsageError(
                f"expected --after to be a report of the same step, but the {what} of {options.after!r} are others: "
                "analyse both alike"
            )
    return StepAfter(shorten_step(after, report), report_reader.timeline(after).peak)
