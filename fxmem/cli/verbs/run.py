"""`fxmem run`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from fxmem.cli.next_command import next_for_program
from fxmem.cli.options import RANKS, REPORT_OUTPUT, TARGET
from fxmem.cli.output import check_output, write_report
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import StatusLine, say
from fxmem.cli.step import read_ranks, require_torch
from fxmem.errors import UsageError
from fxmem.records.names import AS_IS, MAX_OPERATORS, STEADY, STEPS

BRIEF = "your own training script, untouched, on a card that is not there"
DESCRIPTION = (
    "Run a Python program as it is on a pretended card, stop it after a few optimizer steps, and say how much memory "
    "each step takes. The program is trusted code and its files are real; checkpoints it saves are kept in memory."
)

EXAMPLES = (
    "fxmem run --target rtx4090 train.py --batch-size 16",
    "fxmem run --ranks 8 -m package.train",
)

ARGUMENTS = (
    TARGET,
    argument("--steps", type=int, metavar="N", help=f"optimizer steps after which to stop (default {STEPS})"),
    argument(
        "--until",
        choices=("steady", "end"),
        help="stop when two steps allocate the same and leave as much alive, at the latest after --steps (default "
        f"{STEADY}); or let the program run to its end",
    ),
    argument(
        "--oom",
        choices=("raise", "continue"),
        default="raise",
        help="where the card has no more memory: raise the error there, or go on and say how much is missing",
    ),
    argument(
        "--compile",
        metavar="as-is",
        choices=(AS_IS,),
        help="compile what the program compiles, as inductor would for the target (default: run it as eager code)",
    ),
    flag("--strict", "exit code 1 if the program decided anything by a number that was made up"),
    argument(
        "--max-operators",
        type=int,
        default=MAX_OPERATORS,
        metavar="N",
        help="stop within a step of more operators than this",
    ),
    *RANKS,
    *REPORT_OUTPUT,
    flag("-m", "PROGRAM is a module's name, as for python -m"),
    argument("program", metavar="PROGRAM", help="the script to run"),
    argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its own arguments"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem run`; return the exit code and the text for stdout."""
    from fxmem.hardware import catalogue

    check_output(options)
    if options.steps is not None and options.until == "end":
        raise UsageError("expected --steps or --until end, not both")
    for name, value in (("--steps", options.steps), ("--max-operators", options.max_operators)):
        if value is not None and value < 1:
            raise UsageError(f"expected {name} of at least 1, got {value}")
    ranks, rank = read_ranks(options)
    card = catalogue.target(options.target)
    require_torch()
    from fxmem.simulation.program import Launch, launch

    launched = launch(
        Launch(options.program, tuple(options.arguments), options.m, ranks, rank),
        card,
        enough=_stopping(options.steps, options.until),
        out_of_memory=options.oom,
        max_operators=options.max_operators,
        watch=lambda recorded: StatusLine(recorded.progress),
        compile=options.compile,
    )
    recorded = launched.recorded
    words = (*(["-m"] if options.m else []), options.program, *options.arguments)
    # Which runs the program by itself, as eager code.
    following = "" if options.compile else next_for_program(card.name, words, (ranks, rank))
    code, text = write_report(options, recorded.report(), recorded.timeline, following)
    if recorded.shortage and options.oom == "raise":
        say(f"the program runs out of memory on {card.name}; --oom continue says how much it would take")
    decided = [each for each in recorded.made_up if each.kind == "decided"]
    if options.strict and decided:
        say(f"the program decides by made-up numbers: {decided[0].what} at {decided[0].place or 'no line of its own'}")
        return 1, text
    return code, text


def _stopping(steps: int | None, until: str | None) -> Callable[[Sequence[Any]], bool]:
    """When to stop, asked after each round with all of them."""
    if until == "end":
        return lambda rounds: False
    if until == "steady":
        return lambda rounds: (len(rounds) > 1 and rounds[-1].repeats(rounds[-2])) or len(rounds) >= (steps or STEADY)
    return lambda rounds: len(rounds) >= (steps or STEPS)
