"""What records are made of: their base class, numbers with bounds, and parts of a step."""

from __future__ import annotations

from fxmem.records.parts.base import Bytes, Flops, FlopsChange, Many, Mapped, Record, Tick
from fxmem.records.parts.ranks import Collective, CollectiveKind, RankedStep, RankGroup

__all__ = [
    "Bytes",
    "Collective",
    "CollectiveKind",
    "Flops",
    "FlopsChange",
    "Many",
    "Mapped",
    "RankGroup",
    "RankedStep",
    "Record",
    "Tick",
]
