"""`fxmem lines`."""

from __future__ import annotations

import argparse

from fxmem.cli.options import SUBJECT, text_output
from fxmem.cli.output import check_file, check_output, layout, write_file, write_json
from fxmem.cli.parser import argument, flag, repeatable
from fxmem.cli.step import read_step
from fxmem.errors import UsageError

BRIEF = "memory by source line, as annotated source"
DESCRIPTION = (
    "What each line of your files allocates, leaves alive and keeps for backward, and the tensors by shape: the "
    "annotated source, as text or HTML. What a library does inside counts for your line that called it. Of a report, "
    "needs no torch."
)

EXAMPLES = ("fxmem lines report.json",)

ARGUMENTS = (
    *SUBJECT,
    repeatable(
        "--file",
        metavar="PATH",
        help="show this file, or those below this folder, and count what others do for its lines that called them; "
        "repeatable (default: your own files)",
    ),
    flag("--all", help="show installed packages' files too (the default where no line is your own)"),
    argument(
        "--tensors",
        type=int,
        default=3,
        metavar="N",
        help="shapes to list below a line, most bytes first; 0 lists none",
    ),
    *text_output("lines", "text"),
    argument("--html", metavar="FILE.html", help="also write the annotated source as one HTML page"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem lines`; return the exit code and the text for stdout."""
    from fxmem.memory.by_line import by_line
    from fxmem.show.text import by_line as line_reporting

    check_output(options)
    if options.html is not None:
        check_file(options, "--html", options.html, (".html", ".htm"))
    if options.tensors < 0:
        raise UsageError(f"expected --tensors of at least 0, got {options.tensors}")
    if options.all and options.file:
        raise UsageError("expected --all or --file, not both: --file says which files are shown")
    report, _ = read_step(options)
    lines = by_line(report, files=options.file, installed=options.all)
    if options.html is not None:
        from fxmem.show.html import lines_html

        write_file(options, options.html, lines_html(lines))
    return 0, write_json(
        options, lines.to_json, lambda: line_reporting.table(lines, tensors=options.tensors, **layout(options))
    )
