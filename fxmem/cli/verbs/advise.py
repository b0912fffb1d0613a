"""`fxmem advise`."""

from __future__ import annotations

import argparse

from fxmem.cli.options import ANALYSIS, text_output
from fxmem.cli.output import check_output, layout, write_json
from fxmem.cli.parser import argument, flag
from fxmem.cli.progress import Progress
from fxmem.cli.step import analyze_model, read_budget

BRIEF = "what to change, and what each change is worth"
DESCRIPTION = (
    "Try each change that may save memory on a stand-in of the model, analyse the changed step, and rank the changes "
    "by what they free. With --budget also find the cheapest set of them that keeps it; exit code 4 if none does."
)

ARGUMENTS = (
    *ANALYSIS,
    argument("--budget", metavar="BYTES|8GiB|60%", help="what the step may take; a share is of its peak as it is"),
    flag("--no-plans", help="leave out checkpoint plans, which take the longest"),
    *text_output("advice"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem advise`; return the exit code and the text for stdout."""
    from fxmem.show.text import advice as advice_reporting

    check_output(options)
    budget = read_budget(options)
    with Progress(options.quiet) as progress:
        analysis = analyze_model(options, progress)
        from fxmem.whatif.advice import advise

        advice = advise(analysis, budget, plans=not options.no_plans, progress=progress)
    text = write_json(options, advice.model_dump_json(), lambda: advice_reporting.table(advice, **layout(options)))
    short = (
        advice.budget_bytes is not None
        and advice.before.counted_bytes > advice.budget_bytes
        and advice.together is None
    )
    return 4 if short else 0, text
