"""Does a model's step fit? its peak, layer by layer.

Predict the memory of one training or inference step, of a generation, or of your own program.

    fxmem analyze torchvision:resnet50 --input 32x3x224x224 --target rtx4090
    fxmem analyze model.py:build --input x:8x1024:int64 --json report.json
    fxmem analyze hf:GPT2LMHeadModel --batch 8 --check
    fxmem analyze diffusers:FLUX.1-dev --target rtx4090
"""

from __future__ import annotations

import argparse

from fxmem.cli.options import REPORT_OUTPUT, SUBJECT
from fxmem.cli.output import next_for, write_report
from fxmem.cli.parser import argument
from fxmem.cli.step import read_step

ARGUMENTS = (
    *SUBJECT,
    argument("--budget BYTES|8GiB", help="what the step may take; exit code 4 if its peak is above"),
    *REPORT_OUTPUT,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem analyze`; return the exit code and the text for stdout."""
    from fxmem.memory.budget import parse_bytes

    budget = None if options.budget is None else parse_bytes(options.budget, "--budget")
    report, timeline = read_step(options)
    return write_report(options, report, timeline, next_for(options, report), budget)
