"""Minimum cuts of the graph of operators: which results to keep for backward, which to recompute.

Every result that backward needs is either *kept* or *recomputed*, and what is recomputed needs its own sources the same
way. With a price on kept bytes and one on FLOPs the cheapest choice is a minimum cut (project selection).
torch.compile's partitioner cuts with FLOPs either free or forbidden, and solves a knapsack for budgets in between
(torch/_functorch/partitioners.py). Prices per byte follow the step: every moment has one, and a byte costs those of the
moments that it is there for, under the choice found before, so that bytes which are gone by the peak are kept for
nothing. For no budget in particular they lie near the peak; for one they ascend its Lagrangian dual (multiplicative
weights). What cuts leave undone, the local search (`Refiner`) does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxmem.planning import tuning
from fxmem.planning.lookups import Floats
from fxmem.planning.operators.choices import ChoiceState, RecomputeChoice, RecomputeChoices
from fxmem.records.pause_gc import pause_gc

# --- local search on choices: bring one within a budget, then make it cheaper there, call by call ---------------------
# A cut takes the same side for all that its prices do not tell apart, so equal blocks change sides together. Two
# choices are therefore mixed, one of them for what runs first and the other for the rest; single calls change sides
# until the budget is kept; and the costliest of those that are recomputed are spared, one after the other, others being
# recomputed in their stead where the budget asks for it.


class Refiner:
    """Changes choices for one budget.

    Args:
        step: what there is to choose.
        budget: bytes that the estimated peak may have.
    """

    def __init__(self, step: RecomputeChoices, budget: float) -> None:
        self._step, self._budget = step, budget
        calls = len(step.calls)
        taken = tuning.MOVE_OVERHEAD + max(calls, calls * calls // tuning.MOVES_MANY_CALLS)
        self.moves = tuning.MOVES // taken // step.effort
        """Changes that may still be tried."""
        self._states: dict[frozenset[int], ChoiceState] = {}

    def mix(self, cheaper: RecomputeChoice, deeper: RecomputeChoice) -> Iterator[RecomputeChoice]:
        """Mix two choices at each cut of the program: the deeper one for what runs first, the cheaper one for the rest,
        as little of the deeper one as keeps the budget; and the other way round."""
        differing = sorted(cheaper.recomputed ^ deeper.recomputed)
        for is_deeper_first, rest in ((True, self._state(cheaper)), (False, self._state(deeper))):
            low, high = 0, len(differing)
            while low < high:
                middle = (low + high) // 2
                mixed = self._step.toggle(rest, differing[: middle + 1])
                fits = mixed.peak <= self._budget
                if fits:
                    yield mixed.choice
                if fits == is_deeper_first:
                    high = middle
                else:
                    low = middle + 1

    def fit_budget(self, choice: RecomputeChoice, tries: int) -> RecomputeChoice | None:
        """Toggle one call after the other until the choice keeps the budget; None if so many tries are too few."""
        found = self._fit_budget(self._state(choice), tries)
        return None if found is None else found.choice

    def cheapen(self, choice: RecomputeChoice, moves: int) -> RecomputeChoice:
        """Stop recomputing the costliest calls, one by one, while that is cheaper and fits."""
        state, end = self._state(choice), self.moves - moves
        costs = self._step.costs
        tried: set[int] = set()
        while self.moves > max(end, 0):
            again = np.flatnonzero(np.frombuffer(state.recomputed, dtype=bool)).tolist()
            costliest = max((call for call in again if call not in tried), key=costs.item, default=None)
            if costliest is None:
                break
            tried.add(costliest)
            self.moves -= 1
            spared = self._step.toggle(state, (costliest,))
            if spared.cost >= state.cost:
                continue
            repaired = self._fit_budget(spared, tuning.REPAIRS, below=state.cost, but=costliest)
            if repaired is not None:
                state = repaired
        return state.choice

    def _state(self, choice: RecomputeChoice) -> ChoiceState:
        if choice.recomputed not in self._states:
            self._states[choice.recomputed] = self._step.evaluate(choice.recomputed)
        return self._states[choice.recomputed]

    def _fit_budget(
        self, state: ChoiceState, tries: int, *, below: float = float("inf"), but: int = -1
    ) -> ChoiceState | None:
        """Toggle one call after the other until the budget is kept. Those that free most for their cost come first.

        With a call that is recomputed go those that nothing but it needs, and where one change does nothing by itself,
        two are tried.

        Args:
            below: what it has to cost less than.
            but: a call that is left as it is.
        """
        last = self.moves - tries
        while state.peak > self._budget:
            better: list[ChoiceState] = []
            movable = [call for call in self._rank_movable(state) if call != but]
            changes = [(call,) for call in movable] + list(itertools.combinations(movable[: tuning.MOVES_ABREAST], 2))
            for begin in range(0, len(changes), tuning.MOVES_ABREAST):
                if self.moves <= max(last, 0):
                    return None
                batch = changes[begin : begin + tuning.MOVES_ABREAST]
                self.moves -= len(batch)
                changed = [self._toggle_with_sources(state, calls) for calls in batch]
                better = [other for other in changed if other.cost < below and other.peak < state.peak]
                if better:
                    break
            if not better:
                return None
            start = state
            state = max(
                better,
                key=lambda other: (start.peak - max(other.peak, self._budget)) / max(other.cost - start.cost, 1.0),
            )
        return state

    def _toggle_with_sources(self, state: ChoiceState, calls: Iterable[int]) -> ChoiceState:
        """Toggle these calls; recompute with each also the sources that nothing else needs."""
        step = self._step
        changed: set[int] = set()
        for call in calls:
            if state.recomputed[call]:
                changed.add(call)
                continue
            pending = [call]
            while pending:
                changed.add(pending[-1])
                for source in step.calls[pending.pop()].sources:
                    before = step.values[source].call
                    if (
                        not state.recomputed[before]
                        and before not in changed
                        and all(state.uses[made] is None for made in step.calls[before].values)
                    ):
                        pending.append(before)
        return step.toggle(state, changed)

    def _rank_movable(self, state: ChoiceState) -> list[int]:
        """Rank the calls whose results are alive at the peak by bytes freed per cost."""
        step = self._step
        at = int(step.estimate(state).argmax())
        first, last = state.spans(len(step.live))
        remade = np.frombuffer(state.recomputed, dtype=bool)[step.makers]
        made_there = remade & (first - 1 <= at) & (at < np.maximum(last, first))
        held_there = ~remade & (step.flow_end <= at) & (at < np.maximum(np.where(step.saved, step.death, 0), last))
        price = np.maximum(step.costs, 1.0)[step.makers]
        rate = np.where(made_there, step.nbytes, 0.0) + np.where(held_there, step.nbytes, 0.0) / price
        rate[[use is None for use in state.uses]] = 0.0
        rates = np.bincount(step.makers, rate, len(step.calls))
        found = np.flatnonzero(rates)
        ordered: list[int] = found[np.argsort(-rates[found], kind="stable")].tolist()
        return ordered


# --- the graph that is cut, and its cuts ------------------------------------------------------------------------------


class _Network(NamedTuple):
    """A graph of which every edge has a price."""

    starts: NDArray[np.int32]
    """By node, where its edges begin; and where they end."""
    heads: NDArray[np.int32]
    """By edge, the node that it leads to."""
    price: NDArray[np.int64]
    """By edge, whose it is: a value's, a call's, or endless."""


class Cutter(RecomputeChoices):
    """The choices for one step, found by cuts."""

    def without(self, offloaded: Sequence[int], freed: Floats) -> Cutter:
        """The step with these values in the host's memory; see `RecomputeChoices`."""
        return Cutter(self.profile, self.calls, self.values, offloaded, freed)

    @property
    def is_large(self) -> bool:
        """Whether less is tried."""
        return len(self.calls) >= tuning.LARGE_STEP

    # --- cuts ---------------------------------------------------------------------------------------------------------

    def _cut(self, keep: Floats, recompute: Floats) -> list[int]:
        """Return the cheapest calls to recompute, given the prices of kept values and recomputed calls."""
        from scipy.sparse import csr_array  # type: ignore[import-untyped]
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

        network = self._network
        prices = np.concatenate([np.where(self.overwritten, np.inf, keep), recompute, [np.inf]])
        scale = tuning.LARGEST_CAPACITY / max(float(keep.max(initial=0.0)), 1e-30)
        capacities = np.minimum(np.round(prices[network.price] * scale), np.iinfo(np.int32).max).astype(np.int32)
        size = len(self.values) + len(self.calls) + 2
        graph = csr_array((capacities, network.heads, network.starts), shape=(size, size))
        residual = graph - maximum_flow(graph, size - 2, size - 1).flow
        residual.eliminate_zeros()
        chosen = breadth_first_order(residual, size - 2, return_predecessors=False) - len(self.values)
        return [int(call) for call in chosen if 0 <= call < len(self.calls)]

    @cached_property
    def _network(self) -> _Network:
        """The graph that is cut: values, calls, what is needed and what is spared.

        On the side of what is needed lie the values that are and the calls that are recomputed: a saved value is
        needed, and a value that is needed but whose call is not recomputed is kept.
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
        return _Network(
            starts, np.ascontiguousarray(heads), np.asarray([edges[edge] for edge in sorted(edges)], dtype=np.int64)
        )

    @cached_property
    def _relevant(self) -> list[int]:
        """Values that backward could have a use for."""
        found: set[int] = set()
        for call in reversed(self.calls):
            for number in call.values:
                made_from_it = (made for each in self.readers[number] for made in self.calls[each].values)
                if self.values[number].saved or not found.isdisjoint(made_from_it):
                    found.add(number)
        return sorted(found)

    def _near_peak(self, state: ChoiceState) -> Floats:
        """Weights of moments, 1 in sum, most of it on those near the peak."""
        planned = self.estimate(state)
        top = float(planned.max(initial=1.0))
        weights = np.exp((planned - top) / (tuning.NEAR_PEAK * top))
        shares: Floats = weights / weights.sum()
        return shares

    def _price_values(self, state: ChoiceState, weights: Floats) -> tuple[Floats, Floats]:
        """By value, price a byte kept and a byte recomputed. The price is the weight of the moments in its lifetime."""
        end, share = len(self.live), np.concatenate([[0.0], np.cumsum(weights)])
        first, last = state.spans(end)
        first = np.where(first == end, np.minimum(self.first_use, end), first)
        last = np.minimum(np.where(self.saved, np.maximum(self.death, last), np.maximum(last, first)), end)
        kept = share[last] - share[np.minimum(self.flow_end, last)]
        made = share[last] - share[np.minimum(np.maximum(first - 1, 0), last)]
        return kept, made

    @cached_property
    def pool(self) -> tuple[RecomputeChoice, ...]:
        """Choices for many prices, none of them worse than another in both cost and peak; the cheapest first."""
        found: dict[frozenset[int], RecomputeChoice] = {}
        for price in self._prices:
            kept, made, state = np.ones(len(self.values)), np.zeros(len(self.values)), None
            for _ in range(tuning.CUTS_PER_PRICE):
                if state is not None:
                    now_held, now_made = self._price_values(state, self._near_peak(state))
                    kept, made = (kept + now_held) / 2, (made + now_made) / 2
                recompute = price * self.costs + self._sum_by_call(self.nbytes * made)
                state = self.evaluate(self._cut(self.nbytes * kept, recompute))
                found.setdefault(state.choice.recomputed, state.choice)
        found.setdefault(frozenset(), self.choose(()))
        return tuple(find_front(found.values()))

    def _sum_by_call(self, by_value: Floats) -> Floats:
        """Sums over what each call makes."""
        sums: Floats = np.bincount(self.makers, by_value, len(self.calls)).astype(np.float64)
        return sums

    @cached_property
    def _prices(self) -> list[float]:
        """Bytes that a FLOP is worth: those at which single results would change sides."""
        calls = {self.values[number].call for number in self._relevant}
        made = self._sum_by_call(self.nbytes)
        found = {float(made[call] / self.costs[call]) for call in calls if made[call] and self.costs[call]}
        rates, (high, low) = sorted(found, reverse=True), tuning.CUTS
        most = max(min(high, tuning.CUT_CALLS // max(len(self.calls), 1)), low) // tuning.CUTS_PER_PRICE
        if len(rates) > most:
            rates = np.geomspace(rates[0], rates[-1], most).tolist()
        return [rate * 0.999 for rate in rates]

    # --- for a budget -------------------------------------------------------------------------------------------------

    @pause_gc()
    def front(self, seeds: Iterable[Iterable[int]] = ()) -> list[RecomputeChoice]:
        """Return the cuts, seeds and unions that none beats in cost and peak, cheapest first."""
        return list(find_front(self._seeded_choices(seeds)))

    def _seeded_choices(self, seeds: Iterable[Iterable[int]]) -> list[RecomputeChoice]:
        found = list(self.pool)
        for seed in map(self.evaluate, seeds):
            found.append(seed.choice)
            found += [self.toggle(seed, cut.recomputed - seed.choice.recomputed).choice for cut in self.pool[1:]]
        return found

    @pause_gc()
    def solve(self, budget: float, seeds: Iterable[Iterable[int]] = ()) -> RecomputeChoice | None:
        """Find the cheapest choice whose estimated peak keeps the budget; None if there is none.

        Args:
            seeds: choices of calls to begin from, beside the cuts.
        """
        refiner = Refiner(self, budget)
        front = list(find_front([*self._seeded_choices(seeds), *self._ascend_dual(budget)]))
        near = tuning.MIXED[self.is_large]
        above = [choice for choice in reversed(front) if choice.peak > budget][:near]
        fitting = [choice for choice in front if choice.peak <= budget][:near]
        tried = (refiner.fit_budget(close, refiner.moves // near // 2) for close in above)
        fitting += [freed for freed in tried if freed is not None]
        for deeper, cheaper in itertools.product(sorted(fitting, key=_cost)[:near], above):
            fitting += refiner.mix(cheaper, deeper)
        distinct = {choice.recomputed: choice for choice in fitting}.values()
        cheapest = sorted(distinct, key=_cost)[: tuning.SETTLED[self.is_large]]
        settled = (
            refiner.cheapen(choice, refiner.moves // (len(cheapest) - index)) for index, choice in enumerate(cheapest)
        )
        return min(settled, key=_cost, default=None)

    def _ascend_dual(self, budget: float) -> Iterator[RecomputeChoice]:
        """Yield cuts by prices for this budget: a moment's price rises while the peak exceeds the budget there, and
        falls while it is below.

        That is ascent on the Lagrangian dual of the budget, with exponential steps that become smaller.
        """
        over = np.maximum(self.live - budget, 0.0)
        if not self._prices or not over.any() or budget <= 0:
            return
        state = self.evaluate(())
        weights = over / over.sum() / float(np.sqrt(self._prices[0] * self._prices[-1]))
        for step in range(tuning.ASCENT_STEPS[self.is_large]):
            kept, made = self._price_values(state, weights)
            cut = set(self._cut(self.nbytes * kept, self.costs + self._sum_by_call(self.nbytes * made)))
            state = self.toggle(state, cut ^ state.choice.recomputed)
            yield state.choice
            share = tuning.ASCENT_RATE / np.sqrt(1 + step / tuning.ASCENT_SLOWS) * (self.estimate(state) / budget - 1)
            weights = weights * np.exp(np.clip(share, -tuning.ASCENT_LARGEST, tuning.ASCENT_LARGEST))
            weights = np.maximum(weights, tuning.ASCENT_LEAST_PRICE * weights.max()) * (self.live > 0)


def _cost(choice: RecomputeChoice) -> float:
    return choice.cost


def find_front(choices: Iterable[RecomputeChoice]) -> Iterator[RecomputeChoice]:
    """Those of which none is better in both cost and peak, cheapest first."""
    lowest = float("inf")
    for choice in sorted(choices, key=lambda each: (each.cost, each.peak)):
        if choice.peak < lowest:
            lowest = choice.peak
            yield choice
