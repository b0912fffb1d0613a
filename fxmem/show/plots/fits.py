"""What fits, plotted: bytes against size, and memory against time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fxmem.records.fits import FITS_WORDS, NONE, Fits, Point
from fxmem.records.units import format_bytes, format_seconds
from fxmem.show.plots.xy_plot import (
    EDGE,
    NARROWEST,
    ROW,
    SIZE,
    STYLE,
    PlotArea,
    XYDot,
    XYLine,
    lay_out,
    round_step,
    xy_plot,
)
from fxmem.show.svg import document, fit, text

# --- the peak against the size of an input, and where it stops fitting ------------------------------------------------


_RIGHT_OF_SIZES = 74.0


def sizes_svg(curve: Fits, *, width: float = 720.0, height: float = 300.0, name: str = "fxmem-sizes") -> str:
    """Plot the curve as one self-contained SVG document. Each analysed size has a dot, hollow where it does not fit.

    Args:
        curve: from `fxmem.max_batch`.
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id.
    """
    width = max(width, NARROWEST)
    ran = [point for point in curve.points if point.counted_bytes is not None]
    measure = "allocated" if any(point.allocated_bytes is not None for point in ran) else "requested"
    highest = [max(point.counted_bytes or 0, point.reserved_bytes or 0) for point in ran]
    dim = curve.space.dim if curve.space.dim in ("batch", "seq") else "size"
    room = curve.points[0].room_bytes
    usable = min(curve.largest or 0, curve.positions or curve.largest or 0)
    answer = f"largest {dim}: {usable}" if curve.largest is not None else f"no {dim} fits"
    title = f"{curve.model}: {answer} on {curve.target.name}"
    most, scale = max((point.size or 0 for point in ran), default=1) * 1.03, max([room, *highest]) * 1.05
    area, head = lay_out(width, height, _RIGHT_OF_SIZES, title, _line(curve, measure), most=most, scale=scale)
    foot = area.bottom + 3 * ROW
    note = "Filled: fits. Hollow: does not. Each dot is an analysis."
    parts = [
        *head,
        *_plot(curve, ran, area, measure, dim),
        text(EDGE, foot + 4.0, fit(note, SIZE, width - 2 * EDGE), "muted"),
    ]
    words = (f"Peak against {dim}: {answer}", "; ".join(_words(point, dim) for point in ran) or "no size could run")
    return document(STYLE, (width, foot + EDGE + 4.0), words, parts, id=name)


def _plot(curve: Fits, ran: Sequence[Point], area: PlotArea, measure: str, dim: str) -> Iterator[str]:
    widest = max((point.size or 0 for point in ran), default=1)
    step = max(round(round_step(widest, 6)), 1)
    reserved = [(point.size or 0, point.reserved_bytes) for point in ran if point.reserved_bytes is not None]
    counted = [(point.size or 0, point.counted_bytes or 0) for point in ran]
    # The answer is drawn last, so that no neighbour covers it.
    return xy_plot(
        area,
        steps=[(size, str(size)) for size in range(0, widest + 1, step)],
        quantity=dim,
        limit=("budget" if curve.space.is_budget else "room", curve.points[0].room_bytes),
        lines=[XYLine(reserved, "total reserved", "reserved"), XYLine(counted, "after", measure)],
        dots=[
            XYDot(
                point.size or 0,
                point.counted_bytes or 0,
                _words(point, dim),
                is_filled=bool(point.fits),
                is_chosen=point.size == curve.largest,
                label=str(point.size) if point.size == curve.largest else "",
                drops=point.size == curve.largest,
            )
            for point in sorted(ran, key=lambda point: point.size == curve.largest)
        ],
    )


def _line(curve: Fits, measure: str) -> str:
    if curve.per_sample_bytes is None or curve.constant_bytes is None:
        return f"{measure} bytes"
    sign, constant = "-" if curve.constant_bytes < 0 else "+", format_bytes(abs(curve.constant_bytes))
    return f"{measure}: {format_bytes(curve.per_sample_bytes)} each {sign} {constant} constant, near the largest"


def _words(point: Point, dim: str) -> str:
    reserved = "" if point.reserved_bytes is None else f", {format_bytes(point.reserved_bytes)} reserved"
    return f"{dim} {point.size}: {format_bytes(point.counted_bytes)}{reserved}, {FITS_WORDS[point.fits]}"


# --- memory against time for a sample or token ------------------------------------------------------------------------


_RIGHT_OF_FRONT = 24.0
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
    area, head = lay_out(width, height, _RIGHT_OF_FRONT, title, note, most=most + edge, least=least - edge, scale=scale)
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
            lines=[XYLine(points[::-1], "after", is_stairs=True)],
            dots=[
                XYDot(
                    x,
                    each.counted_bytes or 0,
                    _describe(each, sweep.item),
                    is_filled=each in front,
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
