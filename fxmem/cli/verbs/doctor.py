"""`fxmem doctor`."""

from __future__ import annotations

import argparse

from fxmem.cli.parser import flag

BRIEF = "what is installed and what is missing"
DESCRIPTION = "Say what this environment can do and how to get what it lacks."

EXAMPLES = (
    "fxmem doctor",
    "fxmem doctor --targets",
)

ARGUMENTS = (flag("--targets", help="list the catalogue of cards instead"),)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem doctor`; return the exit code and the text for stdout."""
    from fxmem.cli import environment

    return 0, environment.catalogue() if options.targets else environment.report()
