"""Bytes against another quantity: lines, and dots that have a name each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxmem.records.units import exact_bytes
from fxmem.show.plots.axes import EDGE, LEFT, ROW, SIZE, PlotArea, byte_grid, spread
from fxmem.show.svg import circle, fit, group, path, text


class XYLine(NamedTuple):
    """A line through points."""

    points: Sequence[tuple[float, int]]
    """What is plotted to the right, and bytes."""
    classes: str
    label: str = ""
    """Stands at its right end."""
    is_stairs: bool = False
    """Whether it is level up to the next point, and not straight to it."""


class XYDot(NamedTuple):
    """A point of its own."""

    x: float
    nbytes: int
    words: str
    """Shown where a pointer rests on it."""
    is_filled: bool
    is_chosen: bool
    label: str = ""
    drops: bool = False
    """Whether a line leads down to the axis, beside which the label stands; else it stands below the dot."""
    is_summit: bool = False
    """The line lies below it, and the label above."""


def lay_out(
    width: float, height: float, right: float, title: str, note: str, **scales: float
) -> tuple[PlotArea, list[str]]:
    """The area of a plot, and the two lines of text above it.

    Args:
        width: of the document.
        height: of the plot.
        right: pixels beside it.
        title: the first line.
        note: the second.
        scales: of the area: `most`, `least`, `scale`.
    """
    area = PlotArea(left=LEFT, top=EDGE + 2 * ROW + 8.0, width=width - LEFT - right, height=height, **scales)
    room = width - 2 * EDGE
    head = text(EDGE, EDGE + 12.0, fit(title, SIZE, room / 1.5), "title")
    return area, [head, text(EDGE, EDGE + 12.0 + ROW, fit(note, SIZE, room), "muted")]


def xy_plot(
    area: PlotArea,
    *,
    steps: Sequence[tuple[float, str]],
    quantity: str,
    limit: tuple[str, int] | None,
    lines: Sequence[XYLine],
    dots: Sequence[XYDot],
) -> Iterator[str]:
    """Write the elements of a plot.

    Args:
        area: where it is, and its scales.
        steps: of the axis to the right: values, and how they are written.
        quantity: what they are.
        limit: a word and the bytes it stands for, drawn as a level line.
        lines: drawn in this order.
        dots: drawn in this order, above the lines.
    """
    yield from byte_grid(area)
    yield path("axis", "M", area.left, area.bottom, "H", area.right)
    for value, words in steps:
        yield text(area.x(value), area.bottom + ROW, words, "middle muted")
    yield text((area.left + area.right) / 2, area.bottom + 2 * ROW, quantity, "middle muted")
    ends = [(area.y(line.points[-1][1]), line.label, "muted") for line in lines if line.points and line.label]
    if limit is not None:
        word, nbytes = limit
        y = area.y(nbytes)
        ends.append((y, word, ""))
        level = path("limit", "M", area.left, y, "H", area.right)
        yield group(level, tooltip=f"{word}: {exact_bytes(nbytes)}")
    yield from (_line(area, line) for line in lines if line.points)
    heights = spread([y for y, _, _ in ends], [ROW] * len(ends), area.top - ROW, area.bottom)
    for y, (_, words, classes) in zip(heights, ends, strict=True):
        yield text(area.right + 6.0, y + 4.0, words, classes)
    yield from (_dot(area, dot) for dot in dots)


def _line(area: PlotArea, line: XYLine) -> str:
    (first, nbytes), *rest = line.points
    way: list[str | float] = ["M", area.x(first), area.y(nbytes)]
    for value, nbytes in rest:
        x, y = area.x(value), area.y(nbytes)
        way += ["H", x, "V", y] if line.is_stairs else ["L", x, y]
    return path(line.classes, *way)


def _dot(area: PlotArea, dot: XYDot) -> str:
    x, y = area.x(dot.x), area.y(dot.nbytes)
    parts = []
    if dot.drops:
        parts.append(path("peak", "M", x, y, "V", area.bottom))
    parts.append(circle(x, y, 6 if dot.is_chosen else 4, "dot" if dot.is_filled else "hollow"))
    if dot.label:
        classes = f"{'end' if dot.drops else 'middle'} halo{' strong' if dot.is_chosen else ''}"
        # Below the dot there is room: lines come from above and leave to the right.
        left, top = (x - 5.0, area.bottom - 6.0) if dot.drops else (x, y - 11.0 if dot.is_summit else y + 17.0)
        parts.append(text(left, top, dot.label, classes))
    return group(*parts, tooltip=dot.words)
