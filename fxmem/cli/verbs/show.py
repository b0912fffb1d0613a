"""Which layer, or which line of source, takes it?

Print a report that `fxmem analyze --json` wrote, or its memory by line of source or by layer; of a report, needs no
torch. `--json` writes what is shown.

    fxmem show report.json --full
    fxmem show report.json --by line
    fxmem show report.json --by layer --format csv
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxmem.cli.options import REPORT_OUTPUT, SUBJECT, by_form, check_form
from fxmem.cli.output import layout, next_for, write_file, write_json, write_report
from fxmem.cli.parser import argument, flag, grouped, number, repeatable
from fxmem.cli.step import read_step
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.records.profile import Report

_OF_LINES = grouped(
    "with --by line",
    repeatable(
        "--file PATH",
        help="show this file, or those below this folder, and count what others do for its lines that called them; "
        "repeatable (default: your own files)",
    ),
    flag("--all", help="show installed packages' files too (the default where no line is your own)"),
    number("--tensors", "shapes to list below a line, most bytes first; 0 lists none", default=3, least=0),
)
_OF_LAYERS = grouped(
    "with --by layer",
    argument(
        "--format",
        choices=["table", "md", "csv", "json"],
        default="table",
        help="table: for a terminal; md: Markdown; csv: every field, a row for each layer; json: the same and the "
        "totals",
    ),
)
_OF_REPORTS = {each.dest: each for each in REPORT_OUTPUT if each.dest in ("full", "depth", "check", "svg", "html")}
FORMS = {
    None: tuple(_OF_REPORTS.values()),
    "line": (_OF_REPORTS["html"], *_OF_LINES),
    "layer": (_OF_REPORTS["depth"], *_OF_LAYERS),
}
"""The options of each value of `--by`."""

ARGUMENTS = (
    *SUBJECT,
    by_form(
        FORMS,
        "line: what each line of your files allocates, leaves alive and keeps for backward, as annotated source, which "
        "--html has as a page; what a library does inside counts for your line that called it. layer: parameters, "
        "output shape, multiply-adds, FLOPs and activations of every layer, all levels without --depth (default: the "
        "table of the report)",
    ),
    *_OF_LINES,
    *_OF_LAYERS,
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem show`; return the exit code and the text for stdout."""
    check_form(options, FORMS)
    if options.all and options.file:
        raise UsageError("expected --all or --file, not both: --file says which files are shown")
    if options.format == "json":
        options.json = options.json or "-"
    report, timeline = read_step(options)
    if options.by is None:
        return write_report(options, report, timeline, next_for(options, report))
    return 0, (_show_lines if options.by == "line" else _show_layers)(options, report)


def _show_lines(options: argparse.Namespace, report: Report) -> str:
    from fxmem.memory.by_line import by_line
    from fxmem.show.text import by_line as line_reporting

    lines = by_line(report, files=options.file, installed=options.all)
    if options.html is not None:
        from fxmem.show.html import lines_html

        write_file(options, options.html, lines_html(lines))
    return write_json(
        options, lines.to_json, lambda: line_reporting.table(lines, tensors=options.tensors, **layout(options))
    )


def _show_layers(options: argparse.Namespace, report: Report) -> str:
    from fxmem.memory.by_layer import by_layer
    from fxmem.show.text import by_layer as layer_reporting

    layers = by_layer(report)

    def text() -> str:
        if options.format == "md":
            return layer_reporting.markdown(layers, depth=options.depth)
        if options.format == "csv":
            return layer_reporting.csv_text(layers, depth=options.depth)
        return layer_reporting.table(layers, depth=options.depth, **layout(options))

    return write_json(options, layers.to_json, text)
