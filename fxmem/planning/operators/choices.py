"""How recomputing some operator calls of forward, instead of keeping their results, changes the peak.

The peak is estimated from the unplanned step: what is recomputed is taken off it from the last reader in forward on,
and put back from the moment in backward that first needs it or something recomputed from it. Analyses of the applied
choices agree to half a per cent, but for the states of random generators, which are a few kilobytes each and on the CPU
alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fxmem.errors import UsageError
from fxmem.planning.lookups import Floats, Ints, first_saves
from fxmem.planning.regions.cost_tables import CostTables
from fxmem.records.profile import Phase, Profile
from fxmem.records.units import group, sum_known

# --- how recomputing values changes the bytes alive at each tick of a step --------------------------------------------
# A value that is not recomputed stays alive until backward last needs it. One that is recomputed dies after its last
# reader in forward, and is alive again from the tick before backward first needs it until the last. A value that
# backward needs at one tick only is *transient*: it exists while others are recomputed from it.


class ValueLife(NamedTuple):
    """A value in the unplanned step."""

    nbytes: float
    flow_end: int
    """Tick at which its last reader in forward has run."""
    death: int
    """Tick at which its storage is freed."""
    saved: bool
    """Whether autograd saves it."""


class ValueUse(NamedTuple):
    """What backward needs a value for."""

    recomputed: bool
    """Whether the call that makes it is recomputed."""
    first: int
    """Tick at which backward first needs it."""
    last: int
    """Tick at which backward last needs it."""


class LiveChanges:
    """The bytes by which a planned step differs from the unplanned one.

    Args:
        lives: of all values.
        change: by tick, how many bytes more are alive from it on; two entries more than ticks.
        transient: by tick, the transient values.
        transient_bytes: by tick, the most bytes of those.
    """

    def __init__(
        self, lives: Sequence[ValueLife], change: Floats, transient: dict[int, frozenset[int]], transient_bytes: Floats
    ) -> None:
        self._lives = lives
        self._change, self._transient, self._transient_bytes = change, transient, transient_bytes
        self._touched: set[int] = set()

    @classmethod
    def empty(cls, lives: Sequence[ValueLife], ticks: int) -> LiveChanges:
        """Return no change over so many ticks."""
        return cls(lives, np.zeros(ticks + 2), {}, np.zeros(ticks))

    def copy(self) -> LiveChanges:
        """Return a copy that changes by itself."""
        return LiveChanges(self._lives, self._change.copy(), self._transient.copy(), self._transient_bytes.copy())

    def count(self, value: int, use: ValueUse, sign: float) -> None:
        """Add the bytes of a value that backward needs; with a sign of -1 remove them."""
        recomputed, first, last = use
        nbytes, flow_end, death, saved = self._lives[value]
        nbytes *= sign
        if not nbytes:
            return
        if not recomputed:
            self.shift(death if saved else flow_end, last, nbytes)
            return
        if saved:
            self.shift(flow_end, death, -nbytes)
        if last > first:
            self.shift(max(first - 1, 0), last, nbytes)
        else:
            self._touched.add(first)
            group = self._transient.get(first, frozenset())
            self._transient[first] = group | {value} if sign > 0 else group - {value}

    def shift(self, begin: int, end: int, nbytes: float) -> None:
        """Add bytes that are alive from one tick until another, if that is later."""
        if end > begin:
            self._change[begin] += nbytes
            self._change[end] -= nbytes

    def shift_all(self, begins: Ints, ends: Ints, nbytes: Floats) -> None:
        """As `shift`, for one of each."""
        later = np.where(ends > begins, nbytes, 0.0)
        ticks = len(self._change)
        self._change += np.bincount(begins, later, ticks) - np.bincount(ends, later, ticks)

    def settle(self, most: Callable[[Sequence[int]], float]) -> None:
        """Count the transient values anew where `count` changed them.

        Args:
            most: gives the most bytes that transient values of one tick, ascending, have together.
        """
        for tick in self._touched:
            self._transient_bytes[self._before(tick)] = most(sorted(self._transient[tick]))
        self._touched.clear()

    def raise_transient(self, tick: int, nbytes: float) -> None:
        """Count at least so many bytes of transient values at a tick."""
        at = self._before(tick)
        self._transient_bytes[at] = max(self._transient_bytes[at], nbytes)

    def _before(self, tick: int) -> int:
        return min(max(tick - 1, 0), len(self._transient_bytes) - 1)

    def apply(self, live: Floats) -> Floats:
        """Return the bytes alive by tick, from those of the unplanned step."""
        alive: Floats = live + np.cumsum(self._change)[: len(live)] + self._transient_bytes
        return alive


# --- the operator calls of a step's forward, and the values they make -------------------------------------------------


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


# --- how recomputing some operator calls of forward, instead of keeping their results, changes the peak ---------------


@dataclass(frozen=True)
class RecomputeChoice:
    """The calls that are recomputed; what else backward needs is kept."""

    recomputed: frozenset[int]
    """Calls that are recomputed, each of them needed."""
    cost: float
    """As planners count: see `OpCosts.cost`."""
    peak: float
    """Estimate of the step's peak, in bytes."""


