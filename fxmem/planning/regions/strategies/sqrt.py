"""About sqrt(N) regions of equal length (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import math

from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.strategies import register


def propose(tables: Tables, budget: float) -> tuple[Stretch, ...]:
    """The blocks of the model in groups of about sqrt(N)."""
    size = max(round(math.sqrt(len(tables.blocks))), 1)
    return tables.group(tables.blocks, [index // size for index in range(len(tables.blocks))])


register("sqrt", propose, follows_budget=False)
