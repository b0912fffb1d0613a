"""A report as a file that another tool opens.

Write a report in the format of another tool: PyTorch's memory viewer, Perfetto, speedscope, Model Explorer, networkx, a
spreadsheet; or what a job scheduler has to be asked for.

    fxmem export report.json --to perfetto -o trace.json
    fxmem export report.json --to slurm -o -
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fxmem.cli.options import SUBJECT
from fxmem.cli.output import check_writable, report_written
from fxmem.cli.parser import argument
from fxmem.cli.step import read_step
from fxmem.errors import UsageError
from fxmem.records.registry import EXPORTERS

ARGUMENTS = (
    *SUBJECT,
    argument(
        "--to FORMAT",
        required=True,
        choices=EXPORTERS,
        help="; ".join(f"{name}: {brief}" for name, brief in EXPORTERS.briefs.items()),
    ),
    argument("-o", "--output FILE|-", required=True, help="what to write; `-` is stdout, for all but memory-viz"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem export`; return the exit code and the text for stdout."""
    from fxmem.memory.allocator import read_settings
    from fxmem.show import export

    to, settings = options.to, read_settings(os.environ)
    if options.output != "-":
        check_writable(options, "--output", options.output, ", or - for stdout")
        report, timeline = read_step(options)
        export.save(report, timeline, Path(options.output), to, settings=settings)
        report_written(options, options.output)
        return 0, ""
    if EXPORTERS.get(to).binary:
        raise UsageError(f"expected --output to name a file, got '-': {to} is no text")
    content = export.export(*read_step(options), to, settings=settings)
    return 0, content if isinstance(content, str) else content.decode()
