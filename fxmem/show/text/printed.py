"""What `print` shows of a record: what the command line prints of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fxmem.show.terminal import columns
from fxmem.show.text import advice, by_layer, by_line, comparison, explanation, fits, plan

TABLES: Final[Mapping[str, Callable[..., str]]] = {
    "Advice": advice.table,
    "CompilePlan": plan.budget_table,
    "Explanation": explanation.table,
    "Fits": fits.fits_table,
    "LayerReport": by_layer.table,
    "LineReport": by_line.table,
    "Plan": plan.table,
    "ServeSize": fits.serving_table,
    "StepComparison": comparison.table,
}
"""By the name of its class."""


def write(record: Any) -> str | None:
    """Return the text of a record without colours, as wide as the terminal; None for one that has none."""
    table = TABLES.get(type(record).__name__)
    return None if table is None else table(record, width=columns())
