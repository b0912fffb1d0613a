"""A drawing as PNG or PDF, converted from its SVG by vl-convert.

Its wheel is complete (resvg and fonts), so that no library of the system is needed. It draws the SVG itself, with head
and legend. It runs in a process of its own under a time limit.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Literal

from fxmem.errors import AnalysisError, EnvironmentLacksError
from fxmem.show.graph.subprocess_worker import WorkerFailedError, answer
from fxmem.show.graph.svg_document import Drawing

Format = Literal["png", "pdf"]

TIME_LIMIT = 60.0
"""Seconds that the conversion may take."""
_ZOOM = 2.0
"""Pixels of a PNG to one of the SVG, so that it can be printed."""
_LONGEST = 32_000
"""Pixels of a PNG's side at most; many viewers refuse 32,768."""
_WORKER = """
import sys, vl_convert

convert = {"png": vl_convert.svg_to_png, "pdf": vl_convert.svg_to_pdf}[sys.argv[1]]
try:
    sys.stdout.buffer.write(convert(sys.stdin.buffer.read().decode(), scale=float(sys.argv[2])))
except Exception as error:
    sys.exit(str(error).partition("\\n")[0])  # a trace of its own code follows
"""
_MAGIC: dict[Format, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-"}


def require(form: Format) -> None:
    """Raise EnvironmentLacksError, with what to install, if the converter is not there."""
    if importlib.util.find_spec("vl_convert") is None:
        raise EnvironmentLacksError(
            f"expected vl-convert to write .{form}, which is not here: pip install 'fxmem[image]'. A .svg needs nothing"
        )


def convert(form: Format, drawing: Drawing) -> bytes:
    """The bytes of a PNG, as sharp as possible, or of a one-page PDF.

    Raises:
        EnvironmentLacksError: the converter is not there.
        AnalysisError: it failed.
    """
    require(form)
    zoom = min(_ZOOM, _LONGEST / max(drawing.width, drawing.height)) if form == "png" else 1.0
    command = [sys.executable, "-P", "-c", _WORKER, form, f"{zoom:.4f}"]
    try:
        data = answer("vl-convert", command, drawing.svg.encode(), limit=TIME_LIMIT)
    except WorkerFailedError as error:
        raise AnalysisError(f"expected a .{form}, but {error}; write .svg instead") from error
    if not data.startswith(_MAGIC[form]):
        raise AnalysisError(f"expected a .{form}, but vl-convert answered what is none; write .svg instead")
    return data
