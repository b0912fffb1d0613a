"""What the terminal that stdout is, if it is one, can show."""

from __future__ import annotations

import os
import shutil
import sys


def columns() -> int:
    """Columns to lay text out for: `$COLUMNS`, else the terminal's, else 100."""
    return shutil.get_terminal_size((100, 24)).columns


def why_plain() -> str:
    """Why there should be no colour, in a few words; empty when there may be. The convention is that of
    no-color.org."""
    if os.environ.get("NO_COLOR"):
        return "NO_COLOR is set"
    if sys.stdout is None or not sys.stdout.isatty():
        return "stdout is no terminal"
    return "the terminal is dumb" if os.environ.get("TERM") == "dumb" else ""
