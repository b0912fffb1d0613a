"""What is installed and what is missing.

Say what this environment can do and how to get what it lacks.

    fxmem doctor
    fxmem doctor --targets
    fxmem doctor --fetch cudnn 9.8
"""

from __future__ import annotations

import argparse

from fxmem.cli.parser import argument, flag

ARGUMENTS = (
    flag("--targets", help="list the catalogue of cards instead"),
    argument(
        "--fetch",
        nargs=2,
        metavar=("cudnn", "VERSION"),
        help="install this cuDNN in fxmem's own folder (about 2 GB), from the package index, to ask it where a release "
        "of torch has it",
    ),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem doctor`; return the exit code and the text for stdout."""
    from fxmem.cli import environment

    if options.fetch is not None:
        return 0, environment.fetch(*options.fetch)
    return 0, environment.catalogue() if options.targets else environment.report()
