"""`fxmem analyze`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fxmem.cli.options import Working, add_step, add_target, analyzed
from fxmem.cli.output import add_output, check_output, reported
from fxmem.records.units import exact_bytes, format_bytes

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget
    from fxmem.records.profile import Report

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "peak memory of a step, node by node"
DESCRIPTION = "Predict the memory of one training or inference step."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser)
    add_target(parser)
    parser.add_argument(
        "--budget", metavar="BYTES|8GiB", help="what the step may take; exit code 4 if its peak is above"
    )
    add_output(parser)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory.budget import parse_bytes

    check_output(options)
    budget = None if options.budget is None else parse_bytes(options.budget, "--budget")
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        report, timeline = analysis.report(), analysis.timeline
    text = reported(options, report, timeline)
    if budget is None:
        return 0, text
    complaint = exceeded(report, budget)
    print(
        f"fxmem: {complaint or f'the step keeps the budget of {exact_bytes(budget.nbytes)}'}",
        file=sys.stderr,
    )
    return 4 if complaint else 0, text


def exceeded(report: Report, budget: Budget) -> str:
    """How a step exceeds a budget, in words; empty if it keeps it."""
    used, limit = report.peak.counted_bytes, budget.nbytes
    if budget.keeps(report, report.peak):
        return ""
    if used > limit:
        more = format_bytes(used - limit)
        return (
            f"expected a step within {exact_bytes(limit)}; its peak is {exact_bytes(used)}, {more} more; `fxmem "
            f"plan` says where to checkpoint"
        )
    return (
        f"expected a step within {exact_bytes(limit)}; its peak of {format_bytes(used)} is, but in a loop the "
        f"allocator runs out: its free memory is in pieces (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help)"
    )
