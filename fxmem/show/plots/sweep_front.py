"""Memory against time for a sample or token: the points of a sweep that fit, and those that none beats in both."""

from __future__ import annotations

import math

from fxmem.records.fits import NONE, Fits, Point
from fxmem.records.units import format_bytes, format_seconds
from fxmem.show.plots.axes import EDGE, NARROWEST, ROW, SIZE, STYLE
from fxmem.show.plots.xy_plot import XYDot, XYLine, lay_out, xy_plot
from fxmem.show.svg import document, fit, text

_RIGHT = 24.0
_LISTED = 12
_APART = 16.0
"""Pixels between two numbers at least."""


def sweep_svg(sweep: Fits, *, width: float = 720.0, height: float = 320.0, name: str = "fxmem-sweep") -> str:
    """Plot what fits as one self-contained SVG document; a dot for each point, filled on the front.

    Args:
        sweep: from `fxmem.sweep`.
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id.
    """
    width = max(width, NARROWEST)
    front = sweep.front
    timed = [(math.log10(each.item_seconds), each) for each in sweep.fitting if each.item_seconds]
    least, most = min((x for x, _ in timed), default=0.0), max((x for x, _ in timed), default=1.0)
    edge = 0.05 * (most - least or 1.0)
    scale = max([each.counted_bytes or 0 for _, each in timed], default=1) * 1.05
    title = f"{sweep.model}: memory against time, {len(timed)} of {len(sweep.points)} points fit and have a time"
    note = "Filled: none beats it in both; its settings are listed below."
    area, head = lay_out(width, height, _RIGHT, title, note, most=most + edge, least=least - edge, scale=scale)
    points = [(math.log10(each.item_seconds or 1.0), each.counted_bytes or 0) for each in front]
    numbers: dict[str, str] = {}
    at = math.inf
    for number, (each, (x, _)) in enumerate(zip(front[:_LISTED], points, strict=False), 1):
        if at - area.x(x) >= _APART:
            numbers[each.model_dump_json()], at = str(number), area.x(x)
    powers = [digit * 10.0**power for power in range(math.floor(least), math.ceil(most) + 1) for digit in (1, 2, 5)]
    marks = [each for each in powers if area.least <= math.log10(each) <= area.most]
    room = width - 2 * EDGE
    parts = [
        *head,
        *xy_plot(
            area,
            steps=[(math.log10(each), format_seconds(each)) for each in marks],
            quantity=f"estimated time for a {sweep.item}",
            limit=None,
            lines=[XYLine(points[::-1], "after", is_stairs=True)],
            dots=[
                XYDot(
                    x,
                    each.counted_bytes or 0,
                    _describe(each, sweep.item),
                    is_filled=each in front,
                    is_chosen=False,
                    label=numbers.get(each.model_dump_json(), ""),
                )
                for x, each in timed
            ],
        ),
    ]
    y = area.bottom + 3 * ROW + 4.0
    for number, each in enumerate(front[:_LISTED], 1):
        parts.append(text(EDGE, y, fit(f"{number}. {_describe(each, sweep.item)}", SIZE, room)))
        y += ROW
    if len(front) > _LISTED:
        parts.append(text(EDGE, y, f"and {len(front) - _LISTED} more", "muted"))
        y += ROW
    spoken = "; ".join(_describe(each, sweep.item) for each in front) or "nothing that fits has a time"
    return document(STYLE, (width, y), ("Memory against time", spoken), parts, id=name)


def _describe(point: Point, item: str) -> str:
    words = [point.card]
    words += [
        f"{name} {value}" for name, value in (("batch", point.size), ("length", point.length)) if value is not None
    ]
    named = (("", point.precision), ("checkpoints ", point.checkpoints), ("mesh ", point.mesh))
    words += [f"{name}{value}" for name, value in named if value != NONE]
    time = "" if point.item_seconds is None else f", {format_seconds(point.item_seconds)} a {item}"
    cost = "" if point.cost is None else f", {point.cost:.3g} a step"
    return f"{' '.join(words)}: {format_bytes(point.counted_bytes)}{time}{cost}"
