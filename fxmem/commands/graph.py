"""`fxmem graph`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxmem.commands.output import check_ending, check_writable
from fxmem.commands.shared import add_step, add_target, loaded_or_analyzed

HEATS = ("saved", "output", "params", "flops", "live", "scratch")
RENDERERS = ("auto", "dot", "wasi", "plain")

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "the annotated graph, as SVG or DOT"
DESCRIPTION = "Draw the graph of a step, annotated; of a report, needs no torch."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser, or_report=True)
    add_target(parser)
    renderer = "dot: Graphviz on PATH; wasi: pip install 'fxmem[svg]'; plain: built in; auto: the first that works (default auto)"
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg|FILE.dot", help="what to write, by its ending")
    parser.add_argument("--heat", choices=HEATS, default="saved", help="the quantity that colours the boxes (default saved)")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of modules told apart (default: as many as --max-boxes allows)")
    parser.add_argument("--max-boxes", type=int, default=400, metavar="N", help="about how many boxes there may be (default 400)")
    parser.add_argument("--focus", metavar="MODULE|peak", help="draw only this module, or the one in which the peak falls")
    parser.add_argument("--no-fold", action="store_true", help="draw equal siblings one by one")
    parser.add_argument("--renderer", choices=RENDERERS, default="auto", help=renderer)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem import drawing
    from fxmem.files import write_text

    check_ending("--output", options.output, (".svg", ".dot"))
    check_writable("--output", options.output)
    report, timeline = loaded_or_analyzed(options)
    what = {"heat": options.heat, "fold": not options.no_fold, "depth": options.depth, "focus": options.focus, "max_boxes": options.max_boxes}
    if Path(options.output).suffix == ".dot":
        text = drawing.dot_source(report, timeline, **what)
    else:
        text = drawing.svg(report, timeline, renderer=options.renderer, **what)
    write_text(Path(options.output), text)
    return 0, ""
