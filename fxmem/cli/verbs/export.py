"""`fxmem export`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fxmem.cli.options import ANALYSIS_OR_REPORT
from fxmem.cli.output import check_writable
from fxmem.cli.parser import argument
from fxmem.cli.step import load_or_analyze
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.show.export import Format

BRIEF = "a report as a file that another tool opens"
DESCRIPTION = (
    "Write a report in the format of another tool: PyTorch's memory viewer, Perfetto, speedscope, Model "
    "Explorer, networkx, a spreadsheet."
)

FORMATS = {
    "memory-viz": "a predicted snapshot for pytorch.org/memory_viz",
    "perfetto": "a timeline for ui.perfetto.dev and chrome://tracing",
    "speedscope": "flame graphs of the peak for speedscope.app",
    "model-explorer": "the graph for Model Explorer",
    "model-explorer-data": "numbers to load over that graph",
    "csv": "one row per node",
    "graphml": "the graph for networkx, Gephi and yEd",
    "dot": "the drawn graph for Graphviz",
    "markdown": "a summary to paste into a pull request",
}
_BINARY = ("memory-viz",)

ARGUMENTS = (
    *ANALYSIS_OR_REPORT,
    argument(
        "--to",
        required=True,
        choices=list(FORMATS),
        metavar="FORMAT",
        help="; ".join(f"{name}: {brief}" for name, brief in FORMATS.items()),
    ),
    argument(
        "-o", "--output", required=True, metavar="FILE|-", help="what to write; `-` is stdout, for all but memory-viz"
    ),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem export`; return the exit code and the text for stdout."""
    from fxmem.memory.allocator import settings_of
    from fxmem.show import export

    to, settings = cast("Format", options.to), settings_of(os.environ)
    if options.output != "-":
        check_writable("--output", options.output, ", or - for stdout")
        report, timeline = load_or_analyze(options)
        export.save(report, timeline, Path(options.output), to, settings=settings)
        return 0, ""
    if to in _BINARY:
        raise UsageError(f"expected --output to name a file, got '-': {to} is no text")
    content = export.export(*load_or_analyze(options), to, settings=settings)
    assert isinstance(content, str), "all others are text"
    return 0, content
