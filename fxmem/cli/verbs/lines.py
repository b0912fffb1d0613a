"""`fxmem lines`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxmem.cli.options import add_step, add_target, loaded_or_analyzed
from fxmem.cli.output import add_text, check_file, check_output, json_or, layout
from fxmem.errors import UsageError

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "memory by source line, as annotated source"
DESCRIPTION = (
    "What each line of your files allocates, leaves alive and keeps for backward, and the tensors by shape: the "
    "annotated source, as text or HTML. "
    "What a library does inside counts for your line that called it. Of a report, needs no torch."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    which = (
        "show this file, or those below this folder, and count what others do for its lines that called them; "
        "repeatable (default: your own files)"
    )
    parser.add_argument("--file", action="append", default=[], metavar="PATH", help=which)
    everything = "show installed packages' files too (the default where no line is your own)"
    parser.add_argument("--all", action="store_true", help=everything)
    parser.add_argument(
        "--tensors",
        type=int,
        default=3,
        metavar="N",
        help="shapes to list below a line, most bytes first; 0 lists none (default 3)",
    )
    add_text(parser, "lines", "text")
    parser.add_argument("--html", metavar="FILE.html", help="also write the annotated source as one HTML page")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory.by_line import by_line
    from fxmem.records.files import write_text
    from fxmem.show.html import lines_html
    from fxmem.show.text import by_line as line_reporting

    check_output(options)
    if options.html is not None:
        check_file("--html", options.html, (".html", ".htm"))
    if options.tensors < 0:
        raise UsageError(f"expected --tensors of at least 0, got {options.tensors}")
    if options.all and options.file:
        raise UsageError("expected --all or --file, not both: --file says which files are shown")
    report, _ = loaded_or_analyzed(options)
    lines = by_line(report, files=options.file, installed=options.all)
    if options.html is not None:
        write_text(Path(options.html), lines_html(lines))
    return 0, json_or(
        options, lines.to_json(), lambda: line_reporting.table(lines, tensors=options.tensors, **layout(options))
    )
