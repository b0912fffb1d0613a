"""`fxmem advise`."""

from __future__ import annotations

import argparse

from fxmem.cli.options import Working, add_step, add_target, analyzed, parsed_budget
from fxmem.cli.output import add_text, check_output, json_or, layout

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "what to change, and what each change is worth"
DESCRIPTION = (
    "Try each change that may save memory on a stand-in of the model, analyse the changed step, and rank the changes "
    "by what they free. "
    "With --budget also find the cheapest set of them that keeps it; exit code 4 if none does."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser)
    add_target(parser)
    parser.add_argument(
        "--budget", metavar="BYTES|8GiB|60%", help="what the step may take; a share is of its peak as it is"
    )
    parser.add_argument("--no-plans", action="store_true", help="leave out checkpoint plans, which take the longest")
    add_text(parser, "advice")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.show.text import advice as advice_reporting

    check_output(options)
    budget = parsed_budget(options)
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        from fxmem.whatif.advice import advise

        advice = advise.advise(analysis, budget, plans=not options.no_plans, progress=progress)
    text = json_or(options, advice.model_dump_json(), lambda: advice_reporting.table(advice, **layout(options)))
    short = (
        advice.budget_bytes is not None
        and advice.before.counted_bytes > advice.budget_bytes
        and advice.together is None
    )
    return 4 if short else 0, text
