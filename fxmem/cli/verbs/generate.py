"""Does a generation fit, token by token?

Predict the memory of model.generate() of transformers: prefill and decode, allocated and reserved, whether it fits and
at which token it no longer does. A few tokens are recorded, the others are made by arithmetic; the allocator replays
every one.

    fxmem generate hf:GPT2LMHeadModel --prompt 512 --new 128 --batch 4
"""

from __future__ import annotations

import argparse

from fxmem.cli.options import BESIDE, GENERATION, INPUTS, KERNELS, MODEL, REPORT_OUTPUT, STEP, TARGET, TORCH
from fxmem.cli.output import next_for_report, write_report
from fxmem.cli.parser import number
from fxmem.cli.progress import Progress
from fxmem.cli.step import analyze_generation, check_generation, with_defaults

_OF_THE_STEP = ("--weights", "--precision", "--quantize", "--lora", "--inference-mode", "--quiet")

ARGUMENTS = (
    MODEL,
    *(each for each in INPUTS if each.names != ("--batch",)),
    number("--batch", "sequences at a time (default 1)", least=1),
    *GENERATION,
    *(each for each in STEP if each.names[0] in _OF_THE_STEP),
    *KERNELS,
    TARGET,
    TORCH,
    *BESIDE,
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem generate`; return the exit code and the text for stdout."""
    options = with_defaults(options, STEP, mode="generate")
    check_generation(options)
    with Progress(options.quiet) as progress:
        generation = analyze_generation(options, progress)
        report, timeline = generation.report(), generation.timeline
    return write_report(options, report, timeline, next_for_report(options.json or "-", report))
