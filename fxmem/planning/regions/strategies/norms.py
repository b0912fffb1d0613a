"""Each batch, group or instance norm with what lies between it and the next convolution.

Only the norm's input is kept, and no convolution runs twice: memory-efficient DenseNet (Pleiss et al. 2017,
arXiv:1707.06990). Of in-place activated batch norm (Rota Bulo et al. 2018, arXiv:1712.02616) it is the form that
recomputes rather than inverts.
"""

from __future__ import annotations

from fxmem.planning.regions.candidates import norm_runs
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.strategies import register


def propose(tables: Tables, budget: float) -> tuple[Stretch, ...]:
    """Units from one with a norm to the one that convolves next; where regions are modules, exact matches only."""
    units = tables.units
    runs = norm_runs(units.profile)
    if tables.spans is None:
        stretches = [(int(units.unit_of[first]), int(units.unit_of[last - 1]) + 1) for first, last in runs]
    else:
        at = units.cut_at
        stretches = [(at[first], at[last]) for first, last in runs if first in at and last in at]
    return tuple(Stretch(i, j) for i, j in stretches if tables.regions[i, j])


register("norms", propose, follows_budget=False)