@dataclass(frozen=True, eq=False)
class ChoiceState:
    """A choice with what follows from it for each call, value and tick."""

    recomputed: bytearray
    """By call, whether it is recomputed."""
    begins: list[int]
    """By recomputed call, the tick at which backward first needs a value of it."""
    uses: list[ValueUse | None]
    """By value, what backward needs it for, itself or to recompute others; None: for nothing."""
    changes: LiveChanges
    cost: float
    peak: float

    @cached_property
    def choice(self) -> RecomputeChoice:
        """The part of it worth keeping: the state takes bytes in proportion to the step."""
        calls = frozenset(index for index, recomputed in enumerate(self.recomputed) if recomputed)
        return RecomputeChoice(calls, self.cost, self.peak)

    def spans(self, never: int) -> tuple[Ints, Ints]:
        """By value, the first and the last tick at which backward needs it; `never` and 0 if it does not."""
        table = [(never, 0) if use is None else use[1:] for use in self.uses]
        first, last = np.asarray(table, dtype=np.int64).reshape(-1, 2).T
        return first, last


class Demand(NamedTuple):
    """What autograd and other calls want of a value, whatever the choice."""

    value: int
    first: int
    """Tick at which autograd itself first needs it; -1 if it does not save it."""
    last: int
    """Tick at which autograd itself last needs it; 0 if it does not save it."""
    overwritten: bool
    """Whether it cannot be kept."""
    readers: tuple[int, ...]
    """Calls that read it."""


