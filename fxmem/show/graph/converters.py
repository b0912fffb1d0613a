"""A drawing as PNG or PDF, by whatever can turn one into the other. Nothing that fxmem depends on can; each is a
program of its own, or a package.

`rsvg-convert` (librsvg) and CairoSVG convert the SVG itself. Graphviz, where neither is there, draws the labelled DOT
source anew: the same graph in the same colours, with a title instead of the head and the legend.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from typing import Literal, get_args

from fxmem.errors import AnalysisError, EnvironmentLacksError
from fxmem.show.graph.graphviz_layout import Program
from fxmem.show.graph.subprocess_worker import WorkerFailedError, answer

__all__ = ["TIME_LIMIT", "Format", "convert", "converters", "require"]

Format = Literal["png", "pdf"]

TIME_LIMIT = 60.0
"""Seconds that a converter may take."""

_Converter = Literal["rsvg-convert", "cairosvg", "dot", "pygraphviz"]

_OF_SVG: tuple[_Converter, ...] = ("rsvg-convert", "cairosvg")
_ZOOM = 2.0
"""Pixels of a PNG to one of the SVG, so that it can be printed."""
_POINTS = 72.0
_LONGEST = 32_000
"""Pixels of a PNG's side at most; cairo, which all of these draw with, refuses 32,768."""
_HOW: dict[_Converter, str] = {
    "rsvg-convert": "rsvg-convert on PATH (librsvg)",
    "cairosvg": "CairoSVG: pip install cairosvg",
    "dot": "`dot` on PATH (Graphviz: https://graphviz.org)",
    "pygraphviz": "pygraphviz: pip install pygraphviz",
}
_PYGRAPHVIZ = (
    "import sys, pygraphviz; "
    "graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode()); "
    "graph.graph_attr['dpi'] = sys.argv[2]; "
    "sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog='dot'))"
)
_CAIROSVG = (
    "import sys, cairosvg; "
    "convert = {'png': cairosvg.svg2png, 'pdf': cairosvg.svg2pdf}[sys.argv[1]]; "
    "convert(bytestring=sys.stdin.buffer.read(), write_to=sys.stdout.buffer, scale=float(sys.argv[2]))"
)
_MAGIC: dict[Format, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-"}


def converters(*, redrawn: bool = True) -> tuple[Program, ...]:
    """All that can make a PNG or PDF, in the order in which they are tried; `redrawn`: those too that draw the graph
    anew."""
    return tuple(
        Program(each, _is_here(each), _HOW[each]) for each in get_args(_Converter) if redrawn or each in _OF_SVG
    )


def require(form: Format, *, redrawn: bool) -> None:
    """Raises EnvironmentLacksError, with what to install, if no converter is there."""
    found = converters(redrawn=redrawn)
    if not any(each.available for each in found):
        raise EnvironmentLacksError(
            f"expected one of these to write .{form}, and none is here: {'; '.join(each.how for each in found)}. A "
            f".svg needs nothing"
        )


def convert(form: Format, svg: Callable[[], str], dot: Callable[[], str] | None) -> bytes:
    """The bytes of a PNG or PDF.

    Args:
        form: which.
        svg: makes the drawing, for a converter of SVG.
        dot: makes its DOT source, for Graphviz; None: Graphviz is not to draw it.

    Raises:
        EnvironmentLacksError: there is no converter.
        AnalysisError: each of those that are there failed.
    """
    require(form, redrawn=dot is not None)
    failures: list[str] = []
    for program in converters(redrawn=dot is not None):
        if not program.available:
            continue
        try:
            if program.name in _OF_SVG:
                return _checked(program.name, form, _from_svg(program.name, form, svg()))
            if dot is not None:
                return _checked(program.name, form, _from_dot(program.name, form, dot()))
        except WorkerFailedError as error:
            failures.append(str(error))
    raise AnalysisError(f"expected a converter to write .{form}: {'; '.join(failures)}; write .svg instead")


def _from_svg(name: str, form: Format, document: str) -> bytes:
    zoom = f"{_zoom(document) if form == 'png' else 1.0:.4f}"
    if name == "rsvg-convert":
        command = [shutil.which(name) or name, "--unlimited", "--format", form, "--zoom", zoom]
    else:
        command = [sys.executable, "-P", "-c", _CAIROSVG, form, zoom]
    return answer(name, command, document.encode(), limit=TIME_LIMIT)


def _from_dot(name: str, form: Format, source: str) -> bytes:
    dpi = f"{_POINTS * (_ZOOM if form == 'png' else 1.0):.0f}"
    program, package = (
        [shutil.which("dot") or "dot", f"-T{form}", f"-Gdpi={dpi}"],
        [sys.executable, "-P", "-c", _PYGRAPHVIZ, form, dpi],
    )
    command = program if name == "dot" else package
    return answer(name, command, source.encode(), limit=TIME_LIMIT)


def _zoom(document: str) -> float:
    """As sharp as can be drawn."""
    size = re.search(r'<svg [^>]*width="([\d.]+)" height="([\d.]+)"', document)
    longest = max(float(size[1]), float(size[2])) if size else 1.0
    return min(_ZOOM, _LONGEST / longest)


def _checked(name: str, form: Format, data: bytes) -> bytes:
    if not data.startswith(_MAGIC[form]):
        raise WorkerFailedError(f"{name} answered what is no {form.upper()}")
    return data


def _is_here(name: _Converter) -> bool:
    if name in ("rsvg-convert", "dot"):
        return shutil.which(name) is not None
    return importlib.util.find_spec(name) is not None
