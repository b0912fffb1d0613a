"""Which cards does it fit?

Hold a step against every card of the catalogue. It is analysed once for each compute capability (nine times for all
cards), because that decides the kernels and their workspaces; so is a program (--run), and a report is held against
cards of its own capability. With --plan also the checkpoints with which it fits where it does not by itself. Exit code
4 if it fits none, 1 if that is not known.

    fxmem cards torchvision:resnet50 --batch 256
    fxmem cards hf:GPT2LMHeadModel --mode generate --batch 32 --prompt 512
    fxmem cards model.py:build --input 8x64 --only rtx4090,l40s --plan
"""

from __future__ import annotations

import argparse
import math

from fxmem.cli.options import HOST_MEMORY, SUBJECT, TARGET, TORCH, text_output
from fxmem.cli.output import layout, write_json
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import Progress
from fxmem.cli.step import analyze_subject, check_generation, check_host_memory, read_program
from fxmem.errors import UsageError

ARGUMENTS = (
    *(each for each in SUBJECT if each not in (TARGET, TORCH)),
    argument("--only CARD[,CARD]...", help="hold it against these alone; a JSON file describes a card of your own"),
    flag(
        "--plan",
        help="also the cheapest checkpoints with which it fits, for each card that is too small for the step as it is",
    ),
    HOST_MEMORY,
    flag("--time", help="the fastest first, by the estimated time of a step; else the smallest memory first"),
    *text_output("result"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem cards`; return the exit code and the text for stdout."""
    from fxmem.hardware import catalogue
    from fxmem.show.text.fits import fits_table

    program = read_program(options)
    check_generation(options)
    known = (name for name in catalogue.names() if name != "cpu")
    given = None if options.only is None else [name.strip() for name in options.only.split(",")]
    beside = getattr(options, "beside", "")
    names = [f"{name}{beside}" for name in given or known] if given or beside else None
    if options.plan and options.mode != "train":
        raise UsageError(
            "expected --plan with a training step: at inference nothing is saved for backward, so there is nothing "
            "to checkpoint"
        )
    if options.host_memory is not None and not options.plan:
        raise UsageError("expected --host-memory with --plan: it is where plans put results")
    check_host_memory(options, of_model=True)
    for name in names or ():  # a card that is none is found before the work is done
        if catalogue.target(name).memory_bytes is None:
            raise UsageError(f"expected --only with cards whose memory is known, got {name!r}")
    options.target = "h100" if names is None else names[0]
    with Progress(options.quiet) as progress:
        analysis = analyze_subject(options, program, progress)
        from fxmem.whatif import card_fit

        fits = card_fit.cards(
            analysis, names=names, plans=options.plan, host_memory=options.host_memory, progress=progress.found
        )
    if options.time:
        by_time = sorted(fits.points, key=lambda each: math.inf if each.time is None else each.time.seconds)
        fits = fits.model_copy(update={"points": tuple(by_time)})
    text = write_json(options, fits.model_dump_json, lambda: fits_table(fits, **layout(options)))
    return 0 if fits.fitting else 1 if any(each.fits is None for each in fits.points) else 4, text
