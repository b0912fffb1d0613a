"""Recomputing results more than once, and what that does to the peak.

Where a result belongs to a *stretch* of the forward, it is freed again as soon as it has been recomputed for a result
beyond the stretch, and recomputed once more when backward has come to the stretch, as in regions within regions. Here a
backward is followed through such a choice, demand by demand, as `fxmem.checkpointing.tape` carries it out. Analyses of
the applied choices give the same bytes or fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fxmem.planning import tuning
from fxmem.planning.lookups import Ints
from fxmem.planning.operators.choices import (
    ChoiceState,
    LiveChanges,
    RecomputeChoice,
    RecomputeChoices,
    StretchPath,
    ValueUse,
)
from fxmem.planning.operators.min_cut import Cutter, find_front
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.records.units import group


class RerunState(ChoiceState):
    """A choice with what follows from it where calls run more than once, each as soon as that is asked for.

    Args:
        step: what there was to choose.
        once: the same if each call ran once.
    """

    def __init__(self, step: RerunCutter, once: ChoiceState) -> None:
        followed = _Backward(step, once.recomputed, step.stretches)
        vars(self).update(step=step, once=once, followed=followed, recomputed=once.recomputed, begins=once.begins)

    step: RerunCutter
    once: ChoiceState
    followed: _Backward

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Each run of a call in backward, with the call of the value that it is for."""
        values = self.step.values
        return tuple((call, values[demand.value].call) for demand in self.followed.demands for call in demand.calls)

    @cached_property
    def cost(self) -> float:
        """As planners count."""
        return float(sum(self.step.costs[call] for call, _ in self.runs))

    @cached_property
    def changes(self) -> LiveChanges:
        """How the bytes alive differ from those of the unplanned step."""
        return self.followed.find_changes()

    @cached_property
    def peak(self) -> float:
        """Estimate of the step's peak, in bytes."""
        return float(self.changes.apply(self.step.live).max(initial=0.0))

    @cached_property
    def uses(self) -> list[ValueUse | None]:
        """By value, what backward needs it for."""
        followed = self.followed
        return [None if use is None else followed.find_use(value, use) for value, use in enumerate(self.once.uses)]


class _Saved(NamedTuple):
    """A value that autograd saves."""

    tick: int
    """At which backward first reads it."""
    value: int
    last: int
    """Tick at which autograd itself last needs it; 0 where it is written over."""


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
        self._followed: dict[bytes, RerunState] = {}
        """By what is recomputed, the latest: a search comes to a third of its choices again."""

    @cached_property
    def saved_in_order(self) -> list[_Saved]:
        """What autograd saves, by the tick at which backward first reads it."""
        needed = np.where(self.overwritten, 0, self.death)
        columns = (each[self.saved].tolist() for each in (self.first_use, np.arange(len(self.values)), needed))
        return sorted(_Saved(*each) for each in zip(*columns, strict=True))

    @cached_property
    def pool(self) -> tuple[RecomputeChoice, ...]:
        """See `Cutter.pool`; the same choices, with the costs and peaks that they have here."""
        return tuple(find_front(self.choose(choice.recomputed) for choice in self._once.pool))

    def toggle(self, state: ChoiceState, calls: Iterable[int]) -> RerunState:
        """See `RecomputeChoices.toggle`."""
        once = super().toggle(state.once if isinstance(state, RerunState) else state, calls)
        recomputed = bytes(once.recomputed)
        found = self._followed.pop(recomputed, None)
        state = RerunState(self, once) if found is None else found
        self._followed[recomputed] = state  # the latest last
        if len(self._followed) > tuning.FOLLOWED:
            del self._followed[next(iter(self._followed))]
        return state

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
        step, first, last = self._step, self._first, self._last
        for tick, value, needed in step.saved_in_order:
            last[value] = max(last.get(value, tick), needed)
            calls = self._find_missing(value)
            for call in calls:
                for source in step.calls[call].sources:
                    last[source] = max(last.get(source, tick), tick)
                for made in step.calls[call].values:
                    if made not in first and self._stays(made, value):
                        first[made] = tick
            if calls:
                yield _Demand(tick, value, calls)

    def _stays(self, value: int, target: int) -> bool:
        """Whether a value stays once it has been recomputed for another."""
        path = self._stretches.get(value, ())
        return self._stretches.get(target, ())[: len(path)] == path

    def _find_missing(self, value: int) -> list[int]:
        """The calls that lead to a value from what is there, in their order."""
        recomputed, first, values, calls = self._recomputed, self._first, self._step.values, self._step.calls
        found, pending = set[int](), [value]
        while pending:
            each = pending.pop()
            call = values[each].call
            if recomputed[call] and each not in first and call not in found:
                found.add(call)
                pending += calls[call].sources
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
        again = np.frombuffer(self._recomputed, dtype=bool)[step.makers]
        first, last = self._by_value(self._first, len(step.live)), self._by_value(self._last, 0)
        changes.shift_all(np.where(step.saved, step.death, step.flow_end), last, np.where(again, 0.0, step.nbytes))
        changes.shift_all(step.flow_end, step.death, np.where(again & step.saved, -step.nbytes, 0.0))
        changes.shift_all(np.maximum(first - 1, 0), last, np.where(again, step.nbytes, 0.0))
        for demand in self.demands:
            changes.raise_transient(demand.tick, self._most_transient(demand))
        return changes

    def _by_value(self, ticks: Mapping[int, int], otherwise: int) -> Ints:
        table = np.full(len(self._step.values), otherwise, dtype=np.int64)
        table[list(ticks)] = list(ticks.values())
        return table

    def _most_transient(self, demand: _Demand) -> float:
        """The most bytes, while calls run for a demand, beyond those of what stays."""
        calls, values, lives = self._step.calls, self._step.values, self._step.lives
        there = {value for call in demand.calls for value in calls[call].values if self._remains(value, demand)}
        stays = sum(lives[value].nbytes for value in there)
        left = Counter(source for call in demand.calls for source in calls[call].sources)
        left[demand.value] += 1
        here = most = 0.0
        for call in demand.calls:
            made = calls[call].values
            here += sum(lives[value].nbytes for value in made)
            most = max(most, here)
            done = [value for value in made if not left[value] or self._was_there(value, demand)]
            for source in calls[call].sources:
                left[source] -= 1
                if not left[source] and self._recomputed[values[source].call] and not self._was_there(source, demand):
                    done.append(source)
            here -= sum(lives[value].nbytes for value in done if value not in there)
        return max(most - stays, 0.0)

    def _was_there(self, value: int, demand: _Demand) -> bool:
        """Whether a value was alive before a demand."""
        return self._first.get(value, demand.tick) < demand.tick

    def _remains(self, value: int, demand: _Demand) -> bool:
        """Whether a value is alive once the demand has been met that recomputed it."""
        return self._first.get(value) == demand.tick and self._last.get(value, 0) > demand.tick


