"""Which nodes may be one region."""

from __future__ import annotations

from fxmem.planning import CostTables


def is_legal(units: CostTables, first: int, last: int) -> bool:
    """Whether nodes `first` to `last - 1` may be one region."""
    return first < last and int(units.earliest[first:last].min()) >= first
