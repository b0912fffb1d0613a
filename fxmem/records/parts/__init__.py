"""What records are made of: their base class, numbers with bounds, and parts of a step."""

from __future__ import annotations

from fxmem.records.parts.base import Bytes, Count, Flops, FlopsChange, Many, Mapped, Record, Tick
from fxmem.records.parts.compiled import CompileRecord, CompileSettings, TimedChoice
from fxmem.records.parts.generation import GenerationPeak, GenerationRun, TokenBytes
from fxmem.records.parts.ranks import Collective, CollectiveKind, RankClass, RankedStep, RankGroup

__all__ = [
    "Bytes",
    "Collective",
    "CollectiveKind",
    "CompileRecord",
    "CompileSettings",
    "Count",
    "Flops",
    "FlopsChange",
    "GenerationPeak",
    "GenerationRun",
    "Many",
    "Mapped",
    "RankClass",
    "RankGroup",
    "RankedStep",
    "Record",
    "Tick",
    "TimedChoice",
    "TokenBytes",
]
