"""`fxmem analyze`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxmem.cli.kept import kept_report
from fxmem.cli.next_command import next_for_model
from fxmem.cli.options import ANALYSIS, REPORT_OUTPUT
from fxmem.cli.output import check_output, write_report
from fxmem.cli.parser import argument
from fxmem.cli.progress import say
from fxmem.records.units import exact_bytes, format_bytes

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget
    from fxmem.records.profile import Report

BRIEF = "peak memory of a step, node by node"
DESCRIPTION = "Predict the memory of one training or inference step."

EXAMPLES = (
    "fxmem analyze torchvision:resnet50 --input 32x3x224x224 --target rtx4090",
    "fxmem analyze model.py:build --input x:8x1024:int64 --json report.json",
    "fxmem analyze hf:GPT2LMHeadModel --batch 8 --check",
)

ARGUMENTS = (
    *ANALYSIS,
    argument("--budget", metavar="BYTES|8GiB", help="what the step may take; exit code 4 if its peak is above"),
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem analyze`; return the exit code and the text for stdout."""
    from fxmem.memory.budget import parse_bytes

    check_output(options)
    budget = None if options.budget is None else parse_bytes(options.budget, "--budget")
    report, timeline = kept_report(options)
    code, text = write_report(options, report, timeline, next_for_model(options, report.peak))
    if budget is None:
        return code, text
    complaint = explain_excess(report, budget)
    say(complaint or f"the step keeps the budget of {exact_bytes(budget.nbytes)}")
    return 4 if complaint else code, text


def explain_excess(report: Report, budget: Budget) -> str:
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
