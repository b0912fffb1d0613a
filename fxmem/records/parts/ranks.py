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


class RankedStep(Record):
    """Which rank of how many the step is of."""

    world: int
    rank: int
    groups: Many[RankGroup] = ()
    collectives: Many[Collective] = ()
