"""`fxmem max-batch`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import Working, add_step, add_target, analyzed
from fxmem.cli.output import add_text, check_output, json_or, layout
from fxmem.errors import UsageError
from fxmem.records.units import format_bytes, printable

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "the largest batch, or other size, that fits"
DESCRIPTION = (
    "Find the largest size of an input's dimension at which the step fits a card or a budget, by analysing it at "
    "about ten sizes; "
    "the curve of peak against size. Exit code 4 if nothing fits."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser)
    add_target(parser)
    dim = (
        "batch; seq: dimension 1 of token ids, masks and labels; the number of a dimension; or an argument's name "
        "and its axis, e.g. x:2,x:3 (default batch)"
    )
    parser.add_argument("--dim", default="batch", metavar="batch|seq|NAME:AXIS[,NAME:AXIS]", help=dim)
    parser.add_argument("--budget", metavar="BYTES|16GiB", help="what the step may take, instead of the card's memory")
    parser.add_argument("--limit", type=int, default=65536, metavar="N", help="try no larger size (default 65536)")
    parser.add_argument(
        "--plan", metavar="PLAN.json", help="with these checkpoints, which `fxmem plan --json` wrote for the same model"
    )
    add_text(parser, "curve")
    parser.add_argument("--svg", metavar="FILE.svg", help="also plot the curve")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.memory import report_reader
    from fxmem.records.files import write_text
    from fxmem.show.plots import size_curve
    from fxmem.show.text import sizes as size_reporting

    check_output(options)
    budget = _checked_budget(options)
    plan = None if options.plan is None else report_reader.load_plan(Path(options.plan))
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        from fxmem.whatif import max_batch, verified_plan

        tell = None if options.quiet else _say
        curve = max_batch.curve_of(
            analysis,
            budget=budget,
            dim=options.dim,
            limit=options.limit,
            change=None if plan is None else verified_plan.with_plan(plan),
            progress=tell,
        )
    if options.svg is not None:
        write_text(Path(options.svg), size_curve.sizes_svg(curve))
    text = json_or(options, curve.model_dump_json(), lambda: size_reporting.curve_table(curve, **layout(options)))
    if curve.largest is not None:
        return 0, text
    print(
        (
            f"fxmem: expected a size that fits {format_bytes(curve.memory_bytes)}; none does, not even "
            f"{curve.points[0].size}"
        ),
        file=sys.stderr,
    )
    return 4, text


def _say(message: str) -> None:
    print(f"fxmem: {printable(message)}", file=sys.stderr, flush=True)


def _checked_budget(options: argparse.Namespace) -> Budget | None:
    """The budget, if any; refuses before the first analysis what would be refused after it."""
    from fxmem.hardware import catalogue
    from fxmem.memory.budget import parse_bytes

    if options.limit < 1:
        raise UsageError(f"expected --limit of at least 1, got {options.limit}")
    if options.budget is not None:
        return parse_bytes(options.budget, "--budget")
    if catalogue.target(options.target).memory_bytes is None:
        raise UsageError(f"expected --budget, because the memory of target {options.target!r} is not known")
    return None
