"""Bytes against another quantity: lines, and dots that have a name each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fxmem.records.profile import Profile
from fxmem.records.units import exact_bytes, printable
from fxmem.show.svg import circle, fit, group, path, style_sheet, text, wrap

# --- what all plots share: their style, a scale of bytes, and labels kept apart ---------------------------------------


NARROWEST = 280.0
"""Width of a plot in pixels, at least."""
EDGE, LEFT, ROW = 12.0, 62.0, 16.0
"""Margin around a plot, room left of it for the numbers of its axis, and height of a line of text, in pixels."""
IN_SCALE = 1.6
"""A limit of up to this many times the largest number drawn is drawn to scale; a higher one would flatten the plot, and
is named above it."""
SIZE = 11.0
"""Height of the letters, in pixels."""
_TITLE = 15.0

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def heading(words: str, left: float, top: float, width: float) -> tuple[list[str], float]:
    """The title in at most two lines, and where it ends."""
    parts = []
    for line in wrap(words, _TITLE, width, lines=2, bold=True):
        top += _TITLE + 2.0
        # A word alone may be wider than the line.
        parts.append(text(left, top, fit(line, _TITLE, width, bold=True), "title"))
    return parts, top


def step_title(profile: Profile) -> str:
    """What a plot is of, in one line."""
    mode = "training" if profile.step.mode == "train" else "inference"
    return printable(f"{profile.model}: {mode} step on {profile.target.name}")


@dataclass(frozen=True)
class PlotArea:
    """The rectangle in which bytes are plotted against something else, in pixels."""

    left: float
    top: float
    width: float
    height: float
    most: float
    """What is plotted to the right, at the right edge."""
    scale: float
    """Bytes at the upper edge."""
    least: float = 0.0
    """What is plotted to the right, at the left edge."""

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The lower edge, 0 bytes."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Where a value is."""
        return self.left + self.width * (value - self.least) / (self.most - self.least)

    def y(self, nbytes: float) -> float:
        """Where a number of bytes is."""
        return self.top + self.height * (1.0 - nbytes / self.scale)


def byte_grid(area: PlotArea) -> Iterator[str]:
    """Lines at round numbers of bytes, and the numbers left of them."""
    for nbytes, words in byte_steps(round(area.scale), 6 if area.height >= 200 else 4):
        y = area.y(nbytes)
        yield path("grid", "M", area.left, y, "h", area.width)
        yield text(area.left - 6.0, y + 4.0, words, "end muted")


def byte_steps(highest: int, most: int = 6) -> list[tuple[int, str]]:
    """Round numbers of bytes from 0 to `highest`, and how they are written. At most `most` of them are above 0."""
    unit, name = next(((size, name) for size, name in _UNITS if highest >= size), _UNITS[-1])
    if highest <= 0:
        return [(0, "0")]
    step = round_step(highest / unit, most)
    # Of bytes there are no fractions.
    step = step if unit > 1 else max(math.ceil(step), 1)
    counts = [step * index for index in range(1, math.floor(highest / unit / step) + 1)]
    return [(0, "0"), *((round(count * unit), f"{count:g} {name}") for count in counts)]


def round_step(highest: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10 ... (times a power of ten) of which at most `most` fit below `highest`."""
    power = 10.0 ** math.floor(math.log10(highest / most))
    return next(step for factor in (1, 2, 5, 10, 20) if (step := factor * power) * most >= highest)


def spread(places: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Move labels apart: each near its place, none over another, all within `[low, high]`.

    Where there is not room for all, they overlap evenly at the upper end.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    found = list(places)
    edge = low
    for index in order:
        found[index] = max(found[index], edge + sizes[index] / 2)
        edge = found[index] + sizes[index] / 2
    edge = high
    for index in reversed(order):
        found[index] = min(found[index], edge - sizes[index] / 2)
        edge = found[index] - sizes[index] / 2
    return found


STYLE = style_sheet(Path(__file__).with_name("plot.css"))
"""One style for every plot."""


# --- bytes against another quantity: lines, and dots that have a name each --------------------------------------------


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
    is_filled: bool = False
    is_chosen: bool = False
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
    limit: tuple[str, int] | None = None,
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
        yield group(path("limit", "M", area.left, y, "H", area.right), tooltip=f"{word}: {exact_bytes(nbytes)}")
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
