"""`fxmem schema`."""

from __future__ import annotations

import argparse

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "JSON Schema of what fxmem writes"
DESCRIPTION = "Print the JSON Schema of one of fxmem's records."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    parser.add_argument("name", nargs="?", help="which one; without it, the names")


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    from fxmem.records import schemas

    return 0, "\n".join(schemas.RECORDS) if options.name is None else schemas.text(options.name)
