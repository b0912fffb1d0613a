"""Bytes alive, unit by unit, in one sweep over births and deaths."""

from __future__ import annotations

import numpy as np

from fxmem.planning import tuning
from fxmem.planning.arrays import Floats, Ints


def sum_alive(births: Ints, deaths: Ints, sizes: Floats, ticks: int) -> Floats:
    """By tick: bytes of those alive, each over `[birth, death)`."""
    change = np.zeros(ticks + 1)
    np.add.at(change, births, sizes)
    np.add.at(change, deaths, -sizes)
    alive: Floats = np.cumsum(change[:ticks])
    return alive


def most_above(
    at: Ints, of_unit: Ints, births: Ints, deaths: Ints, sizes: Floats, units: Ints, others: Floats, count: int
) -> Floats:
    """`[v, i]`: the most bytes alive at unit `v`'s ticks, less what units before cut `i` made; 0 for a unit of no
    ticks.

    Args:
        at, of_unit: the ticks, ascending, and the unit of each.
        births, deaths, sizes, units: of what the units make, alive over `[birth, death)`.
        others: by tick, the bytes alive besides.
        count: of units.

    Exact below 2**53 bytes. Time is linear in ticks and births, times units.
    """
    table = np.zeros((count, count + 1))
    when, where, change = np.concatenate([births, deaths]), np.tile(units + 1, 2), np.concatenate([sizes, -sizes])
    order = np.argsort(when, kind="stable")
    when, where, change = when[order], where[order], change[order]
    happened = np.searchsorted(when, at, side="right")
    alive_now, done = np.zeros(count + 1), 0
    for start in range(0, len(at), tuning.TICKS_TOGETHER):
        ticks, reached, of = (column[start : start + tuning.TICKS_TOGETHER] for column in (at, happened, of_unit))
        upto = int(reached[-1])
        rows = np.searchsorted(reached, np.arange(done, upto), side="right")
        steps = np.zeros((len(ticks), count + 1))
        np.add.at(steps, (rows, where[done:upto]), change[done:upto])
        steps[0] += alive_now
        alive = np.cumsum(steps, axis=0)  # [tick, i]: made by the unit before cut i
        alive_now, done = alive[-1], upto
        older = np.cumsum(alive, axis=1)  # [tick, i]: made before cut i
        beyond = (older[:, -1] + others[ticks])[:, None] - older
        by_unit = np.argsort(of, kind="stable")
        present, firsts = np.unique(of[by_unit], return_index=True)
        table[present] = np.maximum(table[present], np.maximum.reduceat(beyond[by_unit], firsts, axis=0))
    return table
