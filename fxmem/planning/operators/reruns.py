"""Recomputing results more than once, and what that does to the peak.

Where a result belongs to a *stretch* of the forward, it is freed again as soon as it has been recomputed for a result
beyond the stretch, and recomputed once more when backward has come to the stretch, as in regions within regions. Here a
backward is followed through such a choice, demand by demand, as `fxmem.checkpointing.tape` carries it out. Analyses of
the applied choices give the same bytes or fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxmem.planning.operators.calls import StretchPath
from fxmem.planning.operators.choices import ChoiceState, RecomputeChoice
from fxmem.planning.operators.live_changes import LiveChanges, ValueUse
from fxmem.planning.operators.min_cut import Cutter, find_front


@dataclass(frozen=True, eq=False)
class RerunState(ChoiceState):
    """A choice with what follows from it where calls run more than once."""

    once: ChoiceState
    """The same if each ran once."""
    runs: tuple[tuple[int, int], ...]
    """Each run of a call in backward, with the call of the value that it is for."""


class RerunCutter(Cutter):
    """The choices for one step whose values are in stretches.

    Args:
        cutter: of the step.
        stretches: by value that is in one, its stretch.
    """

    effort = 16

    def __init__(self, cutter: Cutter, stretches: Mapping[int, StretchPath]) -> None:
        # The tables are the cutter's own, which take long to make; the pool is not, as its costs are others here.
        vars(self).update({name: value for name, value in vars(cutter).items() if name != "pool"})
        self.stretches, self._once = stretches, cutter

    @cached_property
    def saved_in_order(self) -> list[tuple[int, int]]:
        """What autograd saves, by the tick at which backward first reads it: that tick, and the value."""
        saved = (index for index, value in enumerate(self.values) if value.saved)
        return sorted((int(self.first_use[index]), index) for index in saved)

    @cached_property
    def pool(self) -> tuple[RecomputeChoice, ...]:
        """See `Cutter.pool`; the same choices, with the costs and peaks that they have here."""
        return tuple(find_front(self.choose(choice.recomputed) for choice in self._once.pool))

    def toggle(self, state: ChoiceState, calls: Iterable[int]) -> RerunState:
        """See `RecomputeChoices.toggle`."""
        once = super().toggle(state.once if isinstance(state, RerunState) else state, calls)
        followed = _Backward(self, once.recomputed, self.stretches)
        runs = tuple((call, self.values[demand.value].call) for demand in followed.demands for call in demand.calls)
        cost = float(sum(self.costs[call] for call, _ in runs))
        changes = followed.find_changes()
        peak = float(changes.apply(self.live).max(initial=0.0))
        uses = [None if use is None else followed.find_use(value, use) for value, use in enumerate(once.uses)]
        return RerunState(once.recomputed, once.begins, uses, changes, cost, peak, once, runs)

    def _ascend_dual(self, budget: float) -> Iterator[RecomputeChoice]:
        """None: of 41 plans for ResNet-50 one was cheaper for them, by 0.7 %."""
        return iter(())

    def find_runs(self, choice: RecomputeChoice) -> tuple[tuple[int, int], ...]:
        """See `RecomputeChoices.find_runs`."""
        state = self.evaluate(choice.recomputed)
        assert isinstance(state, RerunState)
        return state.runs


class _Demand(NamedTuple):
    """A value that backward asks for and that is not there; what runs for it."""

    tick: int
    value: int
    calls: list[int]


class _Backward:
    """The backward of one choice.

    Args:
        step: what there was to choose.
        recomputed: by call, whether it is recomputed.
        stretches: by value that is in one, its stretch.
    """

    def __init__(self, step: RerunCutter, recomputed: bytearray, stretches: Mapping[int, StretchPath]) -> None:
        self._step, self._recomputed, self._stretches = step, recomputed, stretches
        self._first: dict[int, int] = {}
        """By value that has been recomputed to stay, the tick at which it was."""
        self._last: dict[int, int] = {}
        """By value, the last tick at which backward reads it or recomputes from it."""
        self.demands = list(self._follow())

    def _follow(self) -> Iterator[_Demand]:
        step, last = self._step, self._last
        for tick, value in step.saved_in_order:
            last[value] = max(last.get(value, tick), 0 if step.values[value].overwritten else int(step.death[value]))
            calls = self._find_missing(value)
            for call in calls:
                last |= {source: max(last.get(source, tick), tick) for source in step.calls[call].sources}
                for made in step.calls[call].values:
                    if self._stays(made, value):
                        self._first.setdefault(made, tick)
            if calls:
                yield _Demand(tick, value, calls)

    def _stays(self, value: int, target: int) -> bool:
        """Whether a value stays once it has been recomputed for another."""
        path = self._stretches.get(value, ())
        return self._stretches.get(target, ())[: len(path)] == path

    def _find_missing(self, value: int) -> list[int]:
        """The calls that lead to a value from what is there, in their order."""
        step, found, pending = self._step, set[int](), [value]
        while pending:
            each = pending.pop()
            call = step.values[each].call
            if self._recomputed[call] and call not in found and each not in self._first:
                found.add(call)
                pending += step.calls[call].sources
        return sorted(found)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def find_use(self, value: int, once: ValueUse) -> ValueUse:
        """What backward needs a value for, given what it would if each call ran once."""
        first = self._first.get(value, once.first)
        return ValueUse(once.recomputed, first, max(self._last.get(value, first), once.last))

    def find_changes(self) -> LiveChanges:
        """How the bytes alive differ from those of the unplanned step."""
        step = self._step
        changes = LiveChanges.empty(step.lives, len(step.live))
        for number, life in enumerate(step.lives):
            last = self._last.get(number, 0)
            if not self._recomputed[step.values[number].call]:
                changes.shift(life.death if life.saved else life.flow_end, last, life.nbytes)
                continue
            if life.saved:
                changes.shift(life.flow_end, life.death, -life.nbytes)
            if (first := self._first.get(number)) is not None:
                changes.shift(max(first - 1, 0), last, life.nbytes)
        for demand in self.demands:
            changes.raise_transient(demand.tick, self._most_transient(demand))
        return changes

    def _most_transient(self, demand: _Demand) -> float:
        """The most bytes, while calls run for a demand, beyond those of what stays."""
        step, lives = self._step, self._step.lives
        left = Counter(source for call in demand.calls for source in step.calls[call].sources)
        left[demand.value] += 1
        there = {value for call in demand.calls for value in step.calls[call].values if self._remains(value, demand)}
        here = most = 0.0
        for call in demand.calls:
            made = step.calls[call].values
            here += sum(lives[value].nbytes for value in made)
            most = max(most, here)
            done = [value for value in made if not left[value] or self._was_there(value, demand)]
            for source in step.calls[call].sources:
                left[source] -= 1
                if not left[source] and self._recomputed[step.values[source].call]:
                    done += [] if self._was_there(source, demand) else [source]
            here -= sum(lives[value].nbytes for value in done if value not in there)
        return max(most - sum(lives[value].nbytes for value in there), 0.0)

    def _was_there(self, value: int, demand: _Demand) -> bool:
        """Whether a value was alive before a demand."""
        return self._first.get(value, demand.tick) < demand.tick

    def _remains(self, value: int, demand: _Demand) -> bool:
        """Whether a value is alive once the demand has been met that recomputed it."""
        return self._first.get(value) == demand.tick and self._last.get(value, 0) > demand.tick
