"""What making some calls of a step's forward again, instead of holding what they gave, does to its peak.

The peak is estimated from the unplanned step: what is made again is taken off it from the last reader in forward on, and put back from
the moment in backward that first asks for it or for something made from it. Analyses of the applied choices say the same to half a per cent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxmem.errors import UsageError
from fxmem.planning.geometry import Floats, Geometry
from fxmem.records import Kind, Phase, Profile

__all__ = ["Call", "Choice", "Choices", "Course", "Value"]


@dataclass(frozen=True)
class Value:
    """What a storage holds between two writes to it, made in forward by a call that can be made again."""

    call: int
    """Index of the call."""
    position: int
    """Among the values that it made."""
    storage: tuple[str, int, int]
    """Name and number of the call that allocated the storage, and the position among the storages that call allocated."""
    saved: bool
    """Whether autograd saves it."""
    overwritten: bool
    """Whether something else has been written there since, so that it cannot be held."""


@dataclass(frozen=True)
class Call:
    """One call of an operator in forward."""

    name: str
    """Qualified overload."""
    number: int
    """How many of the same ran before."""
    sources: tuple[int, ...]
    """Indices of the values it read."""
    values: tuple[int, ...]
    """Indices of those it made."""


@dataclass(frozen=True)
class Choice:
    """What is made again, and so what is held."""

    again: frozenset[int]
    """Calls that are made again, none of them needlessly."""
    held: frozenset[int]
    """Values that are held for backward, or for others to be made from."""
    dropped: frozenset[int]
    """Values that autograd saves and that are made again instead."""
    cost: float
    """As planners count: FLOPs, and a little for what is written."""
    flops: int | None
    """FLOPs of `again`; None where an operator has no formula."""
    peak: float
    """Estimate of the step's peak, in bytes."""


@dataclass
class Course:
    """How a choice goes."""

    again: set[int]
    needed: set[int]
    """Values."""
    first: list[int]
    """By value, the tick at which it is first asked for in backward."""
    last: list[int]


