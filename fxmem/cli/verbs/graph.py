"""`fxmem graph`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import add_step, add_target, loaded_or_analyzed
from fxmem.cli.output import check_file

if TYPE_CHECKING:
    from fxmem.show.graph import Format

HEATS = ("saved", "output", "params", "flops", "live", "scratch")
RENDERERS = ("auto", "dot", "wasi", "pygraphviz", "plain")

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "the annotated graph, as SVG, PNG, PDF or DOT"
DESCRIPTION = "Draw the graph of a step, annotated; of a report, needs no torch."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    output = (
        "what to write, by its ending: .svg, .png, .pdf or .dot; .png and .pdf need rsvg-convert, CairoSVG or Graphviz"
    )
    renderer = (
        "dot: Graphviz on PATH; wasi: pip install 'fxmem[svg]'; pygraphviz: pip install pygraphviz; plain: built in; "
    )
    renderer += "auto: the first that works (default auto)"
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg", help=output)
    parser.add_argument(
        "--plan",
        metavar="PLAN.json",
        help="a plan for this step, which `fxmem plan --json` wrote: its regions are framed",
    )
    parser.add_argument(
        "--heat", choices=HEATS, default="saved", help="the quantity that colours the boxes (default saved)"
    )
    parser.add_argument(
        "--depth", type=int, metavar="N", help="levels of modules told apart (default: as many as --max-boxes allows)"
    )
    parser.add_argument(
        "--max-boxes", type=int, default=400, metavar="N", help="about how many boxes there may be (default 400)"
    )
    parser.add_argument(
        "--focus", metavar="MODULE|peak", help="draw only this module, or the one in which the peak falls"
    )
    parser.add_argument("--no-fold", action="store_true", help="draw equal siblings one by one")
    parser.add_argument("--renderer", choices=RENDERERS, default="auto", help=renderer)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory import report_reader
    from fxmem.records.files import write_bytes
    from fxmem.show import graph

    check_file("--output", options.output, (".svg", ".png", ".pdf", ".dot"))
    ending = Path(options.output).suffix
    form: Format | None = "png" if ending == ".png" else "pdf" if ending == ".pdf" else None
    if form is not None:
        graph.require_image(form, options.renderer)  # refused before the work, not after
    plan = None if options.plan is None else report_reader.load_plan(Path(options.plan))
    report, timeline = loaded_or_analyzed(options)
    what = {
        "heat": options.heat,
        "fold": not options.no_fold,
        "depth": options.depth,
        "focus": options.focus,
        "max_boxes": options.max_boxes,
        "plan": plan,
    }
    if form is not None:
        data = graph.image(report, timeline, form, renderer=options.renderer, **what)
    elif ending == ".dot":
        data = graph.dot_source(report, timeline, **what).encode()
    else:
        data = graph.svg(report, timeline, renderer=options.renderer, **what).encode()
    write_bytes(Path(options.output), data)
    return 0, ""
