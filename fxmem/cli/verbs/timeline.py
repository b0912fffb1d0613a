"""`fxmem timeline`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import add_step, add_target, loaded_or_analyzed, parsed_budget
from fxmem.cli.output import check_file
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.records.profile import Profile, Report, Timeline

__all__ = ["BRIEF", "DESCRIPTION", "add_comparison", "add_options", "planned_step", "run"]

BRIEF = "bytes alive over the step, or by module, as SVG"
DESCRIPTION = "Plot the bytes alive over a step by kind, or those at its peak by module; of a report, needs no torch."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg", help="what to write")
    what = "time: over the step, by kind; modules: at the peak, by module (default time)"
    parser.add_argument("--by", choices=("time", "modules"), default="time", help=what)
    add_comparison(parser)
    parser.add_argument(
        "--width", type=int, default=960, metavar="PIXELS", help="width of the plot, at least 280 (default 960)"
    )


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """What a step is held against."""
    parser.add_argument("--budget", metavar="BYTES|8GiB|60%", help="drawn as a line; a share is of the step's peak")
    parser.add_argument(
        "--after", metavar="REPORT.json", help="report of the same step under a plan, plotted below on the same scale"
    )


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory.allocator import levels_of, settings_of
    from fxmem.records.files import write_text
    from fxmem.show import plots

    check_file("--output", options.output, (".svg",))
    if options.width < 280:
        raise UsageError(f"expected --width of at least 280 pixels, got {options.width}")
    if options.by == "modules" and (options.budget is not None or options.after is not None):
        raise UsageError("--budget and --after are for the plot over time; leave them out, or --by modules")
    budget = parsed_budget(options)
    report, timeline = loaded_or_analyzed(options)
    if options.by == "modules":
        text = plots.icicle_svg(report, timeline, width=options.width)
    else:
        after_profile, after = planned_step(options, report)
        settings = settings_of(os.environ)
        text = plots.timeline_svg(
            report,
            timeline,
            budget_bytes=None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes,
            after=after,
            after_profile=after_profile,
            held=levels_of(report, timeline, settings),
            held_after=None if after is None or after_profile is None else levels_of(after_profile, after, settings),
            width=options.width,
        )
    write_text(Path(options.output), text)
    return 0, ""


def planned_step(options: argparse.Namespace, report: Profile) -> tuple[Report | None, Timeline | None]:
    """The report of the step under a plan, if there is one.

    Raises:
        UsageError: it is of other inputs, or for another target.
    """
    from fxmem.memory import report_reader

    if options.after is None:
        return None, None
    after = report_reader.load_report(Path(options.after))
    for what, one, other in (
        ("inputs", report.inputs, after.inputs),
        ("target", report.target.name, after.target.name),
    ):
        if one != other:
            raise UsageError(
                f"expected --after to be a report of the same step, but the {what} of {options.after!r} are "
                f"others: "
                f"analyse both alike"
            )
    return after, report_reader.timeline(after)
