"""One rank of a distributed step: its place, its groups, and what its collectives move."""

from __future__ import annotations

from typing import Literal

from fxmem.records.parts.base import Bytes, Many, Record

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "receive"]


class RankGroup(Record):
    """A process group that the step communicates in."""

    name: str
    """Of the mesh's dimension (`fsdp`, `tp`), else torch's own."""
    size: int
    """How many ranks it has."""
    spread: int = 1
    """The largest distance between the numbers of neighbouring ranks; 1 for ranks side by side."""


class Collective(Record):
    """All collectives of one kind in one group, over the step."""

    kind: CollectiveKind
    group: int
    """Index into `RankedStep.groups`."""
    count: int
    moved_bytes: Bytes
    """What this rank sends: in a ring (n - 1) / n of the whole tensor, twice that for an all-reduce."""


class RankClass(Record):
    """Ranks whose steps are equal, storage by storage."""

    first: int
    """The rank that was analysed; the others have higher numbers."""
    last: int
    size: int
    """How many ranks it has; fewer than from `first` to `last` where ranks of other classes lie between."""
    compared: Many[int] = ()
    """Those that were analysed, too, and found equal to the first."""
    requested_bytes: Bytes
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    fits: bool | None = None


class RankedStep(Record):
    """Which rank of how many the step is of."""

    world: int
    rank: int
    groups: Many[RankGroup] = ()
    collectives: Many[Collective] = ()
    classes: Many[RankClass] = ()
    """All ranks, in classes of equal ones; empty where one rank alone was analysed."""
    host_bytes: Bytes = 0
    """Parameters, gradients and optimizer state that this rank keeps in the host's memory (`CPUOffloadPolicy`); what
    the optimizer's step takes beside them is not counted."""
