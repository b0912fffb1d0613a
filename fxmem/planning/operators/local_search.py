"""Local search on choices: bring one within a budget, then make it cheaper there, call by call.

A cut takes the same side for all that its prices do not tell apart, so equal blocks change sides together. Two choices
are therefore mixed, one of them for what runs first and the other for the rest; single calls change sides until the
budget is kept; and the costliest of those that are recomputed are spared, one after the other, others being recomputed
in their stead where the budget asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from fxmem.planning import tuning
from fxmem.planning.operators.choices import ChoiceState, RecomputeChoice, RecomputeChoices


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
