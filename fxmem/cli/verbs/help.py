"""The options of every step (fxmem help step), or those of a verb.

Describe the options that every step has, or those of a verb.

    fxmem help step
    fxmem help plan
"""

from __future__ import annotations

import argparse

from fxmem.cli.options import BESIDE, COMPILE, GENERATION, INPUTS, LOOP, RANKS, SHARDING, STEP, TARGET, TORCH
from fxmem.cli.parser import Parser, argument

ARGUMENTS = (argument("topic step|COMMAND", nargs="?", help="what to describe; none: the list of commands"),)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem help`; return the exit code and the text for stdout."""
    from fxmem.cli.verbs import build_parser

    parser, parsers = build_parser()
    if options.topic == "step":
        parser = Parser(prog="fxmem COMMAND", usage="fxmem COMMAND [OPTIONS]", add_help=False)
        parser.description = "The options of every step, for the verbs that run one. `--target` is of programs, too."
        parser.names_shared = False
        steps = (each for each in STEP if each not in INPUTS)
        parser.add_arguments((TARGET, TORCH, *BESIDE, *INPUTS, *steps, *LOOP, *COMPILE, *RANKS, *SHARDING, *GENERATION))
    elif options.topic is not None:
        if options.topic not in parsers:
            options.parser.error(
                f"argument topic: invalid choice: {options.topic!r} (choose from {', '.join(['step', *parsers])})"
            )
        parser = parsers[options.topic]
    return 0, parser.format_help()
