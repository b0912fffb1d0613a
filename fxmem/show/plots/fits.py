"""Answers, plotted: what plans leave of the peak, bytes against size, and memory against time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxmem.records.fits import FITS_WORDS, NONE, Fits, Point
from fxmem.records.units import format_bytes, format_seconds
from fxmem.show.plots.xy_plot import (
    EDGE,
    LEFT,
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

# --- plans compared: what each leaves of the peak, and what it costs --------------------------------------------------


_RIGHT_OF_PLANS = 64.0
_APART = 16.0
"""Pixels between two numbers on the plot at least."""
_MOST_LISTED = 24
_MOST_COSTS = 6
"""Numbers on the axis of extra compute above 0."""


class CurveDot(NamedTuple):
    """One plan."""

    extra: float | None
    """FLOPs run again over the forward's; None where they are not known."""
    peak_bytes: int
    label: str
    chosen: bool = False


def curve_svg(
    points: Sequence[CurveDot | tuple[float | None, int, str, bool]],
    *,
    budget_bytes: int | None = None,
    measure: str = "bytes",
    width: float = 720.0,
    height: float = 280.0,
    name: str = "fxmem-curve",
) -> str:
    """Plot peak against extra compute as one self-contained SVG document, a dot per plan.

    The line joins the plans that no other beats in both. Every dot has a number where there is room for it, and the
    list below says what it is. A plan whose cost is not known stands in the list alone.

    Args:
        points: the plans as `CurveDot`s or as tuples of its fields, the unplanned step among them if it is to be shown.
        budget_bytes: what the peak has to stay within, if anything.
        measure: what the bytes are: requested, allocated, ...
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id.
    """
    width = max(width, NARROWEST)
    dots = [CurveDot(*point) for point in points]
    dots.sort(key=lambda dot: (dot.extra is None, dot.extra or 0.0, -dot.peak_bytes))
    costs = [dot.extra for dot in dots if dot.extra is not None]
    area = PlotArea(
        left=LEFT,
        top=EDGE + ROW + 8.0,
        width=width - LEFT - _RIGHT_OF_PLANS,
        height=height,
        most=max(costs, default=0.0) * 1.05 or 0.01,
        least=min([0.0, *(cost * 1.05 for cost in costs)]),
        scale=max([dot.peak_bytes for dot in dots] + [budget_bytes or 0, 1]) * 1.05,
    )
    head = text(EDGE, area.top - 12.0, f"Peak of the step, {measure}", "muted")
    y = area.bottom + 3 * ROW + 6.0
    lines = [(_describe_plan(dot), dot.chosen) for dot in dots]
    listed, end = _list(lines, _MOST_LISTED, y + ROW, width - 2 * EDGE)
    return document(
        STYLE,
        (width, end - ROW + EDGE),
        ("Plans: peak against extra compute", "; ".join(words for words, _ in lines[:_MOST_LISTED]) or "no plans"),
        [head, *_plot_plans(dots, area, budget_bytes), text(EDGE, y, "Peak, and FLOPs run again", "muted"), *listed],
        id=name,
    )


def _plot_plans(dots: Sequence[CurveDot], area: PlotArea, budget_bytes: int | None) -> Iterator[str]:
    known = [(index, dot, dot.extra) for index, dot in enumerate(dots) if dot.extra is not None]
    numbered = _pick_numbered([dot for _, dot, _ in known], [area.x(extra) for _, _, extra in known])
    step = round_step(area.most - area.least, _MOST_COSTS)
    marks = range(math.ceil(area.least / step), math.floor(area.most / step) + 1)
    return xy_plot(
        area,
        steps=[(step * index, f"{100 * step * index:.6g} %") for index in marks],
        quantity="FLOPs run again, of the forward's",
        limit=None if budget_bytes is None else ("budget", budget_bytes),
        lines=[XYLine(_front([(extra, dot.peak_bytes) for _, dot, extra in known]), "after", is_stairs=True)],
        dots=[
            XYDot(
                extra,
                dot.peak_bytes,
                f"{index + 1}. {_describe_plan(dot)}",
                is_filled=dot.chosen,
                is_chosen=dot.chosen,
                label=str(index + 1) if index in numbered else "",
            )
            for index, dot, extra in known
        ],
    )


def _list(lines: Sequence[tuple[str, bool]], most: int, y: float, room: float) -> tuple[list[str], float]:
    """What each number is, in bold where it is chosen, at most so many; and where the list ends."""
    parts = []
    for number, (words, is_chosen) in enumerate(lines[:most], 1):
        shown = fit(f"{number}. {words}", SIZE, room, bold=is_chosen)
        parts.append(text(EDGE, y, shown, "strong" if is_chosen else ""))
        y += ROW
    if len(lines) > most:
        parts.append(text(EDGE, y, f"and {len(lines) - most} more", "muted"))
        y += ROW
    return parts, y


def _describe_plan(dot: CurveDot) -> str:
    cost = "cost unknown" if dot.extra is None else f"{100 * dot.extra:+.1f} %"
    return f"{dot.label}: {format_bytes(dot.peak_bytes)}, {cost}" + (" (chosen)" if dot.chosen else "")


def _front(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Of points in the order of their cost, those with fewer bytes than all before."""
    front: list[tuple[float, int]] = []
    for extra, nbytes in points:
        if not front or nbytes < front[-1][1]:
            front.append((extra, nbytes))
    return front


def _pick_numbered(dots: Sequence[CurveDot], places: Sequence[float]) -> set[int]:
    """The dots that have room for their number, the chosen first."""
    taken: set[int] = set()
    for index in sorted(range(len(dots)), key=lambda index: not dots[index].chosen):
        if all(abs(places[index] - places[other]) >= _APART for other in taken):
            taken.add(index)
    return taken


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
    lines = [_describe(each, sweep.item) for each in front]
    listed, y = _list([(each, False) for each in lines], _LISTED, area.bottom + 3 * ROW + 4.0, width - 2 * EDGE)
    words = ("Memory against time", "; ".join(lines) or "nothing that fits has a time")
    return document(STYLE, (width, y), words, [*parts, *listed], id=name)


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
