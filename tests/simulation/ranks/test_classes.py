"""Which ranks are analysed, and which are taken to be equal to one of them: on steps made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fxmem.records.parts import Collective, RankedStep, RankGroup
from fxmem.records.profile import Kind
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.ranks.classes import find_classes
from tests.profiles import TRAINING, Log

Groups = tuple[tuple[str, int, int], ...]


class MadeStep(ProfiledStep):
    """A step with one storage, which every rank calls otherwise."""

    def __init__(self, nbytes: int, ranks: RankedStep) -> None:
        log = Log(step=TRAINING.model_copy(update={"ranks": ranks}))
        log.resident(nbytes, Kind.PARAMETER, name=f"of rank {ranks.rank}")
        self.profile = log.profile()


def found(
    world: int, groups: Groups, nbytes: Callable[[int], int], staged: int | None = None
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """First, last, size and bytes of each class, and the ranks that were analysed."""
    sent = () if staged is None else (Collective(kind="send", group=staged, count=1, moved_bytes=1),)
    analysed: list[int] = []

    def analyse(rank: int) -> MadeStep:
        analysed.append(rank)
        made = tuple(RankGroup(name=name, size=size, spread=spread) for name, size, spread in groups)
        return MadeStep(nbytes(rank), RankedStep(world=world, rank=rank, groups=made, collectives=sent))

    classes = find_classes(world, lambda ranks: map(analyse, ranks))
    records = [(each.first, each.last, each.size, each.requested_bytes) for each in classes.records]
    assert sum(each.size for each in classes.records) == world
    assert classes.largest.peak.requested_bytes == max(each[-1] for each in records)
    return records, sorted(analysed)


FSDP_TP: Groups = (("fsdp", 8, 4), ("tp", 4, 1))
CASES = {
    "one rank": (1, (), lambda rank: 7, None, [(0, 0, 1, 7)], [0]),
    "all are equal": (1024, (("fsdp", 1024, 1),), lambda rank: 7, None, [(0, 1023, 1024, 7)], [0, 1023]),
    "the last has less": (
        *(4, (("all ranks", 4, 1),), lambda rank: 5 if rank == 3 else 7, None),
        *([(0, 2, 3, 7), (3, 3, 1, 5)], [0, 2, 3]),
    ),
    "the first has more": (
        *(8, (("all ranks", 8, 1),), lambda rank: 5 if rank else 7, None),
        *([(0, 0, 1, 7), (1, 7, 7, 5)], [0, 1, 3, 6, 7]),
    ),
    "the last of one dimension": (
        *(32, FSDP_TP, lambda rank: 5 if rank % 4 == 3 else 7, None),
        *([(0, 30, 24, 7), (3, 31, 8, 5)], [0, 2, 3, 28, 31]),
    ),
    "stages around replicas": (
        *(8, (("dp", 4, 1), ("pp", 2, 4)), lambda rank: 7 - rank // 4, 1),
        *([(0, 3, 4, 7), (4, 7, 4, 6)], [0, 3, 4, 7]),
    ),
    "stages within replicas": (
        *(6, (("pp", 3, 1),), lambda rank: 7 + rank % 3, 0),
        *([(0, 3, 2, 7), (1, 4, 2, 8), (2, 5, 2, 9)], [0, 1, 2, 3, 4, 5]),
    ),
    "groups that make no mesh": (6, (("odd", 4, 1),), lambda rank: 7, None, [(0, 5, 6, 7)], [0, 5]),
    "the corner alone": (
        *(4, (("a", 2, 1), ("b", 2, 2)), lambda rank: 5 if rank == 3 else 7, None),
        *([(0, 2, 3, 7), (3, 3, 1, 5)], [0, 1, 2, 3]),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_in_classes(case: tuple[int, Groups, Callable[[int], int], int | None, list[object], list[int]]) -> None:
    world, groups, nbytes, staged, records, analysed = case
    assert found(world, groups, nbytes, staged) == (records, analysed)
