"""`fxmem doctor`."""

from __future__ import annotations

import argparse

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "what is installed and what is missing"
DESCRIPTION = "Say what this environment can do and how to get what it lacks."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    parser.add_argument("--targets", action="store_true", help="list the catalogue of cards instead")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.cli import environment

    return 0, environment.catalogue() if options.targets else environment.report()
