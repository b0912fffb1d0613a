"""Which results of operators to hold for backward and which to make again, one by one: minimum cuts of the forward's graph of operators.

Every result that backward needs is either *held* or *made again*, and what is made again needs its own sources the same way. With a price on
held bytes and one on FLOPs the cheapest choice is a minimum cut (project selection; torch.compile's partitioner solves the case in which FLOPs are free or
forbidden, torch/_functorch/partitioners.py). Prices per byte follow the step: a byte costs what share of the moments near the peak it
is there for, under the choice found before, so that bytes which are gone by then are held for nothing (multiplicative weights on the dual of the
peak). Prices that lie between two cuts are reached by taking one cut's choice for what runs first and the other's for the rest; and what the
budget leaves is spent on holding the costliest results that are made again.

What a choice's peak would be is estimated from the unplanned step: what is made again is taken off it from the last reader in forward on, and put
back from the moment in backward that first asks for it or for something made from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx  # type: ignore[import-untyped]
import numpy as np

from fxmem import liveness
from fxmem.errors import UsageError
from fxmem.planning.geometry import Floats, Geometry
from fxmem.records import Kind, Phase, Profile

__all__ = ["Call", "Choice", "Cutter", "Value"]

_PRICES = 12
"""Prices of a FLOP that are tried, at most."""
_ROUNDS = 3
"""Cuts for each price, the prices of bytes following the peak."""
_MANY = 1000
"""Calls from which on there are fewer of both, and of what is improved."""
_NEAR = 0.02
"""What share of the peak a moment may lie below it and still count by a factor of 1/e."""
_TRIES = 96
"""Calls that are tried to be made again, or no longer, at most."""
_ABREAST = 6
"""Of those that free most for their cost, how many are tried at a time."""
_EVALUATIONS = 40_000
"""Of calls, over those that are tried, at most: a choice takes time in proportion to the calls of the step."""
_ENDLESS = 1 << 40
"""A capacity, before one is set."""
_SEEDS = 4
"""Choices that are improved for a budget."""


@dataclass(frozen=True)
class Value:
    """What a storage holds between two writes to it, made in forward by a call that can be made again."""

    call: int
    """Index of the call."""
    position: int
    """Among the values that it made."""
    storage: tuple[str, int, int]
    """Name and number of the call that allocated the storage, and the position among the storages that call allocated."""
    nbytes: int
    """Of the storage."""
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
class _Course:
    """How a choice goes."""

    again: set[int]
    needed: set[int]
    """Values."""
    first: list[int]
    """By value, the tick at which it is first asked for in backward."""
    last: list[int]


class Cutter:
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
        self.live = np.asarray(liveness.live_bytes(profile), dtype=np.float64)
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

    def _course(self, again: set[int]) -> _Course:
        """What is needed, and when, if these calls are made again, and those of which something that cannot be held is needed."""
        never = len(self.live)
        course = _Course(set(), set(), [never] * len(self.values), [0] * len(self.values))
        for index in range(len(self.calls) - 1, -1, -1):
            forced = False
            for number in self.calls[index].values:
                value = self.values[number]
                askers = [min(course.first[made] for made in self.calls[each].values) for each in self.readers[number] if each in course.again]
                if not value.saved and not askers:
                    continue
                course.needed.add(number)
                forced = forced or value.overwritten
                course.first[number] = min([int(self.first_use[number]), *askers] if value.saved else askers)
                course.last[number] = max([int(self.death[number]), *askers] if value.saved and not value.overwritten else askers, default=0)
            if (forced or index in again) and any(number in course.needed for number in self.calls[index].values):
                course.again.add(index)
                start = min(course.first[number] for number in self.calls[index].values)
                for number in self.calls[index].values:
                    if number in course.needed:
                        course.first[number] = start
        return course

    def choice(self, again: Iterable[int]) -> Choice:
        """What follows from making these calls again, as far as they are needed."""
        course = self._course(set(again))
        remade = sorted(course.again)
        known = [self.profile.ops[self.ops[index]].flops for index in remade]
        made = {number for number in course.needed if self.values[number].call in course.again}
        return Choice(
            again=frozenset(remade),
            held=frozenset(course.needed - made),
            dropped=frozenset(number for number in made if self.values[number].saved),
            cost=float(self.costs[remade].sum()),
            flops=None if None in known else sum(each or 0 for each in known),
            peak=float(self._timeline(course).max(initial=0.0)),
        )

    def _timeline(self, course: _Course) -> Floats:
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

    def _passing(self, group: list[int], course: _Course) -> float:
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

    @property
    def _tries(self) -> int:
        return max(min(_TRIES, _EVALUATIONS // max(len(self.calls), 1)), 12)

    @property
    def _seeds(self) -> int:
        return _SEEDS if len(self.calls) < _MANY else _SEEDS // 2

    # --- cuts ------------------------------------------------------------------------------------------------------------------

    def _cut(self, hold: Floats, again: Floats) -> set[int]:
        """Which calls to make again where holding a value costs `hold` and making a call `again`: the least of all in sum."""
        graph, residual = self._network
        if "needed" not in graph:
            return set()
        scale = 1e6 / max(float(hold.max(initial=0.0)), 1e-30)
        endless = residual.graph["inf"]
        for number in self._relevant:
            capacity = endless if self.values[number].overwritten else round(float(hold[number]) * scale)
            residual[("value", number)][("call", self.values[number].call)]["capacity"] = capacity
        for call in {self.values[number].call for number in self._relevant}:
            residual[("call", call)]["spared"]["capacity"] = min(round(float(again[call]) * scale), endless // 2)
        _, (chosen, _) = nx.minimum_cut(graph, "needed", "spared", flow_func=nx.algorithms.flow.boykov_kolmogorov, residual=residual)
        return {node[1] for node in chosen if node[0] == "call"}

    @cached_property
    def _network(self) -> tuple[Any, Any]:
        """The graph that is cut, and its residual network, whose capacities are set for each cut.

        On the side of `needed` lie the values that are needed and the calls that are made again: a saved value is needed, and a value that is needed but whose
        call is not made again is held.
        """
        graph = nx.DiGraph()
        for number in self._relevant:
            if self.values[number].saved:
                graph.add_edge("needed", ("value", number))
            graph.add_edge(("value", number), ("call", self.values[number].call), capacity=_ENDLESS)
        for call in {self.values[number].call for number in self._relevant}:
            graph.add_edge(("call", call), "spared", capacity=_ENDLESS)
            graph.add_edges_from((("call", call), ("value", source)) for source in self.calls[call].sources)
        residual = nx.algorithms.flow.utils.build_residual_network(graph, "capacity")
        return graph, residual

    @cached_property
    def _relevant(self) -> list[int]:
        """Values that backward could have a use for."""
        found: set[int] = set()
        for call in reversed(self.calls):
            for number in call.values:
                if self.values[number].saved or any(made in found for each in self.readers[number] for made in self.calls[each].values):
                    found.add(number)
        return sorted(found)

    def _priced(self, again: set[int]) -> tuple[Floats, Floats]:
        """By value, what a byte of it costs held and made again: how much of the weight of moments lies in its time, most of it on those near the peak."""
        course, end = self._course(again), len(self.live)
        planned = self._timeline(course)
        top = float(planned.max(initial=1.0))
        weights = np.exp((planned - top) / (_NEAR * top))
        share = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
        first, last = np.minimum(course.first, end), np.asarray(course.last)
        saved = np.asarray([value.saved for value in self.values], dtype=bool)
        first = np.where(first == end, np.minimum(self.first_use, end), first)
        last = np.minimum(np.where(saved, np.maximum(self.death, last), np.maximum(last, first)), end)
        held = share[last] - share[np.minimum(self.flow_end, last)]
        made = share[last] - share[np.minimum(np.maximum(first - 1, 0), last)]
        return held, made

    @cached_property
    def pool(self) -> tuple[Choice, ...]:
        """Choices of many prices, none of which is worse than another in both; the cheapest first."""
        found: dict[frozenset[int], Choice] = {}
        for price in self._prices:
            again: set[int] = set()
            held, made = np.ones(len(self.values)), np.zeros(len(self.values))
            for turn in range(_ROUNDS if len(self.calls) < _MANY else _ROUNDS - 1):
                if turn:
                    now_held, now_made = self._priced(again)
                    held, made = (held + now_held) / 2, (made + now_made) / 2
                again = self._cut(self.nbytes * held, price * self.costs + self._of_calls(self.nbytes * made))
                choice = self.choice(again)
                found.setdefault(choice.again, choice)
        found.setdefault(frozenset(), self.choice(()))
        return tuple(_front(found.values()))

    def _of_calls(self, by_value: Floats) -> Floats:
        """Sums over what each call makes."""
        return np.asarray([sum(by_value[number] for number in call.values) for call in self.calls])

    @cached_property
    def _prices(self) -> list[float]:
        """Bytes that a FLOP is worth: those at which single results would change sides."""
        calls = {self.values[number].call for number in self._relevant}
        made = self._of_calls(self.nbytes)
        rates = sorted({float(made[call] / self.costs[call]) for call in calls if made[call] and self.costs[call]}, reverse=True)
        most = _PRICES if len(self.calls) < _MANY else _PRICES // 3
        if len(rates) <= most:
            return [rate * 0.999 for rate in rates]
        spread = np.geomspace(rates[0], rates[-1], most)
        return [float(rate) * 0.999 for rate in spread]

    # --- for a budget ------------------------------------------------------------------------------------------------------------

    def front(self, seeds: Iterable[Iterable[int]] = ()) -> list[Choice]:
        """Cuts, seeds and their unions, of which none is better than another in both cost and peak; the cheapest first."""
        return list(_front(self._known(seeds)))

    def _known(self, seeds: Iterable[Iterable[int]]) -> list[Choice]:
        begun = [self.choice(seed) for seed in seeds]
        return [*self.pool, *begun, *(self.choice(seed.again | cut.again) for seed in begun for cut in self.pool[1:])]

    def within(self, budget: float, seeds: Iterable[Iterable[int]] = ()) -> Choice | None:
        """The cheapest choice found whose estimated peak is within the budget; None if there is none.

        Args:
            seeds: choices of calls to begin from, beside the cuts.
        """
        known = self._known(seeds)
        fitting = [choice for choice in known if choice.peak <= budget]
        cheapest = min((choice.cost for choice in fitting), default=float("inf"))
        above = sorted((choice for choice in known if choice.peak > budget and choice.cost < cheapest), key=lambda each: (each.peak, each.cost))
        fitting += [choice for close in above[: self._seeds] if (choice := self._freed(close, budget)) is not None]
        if not fitting:
            return None
        fitting.sort(key=lambda choice: choice.cost)
        for cheaper in above[: self._seeds]:
            fitting += self._between(cheaper, fitting[0], budget)
        fitting.sort(key=lambda choice: choice.cost)
        return min((self._held_after_all(choice, budget) for choice in fitting[: self._seeds]), key=lambda choice: choice.cost)

    def _between(self, cheaper: Choice, deeper: Choice, budget: float) -> Iterator[Choice]:
        """The deeper choice for what runs first, the cheaper one for the rest, as little of the deeper as keeps the budget; and the other way round."""
        differing = sorted(cheaper.again ^ deeper.again)
        for first, rest in ((deeper.again, cheaper.again), (cheaper.again, deeper.again)):
            low, high = 0, len(differing)
            while low < high:
                middle = (low + high) // 2
                border = differing[middle]
                mixed = self.choice({i for i in first if i <= border} | {i for i in rest if i > border})
                fits = mixed.peak <= budget
                if fits:
                    yield mixed
                if fits == (first is deeper.again):
                    high = middle
                else:
                    low = middle + 1

    def _freed(self, choice: Choice, budget: float) -> Choice | None:
        """The choice with one call after the other changed sides, what frees most at the peak for its cost first, until it keeps the budget.

        With a call that is made again go those that nothing but it needs, and where one change does nothing by itself, two are tried.
        """
        left = self._tries
        while choice.peak > budget:
            better: list[Choice] = []
            movable = self._movable(choice)
            changes = [(call,) for call in movable] + list(itertools.combinations(movable[:_ABREAST], 2))
            for begin in range(0, len(changes), _ABREAST):
                batch = changes[begin : begin + _ABREAST]
                left -= len(batch)
                better = [other for calls in batch if (other := self._changed(choice, calls)).peak < choice.peak]
                if better or left <= 0:
                    break
            if not better or left <= 0:
                return None
            start = choice
            choice = max(better, key=lambda other: (start.peak - max(other.peak, budget)) / max(other.cost - start.cost, 1.0))
        return choice

    def _changed(self, choice: Choice, calls: Iterable[int]) -> Choice:
        """These calls on the other side; with those that are made again now, the ones that are needed for nothing else."""
        again = set(choice.again)
        for call in calls:
            if call in again:
                again.remove(call)
                continue
            pending = [call]
            while pending:
                again.add(pending[-1])
                sources = [self.values[source] for source in self.calls[pending.pop()].sources]
                known = choice.held
                pending += [value.call for value in sources if value.call not in again and not known.intersection(self.calls[value.call].values)]
        return self.choice(again)

    def _movable(self, choice: Choice) -> list[int]:
        """Calls whose results are there at the peak because they are held, or because they have been made again, those that free most for their cost first."""
        course = self._course(set(choice.again))
        at = int(self._timeline(course).argmax())
        rates: dict[int, float] = {}
        for number in course.needed:
            call, nbytes, saved = self.values[number].call, float(self.nbytes[number]), self.values[number].saved
            if call in choice.again:
                there = course.first[number] - 1 <= at < max(course.last[number], course.first[number])
                rate = nbytes if there else 0.0
            else:
                there = self.flow_end[number] <= at < max(int(self.death[number]) if saved else 0, course.last[number])
                rate = nbytes / max(float(self.costs[call]), 1.0) if there else 0.0
            if rate:
                rates[call] = rates.get(call, 0.0) + rate
        return sorted(rates, key=lambda call: (-rates[call], call))

    def _held_after_all(self, choice: Choice, budget: float) -> Choice:
        """The choice with what the budget leaves spent on its costliest calls."""
        for index in sorted(choice.again, key=lambda i: (-self.costs[i], i))[: self._tries]:
            if index in choice.again:
                less = self.choice(choice.again - {index})
                if less.peak <= budget and less.cost < choice.cost:
                    choice = less
        return choice


def _front(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Those of which none is better in both cost and peak, cheapest first."""
    lowest = float("inf")
    for choice in sorted(choices, key=lambda each: (each.cost, each.peak)):
        if choice.peak < lowest:
            lowest = choice.peak
            yield choice
