"""What making some calls of a step's forward again, instead of holding what they gave, does to its peak.

The peak is estimated from the unplanned step: what is made again is taken off it from the last reader in forward on,
and put back from the moment in backward that first asks for it or for something made from it. Analyses of the applied
choices say the same to half a per cent, and the states of random generators, which are a few kilobytes each and on the
CPU alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxmem.errors import UsageError
from fxmem.planning.regions.cost_tables import Floats, Geometry
from fxmem.records.profile import Kind, Phase, Profile

__all__ = ["Call", "Choice", "Choices", "Course", "Value"]


@dataclass(frozen=True)
class Value:
    """What a storage holds between two writes to it, made in forward by a call that can be made again."""

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
    cost: float
    """As planners count: FLOPs, and a little for what is written."""
    peak: float
    """Estimate of the step's peak, in bytes."""


@dataclass(frozen=True, eq=False)
class Course:
    """How a choice goes: by call, by value and by tick."""

    again: bytearray
    """By call, whether it is made again."""
    asked: list[int]
    """By call that is made again, the tick at which backward first asks for something of it."""
    needed: bytearray
    """By value, whether backward needs it, or something that is made again does."""
    first: list[int]
    """By value that is needed, the tick at which backward first asks for it."""
    last: list[int]
    """And last."""
    change: Floats
    """By tick, how many bytes more are alive from it on than in the unplanned step."""
    passing: dict[int, tuple[int, ...]]
    """By tick, values that are there only while others are made from them."""
    passed: Floats
    """By tick, the most bytes of those."""
    cost: float
    peak: float

    @cached_property
    def choice(self) -> Choice:
        """What of it is worth keeping: it takes bytes in proportion to the step."""
        return Choice(frozenset(index for index, again in enumerate(self.again) if again), self.cost, self.peak)


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
        self.makers = np.asarray([value.call for value in values], dtype=np.int64)
        """By value, the call that makes it."""
        self.saved, self.overwritten = (
            np.asarray([getattr(value, name) for value in values], dtype=bool) for name in ("saved", "overwritten")
        )
        self.costs = np.asarray([self.geometry.cost_of(op) for op in self.ops])
        self._sized()

    def _op(self, name: str, number: int) -> int:
        try:
            return self._by_name[name][number]
        except (KeyError, IndexError):
            raise UsageError(
                "expected the model to run the same operators each time; between two analyses of it, it ran others"
            ) from None

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

    # --- what a choice means ------------------------------------------------------------------------------------------

    def choice(self, again: Iterable[int]) -> Choice:
        """What follows from making these calls again, as far as they are needed."""
        return self.course(again).choice

    def course(self, again: Iterable[int]) -> Course:
        """How that goes."""
        return self.moved(self._unplanned, again)

    @cached_property
    def _unplanned(self) -> Course:
        """Nothing is made again, but what cannot be held."""
        never, ticks = len(self.live), len(self.live)
        values, calls = len(self.values), len(self.calls)
        nothing = Course(
            again=bytearray(calls),
            asked=[never] * calls,
            needed=bytearray(values),
            first=[never] * values,
            last=[0] * values,
            change=np.zeros(ticks + 2),
            passing={},
            passed=np.zeros(ticks),
            cost=0.0,
            peak=0.0,
        )
        return self._followed(nothing, bytes(calls), range(calls))

    def moved(self, course: Course, calls: Iterable[int]) -> Course:
        """The course with these calls on the other side: made again where they were not, no longer where they were."""
        changed = list(calls)
        wanted = bytearray(course.again)
        for index in changed:
            wanted[index] ^= 1
        return self._followed(course, wanted, changed)

    def _followed(self, course: Course, wanted: bytes | bytearray, changed: Iterable[int]) -> Course:
        """The course with calls made again as wanted, where they are needed, and where something that cannot be held
        is.

        Args:
            changed: the calls for which that differs. From them it is followed to the calls they read from, and so on,
            as far as anything changes.
        """
        never, ticks = len(self.live), len(self.live)
        again, asked, needed = bytearray(course.again), course.asked.copy(), bytearray(course.needed)
        first_of, last_of = course.first.copy(), course.last.copy()
        change, passing, touched = course.change.copy(), course.passing.copy(), set[int]()
        pending = [-index for index in changed]
        heapq.heapify(pending)
        queued = set(pending)
        while pending:
            index = -heapq.heappop(pending)
            forced, begin, found = False, never, []
            for number, first, last, overwritten, readers in self._by_call[index]:
                need = first >= 0
                first = first if need else never
                for reader in readers:
                    if again[reader]:
                        need, at = True, asked[reader]
                        first, last = min(first, at), max(last, at)
                found.append((number, need, first, last))
                if need:
                    forced = forced or overwritten
                    begin = min(begin, first)
            now = (forced or bool(wanted[index])) and any(need for _, need, _, _ in found)
            before = bool(again[index])
            for number, need, first, last in found:
                first = begin if now and need else first
                was = bool(needed[number]), before, first_of[number], last_of[number]
                if was == (need, now, first, last):
                    continue
                if was[0]:
                    self._counted(number, *was[1:], -1.0, change, passing, touched)
                if need:
                    self._counted(number, now, first, last, 1.0, change, passing, touched)
                needed[number], first_of[number], last_of[number] = need, first, last
            at = begin if now else never
            if now != before or at != asked[index]:
                again[index], asked[index] = now, at
                for source in self.calls[index].sources:
                    earlier = -self.values[source].call
                    if earlier not in queued:
                        queued.add(earlier)
                        heapq.heappush(pending, earlier)
        passed = course.passed.copy()
        for tick in touched:
            passed[min(max(tick - 1, 0), ticks - 1)] = self._passing(sorted(passing[tick]), again)
        cost, peak = (
            float(self.costs[np.frombuffer(again, dtype=bool)].sum()),
            float(self._alive(change, passed).max(initial=0.0)),
        )
        return Course(again, asked, needed, first_of, last_of, change, passing, passed, cost, peak)

    def _counted(
        self,
        number: int,
        again: bool,
        first: int,
        last: int,
        sign: float,
        change: Floats,
        passing: dict[int, tuple[int, ...]],
        touched: set[int],
    ) -> None:
        """Add what a needed value does to the bytes alive, or with a sign of -1 take it off."""
        nbytes, flow, death, saved = self._lasting[number]
        if not nbytes:
            return
        nbytes *= sign
        if not again:
            begin = death if saved else flow
            if last > begin:
                change[begin] += nbytes
                change[last] -= nbytes
            return
        if saved and death > flow:
            change[flow] -= nbytes
            change[death] += nbytes
        if last > first:
            change[max(first - 1, 0)] += nbytes
            change[last] -= nbytes
        else:
            touched.add(first)
            group = passing.get(first, ())
            passing[first] = (*group, number) if sign > 0 else tuple(each for each in group if each != number)

    @cached_property
    def _by_call(self) -> list[list[tuple[int, int, int, bool, tuple[int, ...]]]]:
        """Of each value that a call makes, when autograd itself first and last asks for it, whether it cannot be held,
        and what reads it.

        Of one that is not saved -1 and 0.
        """

        def row(number: int) -> tuple[int, int, int, bool, tuple[int, ...]]:
            value = self.values[number]
            last = int(self.death[number]) if value.saved and not value.overwritten else 0
            return (
                number,
                int(self.first_use[number]) if value.saved else -1,
                last,
                value.overwritten,
                tuple(self.readers[number]),
            )

        return [[row(number) for number in call.values] for call in self.calls]

    @cached_property
    def _lasting(self) -> list[tuple[float, int, int, bool]]:
        """By value: bytes, the last reader in forward, the end of its storage in the unplanned step, whether autograd
        saves it."""
        return [
            (float(self.nbytes[i]), int(self.flow_end[i]), int(self.death[i]), value.saved)
            for i, value in enumerate(self.values)
        ]

    def planned(self, course: Course) -> Floats:
        """Estimated bytes alive at every tick."""
        return self._alive(course.change, course.passed)

    def _alive(self, change: Floats, passed: Floats) -> Floats:
        alive: Floats = self.live + np.cumsum(change)[: len(self.live)] + passed
        return alive

    def _passing(self, group: Sequence[int], again: bytearray) -> float:
        """The most bytes of values that are there only while others are made from them."""
        if len(group) < 2:
            return sum(self._lasting[number][0] for number in group)
        ends: dict[int, float] = {}
        alive = most = 0.0
        for number in group:
            call, nbytes = self.values[number].call, self._lasting[number][0]
            for done in [end for end in ends if end < call]:
                alive -= ends.pop(done)
            alive += nbytes
            most = max(most, alive)
            end = max((each for each in self.readers[number] if again[each]), default=call)
            ends[end] = ends.get(end, 0.0) + nbytes
        return most

    # --- what is told of one ------------------------------------------------------------------------------------------

    def flops(self, choice: Choice) -> int | None:
        """FLOPs of what is made again; None where an operator has no formula."""
        known = [self.profile.ops[self.ops[index]].flops for index in choice.again]
        return None if None in known else sum(each or 0 for each in known)

    def held(self, choice: Choice) -> frozenset[int]:
        """Values that are held for backward, or for others to be made from."""
        needed = self.course(choice.again).needed
        return frozenset(
            number for number, value in enumerate(self.values) if needed[number] and value.call not in choice.again
        )

    def dropped(self, choice: Choice) -> frozenset[int]:
        """Values that autograd saves and that are made again instead."""
        return frozenset(
            number for index in choice.again for number in self.calls[index].values if self.values[number].saved
        )
