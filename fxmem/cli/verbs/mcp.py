"""Tools for a coding agent, over stdin and stdout.

Serve the Model Context Protocol over stdin and stdout: the tools predict, explain, advise, plan, max_batch and compare.
Scripts are run in the folder alone that it is started for; their files stay as they are. An agent starts it; needs pip
install 'fxmem[mcp]'.

    fxmem mcp
    fxmem mcp ~/project
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from fxmem.cli.parser import argument
from fxmem.errors import EnvironmentLacksError, UsageError

ARGUMENTS = (argument("folder FOLDER", nargs="?", default=".", help="whose scripts may be run; the working directory"),)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem mcp` until its client leaves; return the exit code and the text for stdout."""
    if importlib.util.find_spec("mcp") is None:
        raise EnvironmentLacksError("expected the package mcp, which is not installed: pip install 'fxmem[mcp]'")
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UsageError(f"expected a folder, got {options.folder!r}")
    from fxmem.cli.tools.server import serve

    serve(folder.resolve())
    return 0, ""