class Choices:
    """Choices for one step.

    Args:
        profile: of the unplanned step.
        calls: of its forward, in the order they were made.
        values: what they made, in that order.

    Raises UsageError if the calls are not those of the profile.
    """

    def __init__(self, profile: Profile, calls: Sequence[Call], values: Sequence[Value]) -> None:
        self.profile, self.calls, self.values = profile, calls, values
        self.geometry = Geometry(profile, ())
        self.live = self.geometry.live
        self._by_name: dict[str, list[int]] = {}
        for index, op in enumerate(profile.ops):
            if op.phase is Phase.FORWARD:
                self._by_name.setdefault(op.name, []).append(index)
        self.ops = [self._op(call.name, call.number) for call in calls]
        """By call, its index in the profile."""
        self.readers: list[list[int]] = [[] for _ in values]
        """By value, the calls that read it."""
        for index, call in enumerate(calls):
            for source in call.sources:
                self.readers[source].append(index)
        self.costs = np.asarray([self.geometry.cost_of(op) for op in self.ops])
        self._sized()

    def _op(self, name: str, number: int) -> int:
        try:
            return self._by_name[name][number]
        except (KeyError, IndexError):
            raise UsageError("expected the model to run the same operators each time; between two analyses of it, it ran others") from None

    def _sized(self) -> None:
        """Bytes of each value, and when they are there in the unplanned step."""
        profile = self.profile
        begins: dict[int, int] = {}
        for op in profile.ops:
            if op.phase is Phase.BACKWARD:
                begins[op.node] = min(begins.get(op.node, op.begin), op.begin)
        used: dict[int, int] = {}
        for index, node in enumerate(profile.nodes):
            for storage in node.saved:
                if index in begins:
                    used[storage] = min(used.get(storage, begins[index]), begins[index])
        flow = {made.index: made.flow_end for made in self.geometry.made}
        allocated: dict[int, list[int]] = {}
        for index, one in enumerate(profile.storages):
            if one.op is not None and one.kind is not Kind.WORKSPACE and index in flow:
                allocated.setdefault(one.op, []).append(index)
        count = len(self.values)
        self.nbytes = np.zeros(count)
        self.storages: list[int | None] = [None] * count
        """By value, what it lies in; None where it is written over."""
        self.flow_end, self.death, self.first_use = (np.full(count, len(self.live), dtype=np.int64) for _ in range(3))
        for index, value in enumerate(self.values):
            name, number, position = value.storage
            own = allocated.get(self._op(name, number), [])
            if value.overwritten or position >= len(own):
                continue
            storage = self.storages[index] = own[position]
            self.nbytes[index] = profile.storages[storage].nbytes
            self.flow_end[index], self.death[index] = flow[storage], profile.storages[storage].death
            self.first_use[index] = used.get(storage, profile.storages[storage].death)

    # --- what a choice means -------------------------------------------------------------------------------------------------

    def course(self, again: set[int]) -> Course:
        """What is needed, and when, if these calls are made again, and those of which something that cannot be held is needed."""
        never = len(self.live)
        course = Course(set(), set(), [never] * len(self.values), [0] * len(self.values))
        asked_at: dict[int, int] = {}  # by call that is made again, when
        for index in range(len(self.calls) - 1, -1, -1):
            forced, begin, wanted = False, never, []
            for number, first, last, overwritten in self._by_call[index]:
                needed = first >= 0
                first = first if needed else never
                for reader in self.readers[number]:
                    at = asked_at.get(reader)
                    if at is not None:
                        needed = True
                        first, last = min(first, at), max(last, at)
                if needed:
                    wanted.append(number)
                    forced = forced or overwritten
                    course.first[number], course.last[number] = first, last
                    begin = min(begin, first)
            course.needed.update(wanted)
            if wanted and (forced or index in again):
                course.again.add(index)
                asked_at[index] = begin
                for number in wanted:
                    course.first[number] = begin
        return course

    @cached_property
    def _by_call(self) -> list[list[tuple[int, int, int, bool]]]:
        """Of each value that a call makes, when autograd itself first and last asks for it, and whether it cannot be held; -1 and 0 where it is not saved."""

        def row(number: int) -> tuple[int, int, int, bool]:
            value = self.values[number]
            last = int(self.death[number]) if value.saved and not value.overwritten else 0
            return number, int(self.first_use[number]) if value.saved else -1, last, value.overwritten

        return [[row(number) for number in call.values] for call in self.calls]

    def choice(self, again: Iterable[int]) -> Choice:
        """What follows from making these calls again, as far as they are needed."""
        course = self.course(set(again))
        remade = sorted(course.again)
        known = [self.profile.ops[self.ops[index]].flops for index in remade]
        made = {number for number in course.needed if self.values[number].call in course.again}
        return Choice(
            again=frozenset(remade),
            held=frozenset(course.needed - made),
            dropped=frozenset(number for number in made if self.values[number].saved),
            cost=float(self.costs[remade].sum()),
            flops=None if None in known else sum(each or 0 for each in known),
            peak=float(self.planned(course).max(initial=0.0)),
        )

    def planned(self, course: Course) -> Floats:
        """Estimated bytes alive at every tick."""
        ticks = len(self.live)
        change = np.zeros(ticks + 2)
        passing: dict[int, list[int]] = {}
        for number in sorted(course.needed):
            nbytes, flow, death = self.nbytes[number], int(self.flow_end[number]), int(self.death[number])
            first, last, saved = course.first[number], course.last[number], self.values[number].saved
            if not nbytes:
                continue
            if self.values[number].call in course.again:
                if saved and death > flow:
                    change[flow] -= nbytes
                    change[death] += nbytes
                if last > first:
                    change[max(first - 1, 0)] += nbytes
                    change[last] -= nbytes
                else:
                    passing.setdefault(first, []).append(number)
            else:
                begin = death if saved else flow
                if last > begin:
                    change[begin] += nbytes
                    change[last] -= nbytes
        planned: Floats = self.live + np.cumsum(change)[:ticks]
        for tick, group in passing.items():
            planned[min(max(tick - 1, 0), ticks - 1)] += self._passing(group, course)
        return planned

    def _passing(self, group: list[int], course: Course) -> float:
        """The most bytes of values that are there only while others are made from them."""
        if len(group) == 1:
            return float(self.nbytes[group[0]])
        ends: dict[int, float] = {}
        alive = most = 0.0
        for number in group:
            call = self.values[number].call
            for done in [end for end in ends if end < call]:
                alive -= ends.pop(done)
            alive += float(self.nbytes[number])
            most = max(most, alive)
            end = max((each for each in self.readers[number] if each in course.again), default=call)
            ends[end] = ends.get(end, 0.0) + float(self.nbytes[number])
        return most
