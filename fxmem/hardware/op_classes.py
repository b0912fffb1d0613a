"""What ATen's heavy operators are: matrix products, convolutions, attention and recurrent layers.

Nearly all FLOPs of a step are in them. Layers, planners and what applies their plans ask here; the answers are in the
operators' rows.
"""

from __future__ import annotations

import functools
from typing import Final

from fxmem.hardware.operators import OPERATORS

MAC_OPS: Final = frozenset(name for name, row in OPERATORS.items() if row.counts_macs)
"""Operators whose FLOPs are multiply-adds, two each."""
UNKNOWN_MAC_OPS: Final = frozenset(name for name, row in OPERATORS.items() if row.kind == "recurrent layer")
"""Operators with multiply-adds among other operations, counted as FLOPs in one sum."""


@functools.cache
def is_product(name: str) -> bool:
    """Whether an operator (its overload's name, such as `aten.addmm.default`) is a product that a plan may keep.

    Planner and application number a region's products alike, one from a profile, the other as they run: both ask here.
    """
    namespace, _, rest = name.partition(".")
    row = OPERATORS.get(rest.partition(".")[0])
    return namespace == "aten" and row is not None and row.is_product
