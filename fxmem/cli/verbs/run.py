"""Does your own training script fit, untouched?

Run a Python program as it is on a pretended card, stop it after a few optimizer steps, and say how much memory each
step takes. The program is trusted code. What it writes it reads back, but your files stay as they are, and what it
would send is not sent.

    fxmem run --target rtx4090 train.py --batch-size 16
    fxmem run --ranks 8 -m package.train
"""

from __future__ import annotations

import argparse
import contextlib

from fxmem.cli.given_program import name_program
from fxmem.cli.options import BESIDE, QUIET, RANKS, REPORT_OUTPUT, TARGET, TORCH
from fxmem.cli.output import check_folder, next_for_program, write_report
from fxmem.cli.parser import argument, flag, number, repeatable
from fxmem.cli.progress import StatusLine, say
from fxmem.cli.step import read_ranks, require_torch
from fxmem.errors import UsageError
from fxmem.records.units import AS_IS, MAX_OPERATORS, STEADY, STEPS

ARGUMENTS = (
    TARGET,
    TORCH,
    *BESIDE,
    number("--steps", f"optimizer steps after which to stop (default {STEPS})", least=1),
    argument(
        "--until",
        choices=("steady", "end"),
        help="stop when a step allocates no more than the one before and leaves as much alive, at the latest after "
        f"--steps (default {STEADY}); or let the program run to its end",
    ),
    argument(
        "--oom",
        choices=("raise", "continue"),
        default="raise",
        help="where the card has no more memory: raise the error there, or go on and say how much is missing",
    ),
    argument(
        "--compile as-is",
        choices=(AS_IS,),
        help="compile what the program compiles, as inductor would for the target (default: run it as eager code)",
    ),
    repeatable(
        "--value FILE:LINE=VALUE",
        help="the value that the program reads there, instead of a made-up one: a number, a list, true, false, or "
        "FILE.npy, FILE.pt; may be repeated",
    ),
    argument(
        "--routing balanced|worst|FILE",
        default="balanced",
        help="how many tokens each expert of a mixture gets: its equal share (default), all tokens of all ranks for "
        "this rank's experts, or as a JSON file says, a list, or a list for each layer by its module's name",
    ),
    argument(
        "--host 64GiB|none",
        help="the host's memory: whether the program fits it, and until when what it keeps there does (exit code 4); "
        "none: nothing is measured there, and two equal runs answer the same to the byte",
    ),
    flag("--strict", "exit code 1 if the program decided anything by a number that was made up"),
    number("--max-operators", "stop within a step of more operators than this", least=1, default=MAX_OPERATORS),
    argument("--keep-files DIR", help="move what the program wrote to this folder, instead of dropping it"),
    flag("--write", "let the program write its files for real"),
    flag("--network", "let the program send what it would send: pushes to a hub, trackers, posts"),
    *RANKS,
    argument(
        "--backend dask:tcp://HOST:PORT",
        default="loky",
        help="with --ranks: where the ranks after the first run, a dask cluster that finds the program at the same "
        "path (default: loky, processes of this machine)",
    ),
    QUIET,
    *REPORT_OUTPUT,
    flag("-m", "PROGRAM is a module's name, as for python -m"),
    flag("-u", "taken as python takes it, and changes nothing: what is printed is not kept back"),
    argument("program PROGRAM", help="the script to run"),
    argument("arguments ...", nargs=argparse.REMAINDER, help="its own arguments"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem run`; return the exit code and the text for stdout."""
    from fxmem.hardware import catalogue
    from fxmem.memory.budget import parse_bytes

    if options.steps is not None and options.until == "end":
        raise UsageError("expected --steps or --until end, not both")
    if options.keep_files is not None:
        if options.write:
            raise UsageError("expected --keep-files or --write, not both: what is written for real is not moved")
        check_folder("--keep-files", options.keep_files)
    host = None if options.host in (None, "none") else parse_bytes(options.host, "--host").nbytes
    ranks, rank = read_ranks(options)
    card = catalogue.target(options.target)
    require_torch()
    from fxmem.simulation.processes.executor import read_backend, use_backend
    from fxmem.simulation.program import (
        IsolationSettings,
        Launch,
        RunSettings,
        find_started,
        find_unread,
        launch_apart,
        read_given,
        read_rule,
    )

    given = read_given(options.value)
    typed = name_program(options.program, *options.arguments)
    program = find_started(Launch(options.program, tuple(options.arguments), options.m, ranks, rank, typed=typed))
    if program.launcher:
        alone = "the first runs here, alone; --ranks N runs it as one of N"
        say(f"{program.launcher}: {alone if program.ranks is None else f'run as with --ranks {program.ranks}'}")
    settings = RunSettings(
        *(options.steps, options.until, options.oom, options.max_operators, options.compile),
        given=given,
        rule=read_rule(options.routing),
        host_bytes=host,
        measures_host=options.host != "none",
        reads_epoch=True,
        watch=contextlib.nullcontext if options.quiet else StatusLine,
    )
    with use_backend(read_backend(options.backend)):
        isolating = IsolationSettings(options.write, options.network, options.keep_files)
        step = launch_apart(program, card, settings, isolating)
    words = (*(["-m"] if options.m else []), options.program, *options.arguments)
    # Which runs the program by itself, as eager code.
    following = "" if options.compile else next_for_program(card.spelling, words, (ranks, rank))
    code, text = write_report(options, step.report(), step.timeline, following)
    if step.peak.at_least and options.oom == "raise":
        say(f"the program runs out of memory on {card.name}; --oom continue says how much it would take")
    run = step.profile.step.program
    for place in find_unread(given, run):
        say(
            f"--value {place}: nothing was read there that has so many numbers; `Made up` lists what is read, and where"
        )
    decided = [each for each in (run.made_up if run else ()) if each.kind == "decided"]
    if options.strict and decided:
        say(f"the program decides by made-up numbers: {decided[0].what} at {decided[0].place or 'no line of its own'}")
        return 1, text
    return code, text
