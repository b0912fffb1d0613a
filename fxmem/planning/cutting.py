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
from typing import Any

import networkx as nx  # type: ignore[import-untyped]
import numpy as np

from fxmem.planning.choices import Choice, Choices
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
_ENDLESS = 1 << 40
"""A capacity, before one is set."""
_SEEDS = 4
"""Choices that are improved for a budget."""


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
        course, end = self.course(again), len(self.live)
        planned = self.planned(course)
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
            for turn in range(self._rounds):
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
        fitting += [choice for close in above[: self._improved] if (choice := self._freed(close, budget)) is not None]
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
                pending += [value.call for value in sources if value.call not in again and not choice.held.intersection(self.calls[value.call].values)]
        return self.choice(again)

    def _movable(self, choice: Choice) -> list[int]:
        """Calls whose results are there at the peak because they are held, or because they have been made again, those that free most for their cost first."""
        course = self.course(set(choice.again))
        at = int(self.planned(course).argmax())
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
