"""`fxmem graph`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from fxmem.cli.options import OPEN, PLAN, SUBJECT, drawing
from fxmem.cli.output import check_drawing, write_drawing, write_file
from fxmem.cli.parser import argument, flag
from fxmem.cli.step import read_planned_step
from fxmem.records.names import Heat

BRIEF = "the annotated graph, as SVG, PNG, PDF or DOT"
DESCRIPTION = "Draw the graph of a step, annotated; of a report, needs no torch."

EXAMPLES = ("fxmem graph torchvision:resnet50 -o graph.svg --open", "fxmem graph --plan plan.json -o plan.svg")

ARGUMENTS = (
    *SUBJECT,
    argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE.svg",
        help="what to write, by its ending: .svg, .png, .pdf or .dot; .png and .pdf need vl-convert "
        "(pip install 'fxmem[image]')",
    ),
    OPEN,
    PLAN,
    flag("--before", "with --plan: colours and peak as they are without it"),
    argument("--heat", choices=get_args(Heat), default="saved", help="the quantity that colours the boxes"),
    argument(
        "--depth",
        type=int,
        metavar="N",
        help="levels of modules told apart (default: the heaviest are open, up to --max-boxes)",
    ),
    argument("--focus", metavar="MODULE|peak", help="draw only this module, or the one in which the peak falls"),
    flag("--no-fold", help="draw equal siblings one by one"),
    drawing("about how many boxes there may be"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem graph`; return the exit code and the text for stdout."""
    from fxmem.show import graph

    check_drawing(options, "--output", options.output, ".dot")
    _, report, timeline, plan = read_planned_step(options)
    drawing = graph.DrawingOptions(
        heat=options.heat,
        fold=not options.no_fold,
        depth=options.depth,
        focus=options.focus,
        max_boxes=options.max_boxes,
        plan=plan,
        before=options.before,
    )
    if Path(options.output).suffix == ".dot":
        write_file(options, options.output, graph.dot_source(report, timeline, drawing))
    else:
        write_drawing(options, options.output, graph.render(report, timeline, drawing).svg)
    return 0, ""
