"""Classes of equal ranks: one rank of each is analysed, and the last beside the first as the proof.

Ranks are numbered over a mesh, whose dimensions are the groups in which rank 0 communicates. The stages of a pipeline,
which send to each other point to point, are analysed each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from fxmem.records.parts import RankClass, RankedStep
from fxmem.records.profile import Profile
from fxmem.simulation.code.profiled_step import ProfiledStep

_Step = TypeVar("_Step", bound=ProfiledStep)


class Classes(NamedTuple, Generic[_Step]):
    """The ranks of a world in classes."""

    largest: _Step
    """The step of the class that takes most."""
    records: tuple[RankClass, ...]


class _Dimension(NamedTuple):
    """A dimension of the mesh."""

    size: int
    spread: int
    """The distance between the numbers of neighbours along it."""
    has_stages: bool = False


class _Members(NamedTuple):
    first: int
    last: int
    size: int


def find_classes(world: int, analyse: Callable[[Sequence[int]], Iterable[_Step]]) -> Classes[_Step]:
    """Analyse as few ranks as it takes to know all.

    Along a dimension, ranks between two equal ones are taken to be equal to them.

    Args:
        world: how many ranks there are.
        analyse: makes the steps of ranks, which do not need each other, in this order.
    """
    steps: dict[int, _Step] = {}
    """The first that was analysed of equal ones: a step of hundreds of layers is large."""
    like: dict[int, int] = {}
    """Whose of them is a rank's."""

    def learn(ranks: Sequence[int]) -> None:
        for rank, step in zip(ranks, analyse(ranks), strict=True):
            lives = _lives(step)
            like[rank] = next((each for each, known in steps.items() if _lives(known) == lives), rank)
            steps.setdefault(like[rank], step)

    def find_like(rank: int) -> int:
        if rank not in like:
            learn([rank])
        return like[rank]

    ranks = steps[find_like(0)].profile.step.ranks
    dimensions = _find_dimensions(world, ranks)
    stages = next((each for each in dimensions if each.has_stages), _Dimension(1, 1))
    others = [each for each in dimensions if each is not stages]

    def are_equal(one: int, other: int) -> bool:
        return find_like(one) == find_like(other)

    bases = [stage * stages.spread for stage in range(stages.size)]
    length = sum((each.size - 1) * each.spread for each in others)
    learn(sorted({*bases, *(base + length for base in bases)} - like.keys()))
    found = [members for base in bases for members in _split(base, others, are_equal)]
    records = tuple(_describe(each, steps[like[each.first]], like) for each in sorted(found))
    largest = max(records, key=lambda each: (each.reserved_bytes or 0, each.requested_bytes, -each.first))
    return Classes(steps[like[largest.first]], records)


def _lives(step: ProfiledStep) -> list[tuple[object, ...]]:
    """What makes ranks equal: the sizes of their storages, from when to when and on which streams; not their names, for
    which a search through the program's objects may end sooner on one rank than on another."""
    return [
        (each.nbytes, each.birth, each.death, each.stream, each.used_on, each.free_by) for each in step.profile.storages
    ]


def with_classes(profile: Profile, records: tuple[RankClass, ...]) -> Profile:
    """The profile of a rank, with all ranks in classes beside it."""
    ranks = profile.step.ranks
    if ranks is None:
        return profile
    step = profile.step.model_copy(update={"ranks": ranks.model_copy(update={"classes": records})})
    return profile.model_copy(update={"step": step})


def _find_dimensions(world: int, ranks: RankedStep | None) -> list[_Dimension]:
    """The dimensions of the mesh, from the innermost: each group's, and what lies between and around them."""
    groups = ranks.groups if ranks is not None else ()
    staged = {each.group for each in (ranks.collectives if ranks else ()) if each.kind in ("send", "receive")}
    known = {_Dimension(each.size, each.spread, index in staged) for index, each in enumerate(groups) if each.size > 1}
    found: list[_Dimension] = []
    inner = 1
    while inner < world:
        fitting = [each for each in known if each.spread == inner and not world % (inner * each.size)]
        gap = min((each.spread for each in known if each.spread > inner and not each.spread % inner), default=world)
        found.append(
            min(fitting, key=lambda each: (not each.has_stages, each.size), default=_Dimension(gap // inner, inner))
        )
        inner *= found[-1].size
    return found if inner == world else [_Dimension(world, 1)]


def _split(base: int, dimensions: Sequence[_Dimension], are_equal: Callable[[int, int], bool]) -> list[_Members]:
    """The classes among the ranks that spread from `base` along the dimensions."""
    last = base + sum((each.size - 1) * each.spread for each in dimensions)
    count = math.prod(each.size for each in dimensions)
    if are_equal(base, last):
        return [_Members(base, last, count)]
    along = [list(_segments(base, each, are_equal)) for each in dimensions]
    if all(len(each) == 1 for each in along):  # what differs is the last alone
        return [_Members(base, last - 1, count - 1), _Members(last, last, 1)]
    found: list[_Members] = []
    for parts in itertools.product(*along):
        first = base + sum(each.first for each in parts)
        members = _Members(first, base + sum(each.last for each in parts), math.prod(each.size for each in parts))
        same = next((n for n, each in enumerate(found) if are_equal(each.first, first)), None)
        if same is None:
            found.append(members)
        else:
            known = found[same]
            found[same] = _Members(known.first, max(known.last, members.last), known.size + members.size)
    return found


def _segments(base: int, along: _Dimension, are_equal: Callable[[int, int], bool]) -> Iterator[_Members]:
    """Runs of equal ranks along a dimension, as distances from `base`."""

    def starts(low: int, high: int) -> list[int]:
        if are_equal(base + low * along.spread, base + high * along.spread):
            return []
        if high == low + 1:
            return [high]
        middle = (low + high) // 2
        return [*starts(low, middle), *starts(middle, high)]

    last = along.size - 1
    if last > 1 and not are_equal(base, base + last * along.spread):  # mostly the last has what is left over
        bounds = [0, *starts(0, last - 1), *starts(last - 1, last), along.size]
    else:
        bounds = [0, *starts(0, last), along.size]
    for begin, end in itertools.pairwise(bounds):
        yield _Members(begin * along.spread, (end - 1) * along.spread, end - begin)


def _describe(members: _Members, step: ProfiledStep, like: Mapping[int, int]) -> RankClass:
    peak = step.peak
    others = [rank for rank in sorted(like) if members.first < rank <= members.last]
    return RankClass(
        first=members.first,
        last=members.last,
        size=members.size,
        compared=tuple(rank for rank in others if like[rank] == like[members.first]),
        requested_bytes=peak.requested_bytes,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        fits=peak.fits,
    )
