"""A program of the user's own, untouched, on a card that is pretended: any code as a step, its rounds found."""

from __future__ import annotations

from fxmem.simulation.program.command import Launch
from fxmem.simulation.program.launcher import LaunchResult, check_program, launch, run_as_main
from fxmem.simulation.program.recorded_program import RecordedProgram, mark, mark_step, record

__all__ = [
    "Launch",
    "LaunchResult",
    "RecordedProgram",
    "check_program",
    "launch",
    "mark",
    "mark_step",
    "record",
    "run_as_main",
]
