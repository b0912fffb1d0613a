"""Where a program's own code calls what is found: its models, and the lines that a node stands for."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.records.profile import ModuleCall, Profile, SourceLine
from fxmem.records.units import package_path


def find_outermost(profile: Profile) -> Iterator[ModuleCall]:
    """Calls within no other."""
    end = 0
    for call in sorted(profile.calls, key=lambda each: (each.first_node, -each.last_node)):
        if call.first_node >= end:
            yield call
            end = call.last_node


def find_place(profile: Profile, node: int | None) -> str:
    """`file:line` of the user's own code that a node runs for, as `find_line`. Empty where none is known."""
    line = None if node is None else find_line(profile, node)
    return "" if line is None else line.place


def find_line(profile: Profile, node: int) -> SourceLine | None:
    """The line of the user's own code that a node runs for: its own line, or that of the call around it where its own
    is an installed package's; that one where no line is the user's. None where none is known."""
    around = (call for call in profile.calls if call.first_node <= node < call.last_node)
    calls = sorted(around, key=lambda each: each.last_node - each.first_node)
    lines = [line for line in (profile.nodes[node].source, *(each.source for each in calls)) if line is not None]
    return next((each for each in lines if _is_own(each)), lines[0] if lines else None)


def _is_own(line: SourceLine) -> bool:
    return package_path(line.file) == line.file
