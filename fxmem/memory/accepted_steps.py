"""What a function that reads a step accepts: a profile, or anything that carries one."""

from __future__ import annotations

from typing import Protocol

from fxmem.records.profile import Profile, Report


class HasProfile(Protocol):
    """An `fxmem.Analysis`, or anything else that has a profile."""

    @property
    def profile(self) -> Profile:
        """The step."""


class HasReport(Protocol):
    """An `fxmem.Analysis`, or anything else that makes a report."""

    def report(self) -> Report:
        """The step and its peak."""


def read_profile(step: Profile | HasProfile) -> Profile:
    """Return the profile of an `Analysis`, or the given report or profile itself."""
    return step if isinstance(step, Profile) else step.profile
