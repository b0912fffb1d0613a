"""What is told of a program's rounds: each listener is one module, which registers a function from the program's parts.

`register` adds a listener of your own.
"""

from __future__ import annotations

from collections.abc import Callable

from fxmem.records import registry
from fxmem.records.registry import Registry
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.round_listener import RoundListener

LISTENERS: Registry[Callable[[ProgramParts], RoundListener]] = registry.LISTENERS


def register(name: str, make: Callable[[ProgramParts], RoundListener]) -> None:
    """Add a listener; those of fxmem come first, in the order of their names.

    One of another package is found by an entry point of the group "fxmem.listeners", which bears its name and whose
    loading registers it.

    Args:
        name: of the listener.
        make: makes one for each program that is recorded.

    Raises:
        UsageError: another listener has this name.
    """
    LISTENERS.register(name, make)


def make_listeners(parts: ProgramParts) -> tuple[RoundListener, ...]:
    """All listeners of a program."""
    return tuple(LISTENERS.get(name)(parts) for name in LISTENERS)
