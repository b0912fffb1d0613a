"""`fxmem layers`."""

from __future__ import annotations

import argparse

from fxmem.cli.options import SUBJECT, width
from fxmem.cli.output import check_output, layout, write_json
from fxmem.cli.parser import argument
from fxmem.cli.step import read_step

BRIEF = "parameters, MACs, FLOPs and activations, layer by layer"
DESCRIPTION = (
    "Parameters, output shape, multiply-adds, FLOPs and memory of activations of every layer; of a report, "
    "needs no torch."
)

EXAMPLES = ("fxmem layers report.json --format csv",)

ARGUMENTS = (
    *SUBJECT,
    argument(
        "--format",
        choices=["table", "md", "csv", "json"],
        default="table",
        help="table: for a terminal; md: Markdown; csv: every field, a row for each layer; json: the same and the "
        "totals",
    ),
    argument("--depth", type=int, metavar="N", help="levels of modules to show (default: all); json has all"),
    width(),
    argument("--json", metavar="FILE|-", help="also write the layers as JSON; `-` is --format json"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem layers`; return the exit code and the text for stdout."""
    from fxmem.memory.by_layer import by_layer
    from fxmem.show.text import by_layer as layer_reporting

    check_output(options)
    if options.format == "json":
        options.json = options.json or "-"
    report, _ = read_step(options)
    layers = by_layer(report)

    def text() -> str:
        if options.format == "md":
            return layer_reporting.markdown(layers, depth=options.depth)
        if options.format == "csv":
            return layer_reporting.csv_text(layers, depth=options.depth)
        return layer_reporting.table(layers, depth=options.depth, **layout(options))

    return 0, write_json(options, layers.to_json, text)
