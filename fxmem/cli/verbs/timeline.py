"""`fxmem timeline`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import OPEN, OVERLAYS, SUBJECT
from fxmem.cli.output import check_drawing, write_drawing
from fxmem.cli.parser import argument
from fxmem.cli.step import read_budget, read_planned_step
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.records.profile import Profile
    from fxmem.show.plots import StepAfter

BRIEF = "bytes alive over the step, or by module, as SVG"
DESCRIPTION = "Plot the bytes alive over a step by kind, or those at its peak by module; of a report, needs no torch."

EXAMPLES = ("fxmem timeline report.json -o timeline.svg",)

ARGUMENTS = (
    *SUBJECT,
    argument("-o", "--output", required=True, metavar="FILE.svg", help="what to write: .svg, .png or .pdf"),
    OPEN,
    argument(
        "--by",
        choices=("time", "modules"),
        default="time",
        help="time: over the step, by kind; modules: at the peak, by module",
    ),
    *OVERLAYS,
    argument("--width", type=int, default=960, metavar="PIXELS", help="width of the plot, at least 280"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem timeline`; return the exit code and the text for stdout."""
    from fxmem.memory.allocator import known_levels, read_settings
    from fxmem.show import plots

    check_drawing(options, "--output", options.output)
    if options.width < 280:
        raise UsageError(f"expected --width of at least 280 pixels, got {options.width}")
    if options.by == "modules" and any(each is not None for each in (options.plan, options.budget, options.after)):
        raise UsageError("--plan, --budget and --after are for the plot over time; leave them out, or --by modules")
    budget = read_budget(options)
    _, report, timeline, plan = read_planned_step(options)
    if options.by == "modules":
        text = plots.icicle_svg(report, timeline, width=options.width)
    else:
        levels = known_levels(report, timeline, read_settings(os.environ))
        text = plots.timeline_svg(
            plots.PlottedStep(report, timeline, levels),
            after=load_after(options, report) or plots.step_after(plan),
            budget_bytes=None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes,
            width=options.width,
        )
    write_drawing(options, options.output, text)
    return 0, ""


def load_after(options: argparse.Namespace, report: Profile) -> StepAfter | None:
    """Load the report of the step with a plan, if `--after` names one.

    Raises:
        UsageError: it is of other inputs, or for another target.
    """
    from fxmem.memory import report_reader
    from fxmem.memory.samples import shorten_step
    from fxmem.show.plots import StepAfter

    if options.after is None:
        return None
    after = report_reader.load_report(Path(options.after))
    for what, one, other in (
        ("inputs", report.inputs, after.inputs),
        ("target", report.target.name, after.target.name),
    ):
        if one != other:
            raise UsageError(
                f"expected --after to be a report of the same step, but the {what} of {options.after!r} are others: "
                "analyse both alike"
            )
    return StepAfter(shorten_step(after, report), report_reader.timeline(after).peak)
