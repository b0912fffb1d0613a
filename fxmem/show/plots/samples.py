"""Which ticks to draw when there are more of them than pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A tick, and the half-open range of ticks it is drawn over."""

    tick: int
    begin: float
    end: float


def samples(live: Sequence[int], columns: int) -> list[Sample]:
    """Every tick, or of too many the lowest and the highest of each column.

    So no extreme of the whole is lost, the first of the highest included, and there are never more than two samples a
    column. Linear in the ticks.
    """
    ticks = len(live)
    if ticks <= 2 * columns:
        return [Sample(tick, tick, tick + 1) for tick in range(ticks)]
    found = []
    for column in range(columns):
        begin, end = column * ticks // columns, (column + 1) * ticks // columns
        here = range(begin, end)
        first, second = sorted((min(here, key=live.__getitem__), max(here, key=live.__getitem__)))
        middle = (begin + end) / 2
        found += [Sample(first, begin, middle), Sample(second, middle, end)]
    return found
