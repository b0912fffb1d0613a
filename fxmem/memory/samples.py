"""Which ticks stand for a step where it has more of them than pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fxmem.memory import liveness
from fxmem.records.plan import PlannedStep
from fxmem.records.profile import Profile

_COLUMNS = 256
"""Columns of the plot that a plan keeps of its step."""


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


def shorten_step(profile: Profile, unplanned: Profile) -> PlannedStep:
    """What a plan says of the step that it makes of another.

    Args:
        profile: of the step with the plan.
        unplanned: the step as it was planned for.
    """
    live = liveness.live_bytes(profile)
    moments = [(sample.tick, live[sample.tick]) for sample in samples(live, _COLUMNS)]
    changes = [next(same) for _, same in groupby(moments, key=lambda moment: moment[1])]
    is_alike = [node.op for node in profile.nodes] == [node.op for node in unplanned.nodes]
    saved = tuple(node.saved_bytes for node in profile.nodes) if is_alike else ()
    return PlannedStep(ticks=profile.ticks, phases=profile.phases, moments=tuple(changes), saved_bytes=saved)
