"""`fxmem layers`."""

from __future__ import annotations

import argparse

from fxmem.cli.options import add_step, add_target, loaded_or_analyzed
from fxmem.cli.output import add_width, check_output, json_or, layout

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "parameters, MACs, FLOPs and activations, layer by layer"
DESCRIPTION = (
    "Parameters, output shape, multiply-adds, FLOPs and memory of activations of every layer; of a report, "
    "needs no torch."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    forms = (
        "table: for a terminal; md: Markdown; csv: every field, a row for each layer; json: the same and the "
        "totals (default table)"
    )
    parser.add_argument("--format", choices=["table", "md", "csv", "json"], default="table", help=forms)
    parser.add_argument("--depth", type=int, metavar="N", help="levels of modules to show (default: all); json has all")
    add_width(parser)
    parser.add_argument("--json", metavar="FILE|-", help="also write the layers as JSON; `-` is --format json")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory.by_layer import by_layer
    from fxmem.show.text import by_layer as layer_reporting

    check_output(options)
    if options.format == "json":
        options.json = options.json or "-"
    report, _ = loaded_or_analyzed(options)
    layers = by_layer(report)

    def text() -> str:
        if options.format == "md":
            return layer_reporting.markdown(layers, depth=options.depth)
        if options.format == "csv":
            return layer_reporting.csv_text(layers, depth=options.depth)
        return layer_reporting.table(layers, depth=options.depth, **layout(options))

    return 0, json_or(options, layers.to_json(), text)
