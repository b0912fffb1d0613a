"""A drawing as PNG or PDF, converted from its SVG by vl-convert.

Its wheel is complete (resvg and fonts), so that no library of the system is needed. It draws the SVG itself, with head
and legend. It runs in a process of its own under a time limit.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import Literal, get_args

from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError

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


def require_image(form: str) -> None:
    """Check that a drawing can be written in this format here.

    Raises:
        UsageError: there is no such format.
        EnvironmentLacksError: vl-convert is not installed.
    """
    if form not in get_args(Format):
        raise UsageError(f"expected a format of {', '.join(get_args(Format))}; got {form!r}")
    if importlib.util.find_spec("vl_convert") is None:
        raise EnvironmentLacksError(
            f"expected vl-convert to write .{form}, which is not here: pip install 'fxmem[image]'. A .svg needs nothing"
        )


def convert(form: Format, drawing: str) -> bytes:
    """The bytes of a PNG, or of a one-page PDF, of a drawing as SVG.

    A PNG has two pixels to one of the SVG where it is not too long for that.

    Raises:
        UsageError: there is no such format.
        EnvironmentLacksError: the converter is not there.
        AnalysisError: it failed.
    """
    require_image(form)
    sides = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', drawing)
    zoom = min(_ZOOM, _LONGEST / max(map(float, sides.groups()))) if sides and form == "png" else 1.0
    command = [sys.executable, "-P", "-c", _WORKER, form, f"{zoom:.4f}"]
    failed = "answered what is none"
    try:
        done = subprocess.run(command, input=drawing.encode(), capture_output=True, timeout=TIME_LIMIT, check=False)
        if done.returncode == 0 and done.stdout.startswith(_MAGIC[form]):
            return done.stdout
        if done.returncode != 0:
            complaint = "".join(
                f": {line[:200]}" for line in done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            )
            failed = f"failed with exit code {done.returncode}{complaint}"
    except subprocess.TimeoutExpired:
        failed = f"took longer than {TIME_LIMIT:g} s"
    raise AnalysisError(f"expected a .{form}, but vl-convert {failed}; write .svg instead")