class RecomputeChoices:
    """The choices there are for one step.

    Args:
        profile: of the unplanned step.
        calls: of its forward, in the order they ran.
        values: what they made, in that order.
        offloaded: those of them that wait in the host's memory, at no cost to the card.
        freed: by tick, the bytes of these that are not on the card.

    Raises UsageError if the calls are not those of the profile.
    """

    stretches: Mapping[int, StretchPath] = MappingProxyType({})
    """By value that is freed again where it is recomputed for one beyond its stretch, that stretch."""
    effort = 1
    """By how much fewer changes of a choice are tried, each taking longer, than for calls that run once."""

    def __init__(
        self,
        profile: Profile,
        calls: Sequence[OperatorCall],
        values: Sequence[OperatorValue],
        offloaded: Collection[int] = (),
        freed: Floats | float = 0.0,
    ) -> None:
        self.profile, self.calls, self.values = profile, calls, values
        self.units = CostTables(profile, (), taped=True)
        self.live = self.units.live - freed
        self._by_name = group((op.name, index) for index, op in enumerate(profile.ops) if op.phase is Phase.FORWARD)
        self.ops = [self._find_op(*(call.unplanned or (call.name, call.number))) for call in calls]
        """By call, its index in the profile."""
        readers = group((source, index) for index, call in enumerate(calls) for source in call.sources)
        self.readers = [readers.get(value, []) for value in range(len(values))]
        """By value, the calls that read it."""
        self.makers = np.asarray([value.call for value in values], dtype=np.int64)
        """By value, the call that makes it."""
        self.saved, self.overwritten = (
            np.asarray([getattr(value, name) for value in values], dtype=bool) for name in ("saved", "overwritten")
        )
        self.costs = np.asarray([self.units.ops.cost(op) for op in self.ops])
        self._place_values()
        self.offloaded = frozenset(offloaded)
        self.sizes = self.nbytes.copy()
        """By value, its bytes, wherever they wait."""
        self.nbytes[list(self.offloaded)] = 0.0

    def _find_op(self, name: str, number: int) -> int:
        try:
            return self._by_name[name][number]
        except (KeyError, IndexError):
            raise UsageError(
                "expected the model to run the same operators each time; between two analyses of it, it ran others"
            ) from None

    def _place_values(self) -> None:
        """Find the bytes of each value, and when it is alive in the unplanned step."""
        flow_end = {made.index: made.flow_end for made in self.units.forward_storages}
        first_use = first_saves(self.profile, Phase.BACKWARD)
        allocated = group((made.op, made.index) for made in self.units.forward_storages)
        count = len(self.values)
        self.nbytes = np.zeros(count)
        self.storages: list[int | None] = [None] * count
        """By value, its storage; None where it is written over."""
        self.flow_end, self.death, self.first_use = (np.full(count, len(self.live), dtype=np.int64) for _ in range(3))
        for index, value in enumerate(self.values):
            name, number, _ = value.storage
            own = allocated.get(self._find_op(name, number), [])
            storage = None if value.overwritten else self._find_storage(value, own)
            if storage is None:
                continue
            self.storages[index] = storage
            self.nbytes[index] = self.profile.storages[storage].nbytes
            self.flow_end[index], self.death[index] = flow_end[storage], self.profile.storages[storage].death
            self.first_use[index] = first_use.get(storage, self.profile.storages[storage].death)

    def _find_storage(self, value: OperatorValue, own: Sequence[int]) -> int | None:
        """A value's storage among those that its call allocated; None if it is none of them.

        Some kernels of attention allocate their results in another order than they return them.
        """
        sizes, position = [self.profile.storages[each].nbytes for each in own], value.storage[2]
        if position < len(own) and sizes[position] == value.nbytes:
            return own[position]
        return own[sizes.index(value.nbytes)] if value.nbytes in sizes else None

    # --- what follows from a choice -----------------------------------------------------------------------------------

    def choose(self, calls: Iterable[int]) -> RecomputeChoice:
        """The choice to recompute these calls, as far as they are needed."""
        return self.evaluate(calls).choice

    def evaluate(self, calls: Iterable[int]) -> ChoiceState:
        """What follows from recomputing these calls."""
        return self.toggle(self._initial_state, calls)

    @cached_property
    def _initial_state(self) -> ChoiceState:
        """Nothing is recomputed, but what cannot be kept."""
        calls, never = len(self.calls), len(self.live)
        changes = LiveChanges.empty(self.lives, len(self.live))
        nothing = ChoiceState(bytearray(calls), [never] * calls, [None] * len(self.values), changes, 0.0, 0.0)
        return _Update(self, nothing, bytes(calls), range(calls)).run()

    def toggle(self, state: ChoiceState, calls: Iterable[int]) -> ChoiceState:
        """The state in which exactly those of these calls are recomputed that were not before."""
        changed = list(calls)
        wanted = bytearray(state.recomputed)
        for index in changed:
            wanted[index] ^= 1
        return _Update(self, state, wanted, changed).run()

    @cached_property
    def demands(self) -> list[list[Demand]]:
        """By call, what is wanted of each value it makes."""
        begins = np.where(self.saved, self.first_use, -1).tolist()
        ends = np.where(self.saved & ~self.overwritten, self.death, 0).tolist()
        columns = range(len(begins)), begins, ends, self.overwritten.tolist(), map(tuple, self.readers)
        demands = [Demand(*demand) for demand in zip(*columns, strict=True)]
        return [[demands[value] for value in call.values] for call in self.calls]

    @cached_property
    def sources(self) -> list[tuple[int, ...]]:
        """By call, minus the calls that make what it reads."""
        return [tuple({-self.values[source].call: None for source in call.sources}) for call in self.calls]

    @cached_property
    def lives(self) -> list[ValueLife]:
        """By value, its life in the unplanned step."""
        columns = (each.tolist() for each in (self.nbytes, self.flow_end, self.death, self.saved))
        return [ValueLife(*life) for life in zip(*columns, strict=True)]

    def estimate(self, state: ChoiceState) -> Floats:
        """Estimate the bytes alive at every tick."""
        return state.changes.apply(self.live)

    def flops(self, choice: RecomputeChoice) -> int | None:
        """FLOPs of what is recomputed; None where an operator has no formula."""
        return sum_known(self.profile.ops[self.ops[call]].flops for call, _ in self.find_runs(choice))

    def find_runs(self, choice: RecomputeChoice) -> tuple[tuple[int, int], ...]:
        """Each run of a call in backward, with the call before whose backward it is."""
        return tuple((call, call) for call in sorted(choice.recomputed))

    def find_kept(self, choice: RecomputeChoice) -> frozenset[int]:
        """Values that are kept for backward, or for others to be recomputed from."""
        needed = [value for value, use in enumerate(self.evaluate(choice.recomputed).uses) if use is not None]
        return frozenset(value for value in needed if self.values[value].call not in choice.recomputed)

    def find_dropped(self, choice: RecomputeChoice) -> frozenset[int]:
        """Values that autograd saves and that are recomputed instead."""
        made = (value for call in choice.recomputed for value in self.calls[call].values)
        return frozenset(value for value in made if self.values[value].saved and value not in self.offloaded)


