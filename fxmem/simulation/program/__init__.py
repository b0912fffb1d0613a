"""A program of the user's own, untouched, on a card that is pretended: any code as a step, its rounds found."""

from fxmem.simulation.asked.routing import read_rule
from fxmem.simulation.processes.sandbox.isolation import IsolationSettings
from fxmem.simulation.program.launcher import LaunchResult, launch, launch_apart, run_as_main
from fxmem.simulation.program.launchers import Launch, check_program, find_started
from fxmem.simulation.program.recorded_code import find_unread, read_given
from fxmem.simulation.program.recorded_program import RecordedProgram, is_recording, mark, mark_step, record
from fxmem.simulation.program.watch import RunSettings

__all__ = [
    "IsolationSettings",
    "Launch",
    "LaunchResult",
    "RecordedProgram",
    "RunSettings",
    "check_program",
    "find_started",
    "find_unread",
    "is_recording",
    "launch",
    "launch_apart",
    "mark",
    "mark_step",
    "read_given",
    "read_rule",
    "record",
    "run_as_main",
]
