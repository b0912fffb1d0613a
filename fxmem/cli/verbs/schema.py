"""JSON Schema of what fxmem writes.

Print the JSON Schema of one of fxmem's records.

    fxmem schema report
"""

from __future__ import annotations

import argparse

from fxmem.cli.parser import argument

ARGUMENTS = (argument("name", nargs="?", help="which one; without it, the names"),)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem schema`; return the exit code and the text for stdout."""
    from fxmem.records import schemas

    return 0, "\n".join(schemas.RECORDS) if options.name is None else schemas.text(options.name)
