"""Records of particular kinds of steps."""

from __future__ import annotations

from fxmem.records.steps.compiled import CompileRecord, CompileSettings, TimedChoice

__all__ = ["CompileRecord", "CompileSettings", "TimedChoice"]
