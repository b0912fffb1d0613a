"""Which results of operators to hold for backward and which to make again, one by one: minimum cuts of the forward's graph of operators.

Every result that backward needs is either *held* or *made again*, and what is made again needs its own sources the same way. With a price on
held bytes and one on FLOPs the cheapest choice is a minimum cut (project selection). torch.compile's partitioner cuts with FLOPs either free or forbidden,
and solves a knapsack for budgets in between (torch/_functorch/partitioners.py). Prices per byte follow the step: a byte costs what share of the
moments near the peak it is there for, under the choice found before, so that bytes which are gone by then are held for nothing (multiplicative
weights on the dual of the peak). Prices that lie between two cuts are reached by taking one cut's choice for what runs first and the other's for the
rest; single calls then change sides until the budget is kept, and what it leaves is spent on holding the costliest results that are made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxmem.planning.choices import Choice, Choices, Course
from fxmem.planning.geometry import Floats

__all__ = ["Cutter"]

_CUTS = 36, 8
"""That are made, at most and at least."""
_CUT_CALLS = 12_000
"""Calls of all graphs that are cut together, in between."""
_ROUNDS = 3, 2
"""Cuts for each price of a FLOP, the prices of bytes following the peak: of graphs of fewer than `_MANY` calls, and of others."""
_MANY = 1000
"""Calls from which on less is improved, too."""
_NEAR = 0.02
"""What share of the peak a moment may lie below it and still count by a factor of 1/e."""
_TRIES = 96
"""Calls that are tried to be made again, or no longer, at most."""
_ABREAST = 6
"""Of those that free most for their cost, how many are tried at a time."""
_EVALUATIONS = 40_000
"""Of calls, over those that are tried, at most: a choice takes time in proportion to the calls of the step."""
_LARGEST = 1 << 28
"""What the largest value counts as, in the 32 bits that capacities have; what is larger than them counts as endless."""
_SEEDS = 4
"""Choices that are improved for a budget."""


class _Network(NamedTuple):
    """A graph of which every edge has a price."""

    starts: NDArray[np.int32]
    """By node, where its edges begin; and where they end."""
    heads: NDArray[np.int32]
    """By edge, the node that it leads to."""
    price: NDArray[np.int64]
    """By edge, whose it is: a value's, a call's, or endless."""


class Cutter(Choices):
    """Choices for one step, found by cuts."""

    @property
    def _tries(self) -> int:
        return max(min(_TRIES, _EVALUATIONS // max(len(self.calls), 1)), 12)

    @property
    def _rounds(self) -> int:
        return _ROUNDS[len(self.calls) >= _MANY]

    @property
    def _improved(self) -> int:
        return _SEEDS if len(self.calls) < _MANY else _SEEDS // 2

    # --- cuts ------------------------------------------------------------------------------------------------------------------

    def _cut(self, hold: Floats, again: Floats) -> list[int]:
        """Which calls to make again where holding a value costs `hold` and making a call `again`: the least of all in sum."""
        from scipy.sparse import csr_array  # type: ignore[import-untyped]
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

        network = self._network
        prices = np.concatenate([np.where(self._overwritten, np.inf, hold), again, [np.inf]])
        scale = _LARGEST / max(float(hold.max(initial=0.0)), 1e-30)
        capacities = np.minimum(np.round(prices[network.price] * scale), np.iinfo(np.int32).max).astype(np.int32)
        size = len(self.values) + len(self.calls) + 2
        graph = csr_array((capacities, network.heads, network.starts), shape=(size, size))
        residual = graph - maximum_flow(graph, size - 2, size - 1).flow
        residual.eliminate_zeros()
        chosen = breadth_first_order(residual, size - 2, return_predecessors=False) - len(self.values)
        return [int(call) for call in chosen if 0 <= call < len(self.calls)]

    @cached_property
    def _overwritten(self) -> NDArray[np.bool_]:
        return np.asarray([value.overwritten for value in self.values], dtype=bool)

    @cached_property
    def _network(self) -> _Network:
        """The graph that is cut: values, calls, what is needed and what is spared.

        On the side of what is needed lie the values that are and the calls that are made again: a saved value is needed, and a value that is needed but whose
        call is not made again is held.
        """
        values, calls = len(self.values), len(self.calls)
        needed, spared, endless = values + calls, values + calls + 1, values + calls
        edges = {(needed, number): endless for number in self._relevant if self.values[number].saved}
        for number in self._relevant:
            edges[number, values + self.values[number].call] = number
        for call in {self.values[number].call for number in self._relevant}:
            edges[values + call, spared] = values + call
            edges |= {(values + call, source): endless for source in self.calls[call].sources}
        tails, heads = np.asarray(sorted(edges), dtype=np.int32).reshape(-1, 2).T
        starts = np.searchsorted(tails, np.arange(values + calls + 3)).astype(np.int32)
        return _Network(starts, np.ascontiguousarray(heads), np.asarray([edges[edge] for edge in sorted(edges)], dtype=np.int64))

    @cached_property
    def _relevant(self) -> list[int]:
        """Values that backward could have a use for."""
        found: set[int] = set()
        for call in reversed(self.calls):
            for number in call.values:
                if self.values[number].saved or any(made in found for each in self.readers[number] for made in self.calls[each].values):
                    found.add(number)
        return sorted(found)

    def _priced(self, course: Course) -> tuple[Floats, Floats]:
        """By value, what a byte of it costs held and made again: how much of the weight of moments lies in its time, most of it on those near the peak."""
        end, planned = len(self.live), self.planned(course)
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
            course = None
            held, made = np.ones(len(self.values)), np.zeros(len(self.values))
            for _ in range(self._rounds):
                if course is not None:
                    now_held, now_made = self._priced(course)
                    held, made = (held + now_held) / 2, (made + now_made) / 2
                course = self.course(self._cut(self.nbytes * held, price * self.costs + self._of_calls(self.nbytes * made)))
                found.setdefault(course.choice.again, course.choice)
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
        most = max(min(_CUTS[0], _CUT_CALLS // max(len(self.calls), 1)), _CUTS[1]) // self._rounds
        if len(rates) <= most:
            return [rate * 0.999 for rate in rates]
        spread = np.geomspace(rates[0], rates[-1], most)
        return [float(rate) * 0.999 for rate in spread]

    # --- for a budget ------------------------------------------------------------------------------------------------------------

    def front(self, seeds: Iterable[Iterable[int]] = ()) -> list[Choice]:
        """Cuts, seeds and their unions, of which none is better than another in both cost and peak; the cheapest first."""
        return list(_front(self._known(seeds)))

    def _known(self, seeds: Iterable[Iterable[int]]) -> list[Choice]:
        found = list(self.pool)
        for seed in map(self.course, seeds):
            found += [seed.choice, *(self.moved(seed, cut.again - seed.choice.again).choice for cut in self.pool[1:])]
        return found

    def within(self, budget: float, seeds: Iterable[Iterable[int]] = ()) -> Choice | None:
        """The cheapest choice found whose estimated peak is within the budget; None if there is none.

        Args:
            seeds: choices of calls to begin from, beside the cuts.
        """
        known = self._known(seeds)
        fitting = [choice for choice in known if choice.peak <= budget]
        cheapest = min((choice.cost for choice in fitting), default=float("inf"))
        above = sorted((choice for choice in known if choice.peak > budget and choice.cost < cheapest), key=lambda each: (each.peak, each.cost))
        fitting += [course.choice for close in above[: self._improved] if (course := self._freed(self.course(close.again), budget)) is not None]
        if not fitting:
            return None
        fitting.sort(key=lambda choice: choice.cost)
        for cheaper in above[: self._improved]:
            fitting += self._between(cheaper, fitting[0], budget)
        fitting.sort(key=lambda choice: choice.cost)
        return min((self._held_after_all(choice, budget) for choice in fitting[: self._improved]), key=lambda choice: choice.cost)

    def _between(self, cheaper: Choice, deeper: Choice, budget: float) -> Iterator[Choice]:
        """The deeper choice for what runs first, the cheaper one for the rest, as little of the deeper as keeps the budget; and the other way round."""
        differing = sorted(cheaper.again ^ deeper.again)
        for is_deeper_first, rest in ((True, self.course(cheaper.again)), (False, self.course(deeper.again))):
            low, high = 0, len(differing)
            while low < high:
                middle = (low + high) // 2
                mixed = self.moved(rest, differing[: middle + 1])
                fits = mixed.peak <= budget
                if fits:
                    yield mixed.choice
                if fits == is_deeper_first:
                    high = middle
                else:
                    low = middle + 1

    def _freed(self, course: Course, budget: float) -> Course | None:
        """The course with one call after the other changed sides, what frees most at the peak for its cost first, until it keeps the budget.

        With a call that is made again go those that nothing but it needs, and where one change does nothing by itself, two are tried.
        """
        left = self._tries
        while course.peak > budget:
            better: list[Course] = []
            movable = self._movable(course)
            changes = [(call,) for call in movable] + list(itertools.combinations(movable[:_ABREAST], 2))
            for begin in range(0, len(changes), _ABREAST):
                batch = changes[begin : begin + _ABREAST]
                left -= len(batch)
                better = [other for calls in batch if (other := self._changed(course, calls)).peak < course.peak]
                if better or left <= 0:
                    break
            if not better or left <= 0:
                return None
            start = course
            course = max(better, key=lambda other: (start.peak - max(other.peak, budget)) / max(other.cost - start.cost, 1.0))
        return course

    def _changed(self, course: Course, calls: Iterable[int]) -> Course:
        """These calls on the other side; with those that are made again now, the ones that are needed for nothing else."""
        changed: set[int] = set()
        for call in calls:
            if course.again[call]:
                changed.add(call)
                continue
            pending = [call]
            while pending:
                changed.add(pending[-1])
                for source in self.calls[pending.pop()].sources:
                    before = self.values[source].call
                    if not course.again[before] and before not in changed and not any(course.needed[made] for made in self.calls[before].values):
                        pending.append(before)
        return self.moved(course, changed)

    def _movable(self, course: Course) -> list[int]:
        """Calls whose results are there at the peak because they are held, or because they have been made again, those that free most for their cost first."""
        at = int(self.planned(course).argmax())
        rates: dict[int, float] = {}
        for number in np.flatnonzero(np.frombuffer(course.needed, dtype=bool)).tolist():
            call, (nbytes, flow, death, saved) = self.values[number].call, self._lasting[number]
            if course.again[call]:
                there = course.first[number] - 1 <= at < max(course.last[number], course.first[number])
                rate = nbytes if there else 0.0
            else:
                there = flow <= at < max(death if saved else 0, course.last[number])
                rate = nbytes / max(float(self.costs[call]), 1.0) if there else 0.0
            if rate:
                rates[call] = rates.get(call, 0.0) + rate
        return sorted(rates, key=lambda call: (-rates[call], call))

    def _held_after_all(self, choice: Choice, budget: float) -> Choice:
        """The choice with what the budget leaves spent on its costliest calls."""
        course = self.course(choice.again)
        for index in sorted(choice.again, key=lambda i: (-self.costs[i], i))[: self._tries]:
            if course.again[index]:
                less = self.moved(course, (index,))
                if less.peak <= budget and less.cost < course.cost:
                    course = less
        return course.choice


def _front(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Those of which none is better in both cost and peak, cheapest first."""
    lowest = float("inf")
    for choice in sorted(choices, key=lambda each: (each.cost, each.peak)):
        if choice.peak < lowest:
            lowest = choice.peak
            yield choice
