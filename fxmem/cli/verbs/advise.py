"""What to change, and what is each change worth?

Try each change that may save memory on a stand-in of the model, analyse the changed step, and rank the changes by what
they free. With --budget also find the cheapest set of them that keeps it; exit code 4 if none does. A program (--run)
runs again with each change; one with a pipeline of diffusers with less of its weights on the card, too.

    fxmem advise torchvision:resnet50 --target rtx4090 --quick
    fxmem advise hf:GPT2LMHeadModel --mode generate --prompt 512 --new 128
    fxmem advise model.py:build --input 8x64 --budget 8GiB
    fxmem advise --target rtx4090 --run train.py --batch-size 16
    fxmem advise --target rtx4090 diffusers:FLUX.1-dev
    fxmem advise --target rtx4090 --patch fix.diff --run train.py
"""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING

from fxmem.cli.options import HOST_MEMORY, RUNNABLE, text_output
from fxmem.cli.output import check_file, layout, write_file, write_json
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import Progress, say
from fxmem.cli.step import (
    analyze_subject,
    check_generation,
    check_host_memory,
    read_budget,
    read_program,
    refuse_compile,
)
from fxmem.errors import UsageError
from fxmem.records.units import format_bytes, percent

if TYPE_CHECKING:
    from fxmem.records.advice import Suggestion

ARGUMENTS = (
    *RUNNABLE,
    argument("--budget BYTES|8GiB|60%", help="what the step may take; a share is of its peak as it is"),
    flag("--no-plans", help="leave out checkpoint plans, which take the longest"),
    HOST_MEMORY,
    flag("--quick", help="try only changes of one line that often decide, and no checkpoints"),
    argument(
        "--patch FILE.diff",
        help="write what changes of the program's own lines do together as a patch for `git apply`; it ran with it",
    ),
    *text_output("advice"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem advise`; return the exit code and the text for stdout."""
    from fxmem.show.text import advice as advice_reporting

    check_generation(options)
    refuse_compile(options, "advice is about eager code")
    budget = read_budget(options)
    program = read_program(options)
    if options.patch is not None:
        if program is None:
            raise UsageError("expected --patch with a program (--run train.py), whose own lines it is of")
        check_file(options, "--patch", options.patch, (".diff", ".patch"))
    check_host_memory(options, of_model=program is None)
    with Progress(options.quiet) as progress:
        step = analyze_subject(options, program, progress, again=True)
        from fxmem.whatif.advice import make_bench, try_changes

        bench = make_bench(step, options.host_memory)
        advice = try_changes(
            bench,
            budget,
            plans=not options.no_plans,
            quick=options.quick,
            progress=progress,
            found=lambda each: progress.found(_describe(each, step.peak.counted_bytes)),
            interruptible=True,
            patch=options.patch is not None,
        )
    if options.patch is not None:
        if advice.patched is None:
            say(f"no {options.patch}: no change of the program's own lines that is known helps")
        else:
            write_file(options, options.patch, advice.patched.patch)
    text = write_json(options, advice.model_dump_json, lambda: advice_reporting.table(advice, **layout(options)))
    short = (
        advice.budget_bytes is not None
        and advice.before.counted_bytes > advice.budget_bytes
        and advice.together is None
    )
    return 128 + signal.SIGINT if advice.interrupted else 4 if short else 0, text


def _describe(each: Suggestion, before: int) -> str:
    """A suggestion in one line, for the wait until all are tried."""
    share = f" ({percent(each.saved_bytes, before)})" if each.saved_bytes else ""
    saved = f"saves {format_bytes(each.saved_bytes)}{share}" if each.saved_bytes else "lowers what is reserved"
    return f"{each.title}: {saved}"
