"""The operator calls of a step's forward, and the values they make."""

from __future__ import annotations

from dataclasses import dataclass

StretchPath = tuple[int, ...]
"""A stretch of the forward: its number within that which holds it, after those of all that hold it; empty for the whole
forward."""


@dataclass(frozen=True)
class OperatorValue:
    """The contents of a storage between two writes, made by a recomputable call of forward."""

    call: int
    """Index of the call."""
    position: int
    """Among the values that it made."""
    storage: tuple[str, int, int]
    """Name and number of the call that allocated the storage, and the position among the storages that call
    allocated."""
    saved: bool
    """Whether autograd saves it."""
    overwritten: bool
    """Whether a later call wrote to the storage, so that the value cannot be kept."""
    nbytes: int
    """Of the storage."""


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator in forward."""

    name: str
    """Qualified overload."""
    number: int
    """How many calls of the same overload ran before."""
    sources: tuple[int, ...]
    """Indices of the values it read."""
    values: tuple[int, ...]
    """Indices of the values it made."""
    unplanned: tuple[str, int] | None = None
    """Its name and number in the step without a plan, where they may be others."""
