"""`fxmem cards`."""

from __future__ import annotations

import argparse
import sys

from fxmem.cli.options import Working, add_prefetch, add_step, analyzed
from fxmem.cli.output import add_text, check_output, json_or, layout
from fxmem.errors import UsageError
from fxmem.records.units import printable

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "which cards a step fits"
DESCRIPTION = (
    "Hold a step against every card of the catalogue. It is analysed once for each compute capability (eight times "
    "for all cards), "
    "because that decides the kernels and their workspaces. With --plan also the checkpoints with which it fits "
    "where it does not by itself. "
    "Exit code 4 if it fits none."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser)
    accumulate = "micro-batches to one optimizer step; the step is the last of them (default 1)"
    parser.add_argument("--accumulate", type=int, default=1, metavar="K", help=accumulate)
    add_prefetch(parser)
    parser.add_argument(
        "--only", metavar="CARD[,CARD]...", help="hold it against these alone; a JSON file describes a card of your own"
    )
    plans = "also the cheapest checkpoints with which it fits, for each card that is too small for the step as it is"
    parser.add_argument("--plan", action="store_true", help=plans)
    add_text(parser, "result")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.hardware import catalogue
    from fxmem.show.text import sizes as size_reporting

    check_output(options)
    names = None if options.only is None else [name.strip() for name in options.only.split(",")]
    if options.plan and options.mode != "train":
        raise UsageError(
            "expected --plan with a training step: at inference nothing is saved for backward, so there is nothing "
            "to checkpoint"
        )
    for name in names or ():  # a card that is none is found before the work is done
        if catalogue.target(name).memory_bytes is None:
            raise UsageError(f"expected --only with cards whose memory is known, got {name!r}")
    with Working(options.quiet) as progress:
        options.target = "h100" if names is None else names[0]
        analysis = analyzed(options, progress)
        from fxmem.whatif import card_fit

        fits = card_fit.cards_of(analysis, names=names, plans=options.plan, progress=None if options.quiet else _say)
    text = json_or(options, fits.model_dump_json(), lambda: size_reporting.cards_table(fits, **layout(options)))
    return 0 if fits.fitting else 4, text


def _say(message: str) -> None:
    print(f"fxmem: {printable(message)}", file=sys.stderr, flush=True)
