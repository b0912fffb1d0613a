"""What all plots share: their style, a scale of bytes, and labels kept apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxmem.records.profile import Profile
from fxmem.records.units import printable
from fxmem.show.svg import fit, path, style_sheet, text, wrap

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