# --- plans of regions as choices of calls -----------------------------------------------------------------------------
# What a region runs again, and in which stretch each of its values lies.


class RegionChoice(NamedTuple):
    """What regions come down to."""

    calls: set[int]
    """Calls that they run again."""
    paths: dict[int, StretchPath]
    """By value of regions that hold others, the region that alone needs it: the number of each that holds it."""


class RegionChoices:
    """Tells of the regions of one step which calls they are.

    Args:
        step: what there is to choose.
    """

    def __init__(self, step: RecomputeChoices) -> None:
        self._step = step

    @cached_property
    def _calls_by_node(self) -> dict[int, list[int]]:
        return group((self._step.profile.ops[op].node, index) for index, op in enumerate(self._step.ops))

    def find(self, tables: Tables, stretches: Iterable[Stretch]) -> RegionChoice:
        """The choice that regions are.

        Args:
            tables: in whose units the regions are.
            stretches: the regions.
        """
        calls, paths = set[int](), dict[int, StretchPath]()
        regions = list(stretches)
        cuts = tables.units.cuts
        for number, region in enumerate(regions):
            rerun = {node for later in regions[number + 1 :] for node in range(cuts[later.first], cuts[later.last])}
            for call, late in self._find_inside(tables, region):
                if not any(self._is_kept(value, cuts[region.last], rerun) for value in late):
                    calls.add(call)
            if region.inner:
                paths |= self._find_paths(tables, region, (number,))
        return RegionChoice(calls, {value: path for value, path in paths.items() if len(path) > 1})

    def _is_kept(self, value: int, last: int, rerun: set[int]) -> bool:
        """Whether a value that is read after its region has to stay: a node from `last` on saves it, or one of `rerun`
        is run again with it."""
        step = self._step
        storage = step.storages[value]
        if storage is not None and self._last_savers.get(storage, -1) >= last:
            return True
        return any(step.profile.ops[step.ops[reader]].node in rerun for reader in step.readers[value])

    @cached_property
    def _last_savers(self) -> dict[int, int]:
        """By storage that is saved, the last node that saves it."""
        return {storage: index for index, node in enumerate(self._step.profile.nodes) for storage in node.saved}

    def _find_paths(self, tables: Tables, region: Stretch, path: StretchPath) -> dict[int, StretchPath]:
        found: dict[int, StretchPath] = {}
        for call, late in self._find_inside(tables, region):
            found |= dict.fromkeys(set(self._step.calls[call].values) - late, path)
        for number, inner in enumerate(region.inner):
            found |= self._find_paths(tables, inner, (*path, number))
        return found

    def _find_inside(self, tables: Tables, region: Stretch) -> Iterator[tuple[int, set[int]]]:
        """The calls that a region runs again, with what is read after it of each."""
        step, units = self._step, tables.units
        first, last = units.cuts[region.first], units.cuts[region.last]
        kept = {product.op for _, product in tables.selection.find_kept(first, last, region.level)}
        for call in (call for node in range(first, last) for call in self._calls_by_node.get(node, ())):
            if step.ops[call] not in kept:
                made = [(value, step.storages[value]) for value in step.calls[call].values]
                readers = ((value, units.last_reader.get(s, -1)) for value, s in made if s is not None)
                yield call, {value for value, last_reader in readers if last_reader >= region.last}
