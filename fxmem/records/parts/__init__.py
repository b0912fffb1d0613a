"""What records are made of: their base class, numbers with bounds, and parts of a step."""

from __future__ import annotations

from fxmem.records.parts.base import Count as Count
from fxmem.records.parts.compiled import CompileRecord as CompileRecord
from fxmem.records.parts.compiled import CompileSettings as CompileSettings
from fxmem.records.parts.compiled import TimedChoice as TimedChoice
from fxmem.records.parts.engine import EngineUse as EngineUse
from fxmem.records.parts.evaluation import EvaluationPass as EvaluationPass
from fxmem.records.parts.generation import GenerationPeak as GenerationPeak
from fxmem.records.parts.generation import GenerationRun as GenerationRun
from fxmem.records.parts.generation import TokenBytes as TokenBytes
from fxmem.records.parts.growth import ANEW as ANEW
from fxmem.records.parts.growth import IN_CYCLES as IN_CYCLES
from fxmem.records.parts.growth import ONLY_TORCH as ONLY_TORCH
from fxmem.records.parts.growth import Growth as Growth
from fxmem.records.parts.growth import Schedule as Schedule
from fxmem.records.parts.growth import find_large as find_large
from fxmem.records.parts.host import HostUse as HostUse
from fxmem.records.parts.longest_batch import LengthChange as LengthChange
from fxmem.records.parts.longest_batch import LongestBatch as LongestBatch
from fxmem.records.parts.ranks import Collective as Collective
from fxmem.records.parts.ranks import CollectiveKind as CollectiveKind
from fxmem.records.parts.ranks import RankClass as RankClass
from fxmem.records.parts.ranks import RankedStep as RankedStep
from fxmem.records.parts.ranks import RankGroup as RankGroup

__all__ = ["RankClass"]
"""What the reference of Python links to."""
