"""`fxmem show`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxmem.cli.next_command import next_for_report
from fxmem.cli.options import REPORT_OUTPUT
from fxmem.cli.output import check_output, write_report
from fxmem.cli.parser import argument

BRIEF = "the table of a report written earlier"
DESCRIPTION = "Print a report that `fxmem analyze --json` wrote; needs no torch."

EXAMPLES = ("fxmem show report.json --full",)

ARGUMENTS = (
    argument("report", metavar="REPORT.json|-", help="the file; `-` reads stdin"),
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem show`; return the exit code and the text for stdout."""
    from fxmem.memory import report_reader

    check_output(options)
    report = report_reader.load_report(Path(options.report))
    return write_report(options, report, report_reader.timeline(report), next_for_report(options.report, report))
