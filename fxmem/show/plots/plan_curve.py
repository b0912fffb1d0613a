"""Plans compared: what each leaves of the peak, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxmem.records.units import format_bytes
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
    round_step,
    xy_plot,
)
from fxmem.show.svg import document, fit, text

_RIGHT = 64.0
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
        width=width - LEFT - _RIGHT,
        height=height,
        most=max(costs, default=0.0) * 1.05 or 0.01,
        least=min([0.0, *(cost * 1.05 for cost in costs)]),
        scale=max([dot.peak_bytes for dot in dots] + [budget_bytes or 0, 1]) * 1.05,
    )
    head = text(EDGE, area.top - 12.0, f"Peak of the step, {measure}", "muted")
    listed, foot = _list(dots, area.bottom + 3 * ROW + 6.0, width - 2 * EDGE)
    return document(
        STYLE,
        (width, foot + EDGE),
        ("Plans: peak against extra compute", "; ".join(_words(dot) for dot in dots[:_MOST_LISTED]) or "no plans"),
        [head, *_plot(dots, area, budget_bytes), *listed],
        id=name,
    )


def _plot(dots: Sequence[CurveDot], area: PlotArea, budget_bytes: int | None) -> Iterator[str]:
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
                f"{index + 1}. {_words(dot)}",
                is_filled=dot.chosen,
                is_chosen=dot.chosen,
                label=str(index + 1) if index in numbered else "",
            )
            for index, dot, extra in known
        ],
    )


def _list(dots: Sequence[CurveDot], y: float, room: float) -> tuple[list[str], float]:
    """What each number is; and where the list ends."""
    parts = [text(EDGE, y, "Peak, and FLOPs run again", "muted")]
    for index, dot in enumerate(dots[:_MOST_LISTED]):
        y += ROW
        words = fit(f"{index + 1}. {_words(dot)}", SIZE, room, bold=dot.chosen)
        parts.append(text(EDGE, y, words, "strong" if dot.chosen else ""))
    if len(dots) > _MOST_LISTED:
        y += ROW
        parts.append(text(EDGE, y, f"and {len(dots) - _MOST_LISTED} more", "muted"))
    return parts, y


def _words(dot: CurveDot) -> str:
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
