"""`fxmem show`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxmem.cli.output import add_output, check_output, reported

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "the table of a report written earlier"
DESCRIPTION = "Print a report that `fxmem analyze --json` wrote; needs no torch."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    parser.add_argument("report", metavar="REPORT.json|-", help="the file; `-` reads stdin")
    add_output(parser)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory import report_reader

    check_output(options)
    report = report_reader.load_report(Path(options.report))
    return 0, reported(options, report, report_reader.timeline(report))
