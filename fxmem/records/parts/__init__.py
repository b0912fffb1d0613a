"""What records are made of: their base class, numbers with bounds, and parts of a step."""

from __future__ import annotations

from fxmem.records.parts.run import ANEW as ANEW
from fxmem.records.parts.run import IN_CYCLES as IN_CYCLES
from fxmem.records.parts.run import ONLY_TORCH as ONLY_TORCH
from fxmem.records.parts.run import EvaluationPass as EvaluationPass
from fxmem.records.parts.run import Growth as Growth
from fxmem.records.parts.run import HostUse as HostUse
from fxmem.records.parts.run import LengthChange as LengthChange
from fxmem.records.parts.run import LongestBatch as LongestBatch
from fxmem.records.parts.run import Schedule as Schedule
from fxmem.records.parts.run import find_large as find_large
from fxmem.records.parts.step import Collective as Collective
from fxmem.records.parts.step import CollectiveKind as CollectiveKind
from fxmem.records.parts.step import CompileRecord as CompileRecord
from fxmem.records.parts.step import CompileSettings as CompileSettings
from fxmem.records.parts.step import Count as Count
from fxmem.records.parts.step import EngineUse as EngineUse
from fxmem.records.parts.step import GenerationPeak as GenerationPeak
from fxmem.records.parts.step import GenerationRun as GenerationRun
from fxmem.records.parts.step import RankClass as RankClass
from fxmem.records.parts.step import RankedStep as RankedStep
from fxmem.records.parts.step import RankGroup as RankGroup
from fxmem.records.parts.step import TimedChoice as TimedChoice
from fxmem.records.parts.step import TokenBytes as TokenBytes

__all__ = ["RankClass"]
"""What the reference of Python links to."""
