"""Regions of about equal saved bytes, the best of a search (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import math

import numpy as np

from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.plan_text import describe_regions
from fxmem.planning.regions.strategies import register
from fxmem.records.units import sum_known

_POWERS = np.linspace(0.2, 1.0, 12)
"""Of the number of blocks: how many groups are tried."""


def propose(tables: Tables, budget: float) -> tuple[Stretch, ...] | None:
    """Of groups of blocks with about equal saved bytes, the cheapest that keep the budget; without one, the lowest."""
    blocks = tables.blocks
    kept = [sum(tables.units.keeps[i:j]) for i, j in blocks]
    found = []
    for count in sorted({max(round(len(blocks) ** power), 1) for power in _POWERS}):
        filled = np.cumsum([0.0, *kept[:-1]]) // max(sum(kept) / count, 1.0)
        found.append(tables.group(blocks, [int(part) for part in filled]))
    if budget == math.inf:
        return min(found, key=tables.estimate)
    fitting = [each for each in found if tables.estimate(each) <= budget]
    return min(fitting, key=lambda each: _extra_flops(tables, each), default=None)


def _extra_flops(tables: Tables, stretches: tuple[Stretch, ...]) -> int:
    return sum_known(region.extra_flops for region in describe_regions(tables.selection, stretches, {})) or 0


register("chen", propose)
