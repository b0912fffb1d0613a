"""What verbs write: files, which are checked before the work, and JSON or text on stdout."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from fxmem.errors import UsageError
from fxmem.show.terminal import columns, why_plain

if TYPE_CHECKING:
    from fxmem.records.profile import Report, Timeline

_NARROWEST = 60
"""Columns that the table needs."""


class TextLayout(TypedDict):
    """How text is laid out for the terminal: the keyword arguments of every table."""

    width: int
    """Columns."""
    color: bool


def layout(options: argparse.Namespace) -> TextLayout:
    """Lay text out as `--width` and the terminal ask."""
    return {"width": columns() if options.width is None else options.width, "color": not why_plain()}


def check_output(options: argparse.Namespace) -> None:
    """Refuse what cannot be written, before the work and not after it."""
    width, depth = getattr(options, "width", None), getattr(options, "depth", None)
    if width is not None and width < _NARROWEST:
        raise UsageError(f"expected --width of at least {_NARROWEST} columns, got {width}")
    if depth is not None and depth < 0:
        raise UsageError(f"expected --depth of at least 0, got {depth}")
    if options.json is not None and options.json != "-":
        check_writable("--json", options.json, ", or - for stdout")
    if getattr(options, "svg", None) is not None:
        check_file("--svg", options.svg, (".svg",))


def check_writable(option: str, name: str, or_else: str = "") -> None:
    """Refuse a file that cannot be written."""
    path = Path(name).absolute()
    if not os.path.isdir(path.parent):
        raise UsageError(f"expected {option} to name a file in a folder that exists, got {name!r}")
    # A folder; or a device, which the file moved into place would replace.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"expected {option} to name a file{or_else}, got {name!r}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"expected {option} to name a file in a folder that can be written, got {name!r}")


def check_file(option: str, name: str, endings: Sequence[str]) -> None:
    """Refuse a file with another ending, or one that cannot be written."""
    if Path(name).suffix not in endings:
        raise UsageError(f"expected {option} to name a file that ends in {' or '.join(endings)}, got {name!r}")
    check_writable(option, name)


def write_report(options: argparse.Namespace, report: Report, timeline: Timeline) -> str:
    """Write the files that `REPORT_OUTPUT` names; return the text for stdout."""
    from fxmem.show import text as reporting

    if options.svg is not None:
        from fxmem.records.files import write_text
        from fxmem.show import graph

        write_text(Path(options.svg), graph.render(report, timeline).svg)

    def table() -> str:
        return reporting.table(report, timeline, depth=options.depth, **layout(options))

    return write_json(options, report.model_dump_json(), table)


def write_json(options: argparse.Namespace, document: str, text: Callable[[], str]) -> str:
    """Write the document where `--json` asks; return the text for stdout, which is the document for `-`."""
    if options.json == "-":
        return _ascii(document)
    if options.json is not None:
        from fxmem.records.files import write_text

        write_text(Path(options.json), document + "\n")
    return text()


def _ascii(document: str) -> str:
    """Escape what is not ASCII, for a stdout of any encoding; JSON has it in strings only."""
    return re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], document)
