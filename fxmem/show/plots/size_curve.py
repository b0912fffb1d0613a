"""The peak against the size of an input, and where it stops fitting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxmem.records.fits import FITS_WORDS, Fits, Point
from fxmem.records.units import format_bytes
from fxmem.show.plots.axes import EDGE, NARROWEST, ROW, SIZE, STYLE, PlotArea, round_step
from fxmem.show.plots.xy_plot import XYDot, XYLine, lay_out, xy_plot
from fxmem.show.svg import document, fit, text

_RIGHT = 74.0


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
    area, head = lay_out(width, height, _RIGHT, title, _line(curve, measure), most=most, scale=scale)
    foot = area.bottom + 3 * ROW
    note = "Filled: fits. Hollow: does not. Each dot is an analysis."
    parts = [
        *head,
        *_plot(curve, ran, area, measure, dim),
        text(EDGE, foot + 4.0, fit(note, SIZE, width - 2 * EDGE), "muted"),
    ]
    spoken = "; ".join(_words(point, dim) for point in ran)
    words = (f"Peak against {dim}: {answer}", spoken or "no size could run")
    return document(STYLE, (width, foot + EDGE + 4.0), words, parts, id=name)


def _plot(curve: Fits, ran: Sequence[Point], area: PlotArea, measure: str, dim: str) -> Iterator[str]:
    widest = max((point.size or 0 for point in ran), default=1)
    step = max(round(round_step(widest, 6)), 1)
    reserved = [(point.size or 0, point.reserved_bytes) for point in ran if point.reserved_bytes is not None]
    counted = [(point.size or 0, point.counted_bytes or 0) for point in ran]
    # The answer is drawn last, so that no neighbour covers it.
    points = sorted(ran, key=lambda point: point.size == curve.largest)
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
            for point in points
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