class _Update:
    """One change of a choice, followed from the changed calls to what they read. It ends where nothing changes any
    more.

    A call is recomputed where that is wanted and backward needs a value of it, or where it needs one that cannot be
    kept. Calls are visited last first, so those that read a call's values are decided before it.

    Args:
        choices: of the step.
        state: before the change.
        wanted: by call, whether it should be recomputed.
        changed: the calls for which that differs from the state.
    """

    def __init__(
        self, choices: RecomputeChoices, state: ChoiceState, wanted: bytes | bytearray, changed: Iterable[int]
    ) -> None:
        self._choices, self._wanted, self._never = choices, wanted, len(choices.live)
        self._recomputed, self._begins = bytearray(state.recomputed), state.begins.copy()
        self._uses, self._changes = state.uses.copy(), state.changes.copy()
        self._pending = [-index for index in changed]
        heapq.heapify(self._pending)
        self._queued = set(self._pending)

    def run(self) -> ChoiceState:
        """Visit the calls; return the state after the change."""
        while self._pending:
            self._visit(-heapq.heappop(self._pending))
        self._changes.settle(self._most_transient)
        cost = float(self._choices.costs[np.frombuffer(self._recomputed, dtype=bool)].sum())
        peak = float(self._changes.apply(self._choices.live).max(initial=0.0))
        return ChoiceState(self._recomputed, self._begins, self._uses, self._changes, cost, peak)

    def _visit(self, call: int) -> None:
        """Decide whether a call is recomputed, and what its values are needed for."""
        spans, begin, needed, forced = [], self._never, False, False
        for demand in self._choices.demands[call]:
            span = self._span(demand)
            spans.append((demand.value, span))
            if span is not None:
                needed, forced = True, forced or demand.overwritten
                if span[0] < begin:
                    begin = span[0]
        recomputed = forced or (needed and bool(self._wanted[call]))
        if not recomputed:
            begin = self._never
        for value, span in spans:
            use = None if span is None else (recomputed, begin if recomputed else span[0], span[1])
            if use != self._uses[value]:
                self._record_use(value, None if use is None else ValueUse(*use))
        if recomputed != bool(self._recomputed[call]) or begin != self._begins[call]:
            self._recomputed[call], self._begins[call] = recomputed, begin
            self._queue_sources(call)

    def _span(self, demand: Demand) -> tuple[int, int] | None:
        """First and last tick at which backward or a recomputed reader needs a value; None without any."""
        _, first, last, _, readers = demand
        needed = first >= 0
        if not needed:
            first = self._never
        for reader in readers:
            if self._recomputed[reader]:
                needed, at = True, self._begins[reader]
                if at < first:
                    first = at
                if at > last:
                    last = at
        return (first, last) if needed else None

    def _record_use(self, value: int, use: ValueUse | None) -> None:
        before = self._uses[value]
        if before is not None:
            self._changes.count(value, before, -1.0)
        if use is not None:
            self._changes.count(value, use, 1.0)
        self._uses[value] = use

    def _queue_sources(self, call: int) -> None:
        for earlier in self._choices.sources[call]:
            if earlier not in self._queued:
                self._queued.add(earlier)
                heapq.heappush(self._pending, earlier)

    def _most_transient(self, group: Sequence[int]) -> float:
        """The most bytes of transient values, each of which dies after its last recomputed reader."""
        choices = self._choices
        if len(group) < 2:
            return sum(choices.lives[number].nbytes for number in group)
        ends: dict[int, float] = {}
        alive = most = 0.0
        for number in group:
            call, nbytes = choices.values[number].call, choices.lives[number].nbytes
            for done in [end for end in ends if end < call]:
                alive -= ends.pop(done)
            alive += nbytes
            most = max(most, alive)
            end = max((each for each in choices.readers[number] if self._recomputed[each]), default=call)
            ends[end] = ends.get(end, 0.0) + nbytes
        return most
