"""What verbs write: files checked before the work is done, JSON or text on stdout."""

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

__all__ = [
    "Layout",
    "add_output",
    "add_text",
    "add_width",
    "check_file",
    "check_output",
    "check_writable",
    "json_or",
    "layout",
    "reported",
]

_NARROWEST = 60
"""Columns that the table needs."""


def add_output(parser: argparse.ArgumentParser) -> None:
    """The table, and the files written beside it."""
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the module tree to show")
    add_text(parser, "report")
    parser.add_argument(
        "--svg", metavar="FILE.svg", help="also write the annotated graph; `fxmem graph` has more to choose"
    )


def add_text(parser: argparse.ArgumentParser, document: str, text: str = "table") -> None:
    """What is printed, and the JSON that may take its place."""
    add_width(parser, text)
    parser.add_argument(
        "--json", metavar="FILE|-", help=f"write the {document} as JSON; `-` writes it to stdout instead of the {text}"
    )


def add_width(parser: argparse.ArgumentParser, text: str = "table") -> None:
    """How wide what is printed may be."""
    parser.add_argument("--width", type=int, metavar="COLUMNS", help=f"width of the {text} (default: the terminal's)")


class Layout(TypedDict):
    """How a report is laid out for where it is printed."""

    width: int
    """Columns."""
    color: bool


def layout(options: argparse.Namespace) -> Layout:
    """As `--width` and the terminal say."""
    return {"width": columns() if options.width is None else options.width, "color": not why_plain()}


def check_output(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before the work is done, not after."""
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
    if os.path.exists(path) and not os.path.isfile(
        path
    ):  # a folder; or a device, which the file moved into place would replace
        raise UsageError(f"expected {option} to name a file{or_else}, got {name!r}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"expected {option} to name a file in a folder that can be written, got {name!r}")


def check_file(option: str, name: str, endings: Sequence[str]) -> None:
    """Refuse a file whose ending does not say a known format, or that cannot be written."""
    if Path(name).suffix not in endings:
        raise UsageError(f"expected {option} to name a file that ends in {' or '.join(endings)}, got {name!r}")
    check_writable(option, name)


def reported(options: argparse.Namespace, report: Report, timeline: Timeline) -> str:
    """Write what `add_output` asked for; the text for stdout."""
    from fxmem.show import text as reporting

    if options.svg is not None:
        _write_svg(options, report, timeline)
    return json_or(
        options,
        report.model_dump_json(),
        lambda: reporting.table(report, timeline, depth=options.depth, **layout(options)),
    )


def _write_svg(options: argparse.Namespace, report: Report, timeline: Timeline) -> None:
    from fxmem.records.files import write_text
    from fxmem.show import graph

    write_text(Path(options.svg), graph.svg(report, timeline))


def json_or(options: argparse.Namespace, document: str, text: Callable[[], str]) -> str:
    """The JSON if it is for stdout, else the text; the JSON is then in its file, if one was named."""
    if options.json == "-":
        return _ascii(document)
    if options.json is not None:
        from fxmem.records.files import write_text

        write_text(Path(options.json), document + "\n")
    return text()


def _ascii(document: str) -> str:
    """The same JSON for a stdout of any encoding; beyond ASCII there is nothing in it but strings."""
    return re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], document)
