"""`fxmem show`."""

from __future__ import annotations

import argparse

from fxmem.cli.next_command import next_for
from fxmem.cli.options import REPORT_OUTPUT, SUBJECT
from fxmem.cli.output import check_output, write_report
from fxmem.cli.step import read_step

BRIEF = "the table of a report written earlier"
DESCRIPTION = "Print a report that `fxmem analyze --json` wrote; needs no torch."

EXAMPLES = ("fxmem show report.json --full",)

ARGUMENTS = (
    *SUBJECT,
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem show`; return the exit code and the text for stdout."""
    check_output(options)
    report, timeline = read_step(options)
    return write_report(options, report, timeline, next_for(options, report))
