"""What is wrong with a step, found in its record: each cause has a line of the user's code, its bytes and a change.

Each cause is one module of `causes/`, which registers a function `(profile, timeline) -> findings` under the cause's
name. These functions are pure, and need no torch. `register` adds a cause of your own. A cause says what is there and
what it takes; what a change is worth, `fxmem advise` tries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from fxmem.records import registry
from fxmem.records.findings import BytesOf, Finding
from fxmem.records.profile import Profile, Timeline
from fxmem.records.registry import Registry

__all__ = ["CAUSES", "Finding", "find", "register"]

Find = Callable[[Profile, Timeline], Iterable[Finding]]

_WORTH_SAYING: Final = 50
"""What is at the peak is said where it is this share of it, one in so many."""
_ORDER: Final[tuple[BytesOf, ...]] = ("step", "batch", "peak")
"""What grows comes first: it has no end."""

CAUSES: Registry[Find] = registry.CAUSES


def register(name: str, find: Find) -> None:
    """Add a cause.

    The command line finds one of another package by an entry point of the group "fxmem.findings", which bears the
    cause's name and whose loading registers it.

    Args:
        name: of the cause, `Finding.cause`.
        find: finds it in a profile and its timeline.

    Raises:
        UsageError: another cause has this name.
    """
    CAUSES.register(name, find)


def find(profile: Profile, timeline: Timeline) -> tuple[Finding, ...]:
    """All that is found in a step: first what grows, then what holds most at the peak.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
    """
    found = [each for name in CAUSES for each in CAUSES.get(name)(profile, timeline)]
    least = timeline.peak.requested_bytes // _WORTH_SAYING
    said = [each for each in found if each.of != "peak" or each.nbytes >= max(least, 1)]
    return tuple(sorted(said, key=lambda each: (_ORDER.index(each.of), -each.nbytes, each.place)))
