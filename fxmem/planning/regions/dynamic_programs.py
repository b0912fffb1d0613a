"""The planners proper: dynamic programs over the tables of `fxmem.planning.regions.cost_tables`.

`flat` walks the cuts from the first to the last and keeps, at each, the Pareto front of bytes kept against cost: a unit
is stored, or a stretch of units that ends here is checkpointed, whole or keeping some of its products' results
(`fxmem.planning.regions.cost_tables`). It is exact for the tables, but for fronts longer than `tuning.FRONT` points,
which are thinned to the cheapest of each of `tuning.FRONT` equal steps of bytes kept.

`nested` is rotor's recurrence (Beaumont et al. 2019, arXiv:1911.13214) over the same tables: what is checkpointed is
recomputed under a plan of its own, in the memory that is left; a selective region contains no others and is in none.
Memory is in `tuning.SLOTS` equal steps, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fxmem.planning import tuning
from fxmem.planning.lookups import Bools, Floats, Ints
from fxmem.planning.regions.candidates import Span, siblings
from fxmem.planning.regions.cost_tables import CostTables, Selection


@dataclass(frozen=True)
class Stretch:
    """Units `first` to `last - 1`, checkpointed together; within them, when they are recomputed, `inner`."""

    first: int
    last: int
    inner: tuple[Stretch, ...] = ()
    level: int = 0
    """Which of its products' results it keeps; see `fxmem.planning.regions.cost_tables`."""


@dataclass(frozen=True)
class Offer:
    """Tables `[i, j]` of one way to checkpoint units `i` to `j - 1`."""

    regions: Bools
    """Whether they may be one region, and this way differs from a cheaper one."""
    kept: Floats
    """Bytes that stay."""
    need: Floats
    """Bytes that running them, forward and again, needs beyond what older units keep."""
    cost: Floats


class _Ways(NamedTuple):
    """The ways to come to a cut from an earlier one."""

    source: Ints
    """The earlier cut."""
    way: Ints
    """0: the unit in between is stored; level + 1: a stretch is checkpointed."""
    need: Floats
    kept: Floats
    cost: Floats


class Tables:
    """What storing and checkpointing any stretch of a step's units needs.

    Args:
        units: the units.
        regions: `[i, j]`, whether units `i` to `j - 1` may be one region.
        spans: the calls of modules that regions have to be; None: regions may be anything.
    """

    def __init__(self, units: CostTables, regions: Bools, spans: Sequence[Span] | None = None) -> None:
        self.units, self.regions, self.spans = units, regions, spans
        self._solved: dict[bool, _Nested] = {}

    @cached_property
    def kept_bytes(self) -> Floats:
        """`[i, j]`: bytes that stay when units `i` to `j - 1` are checkpointed."""
        return self.units.outputs + self.units.inputs

    @cached_property
    def stored_peak(self) -> Floats:
        """`[i, j]`: bytes that the backward of units `i` to `j - 1` needs beyond what older units keep."""
        return _running_maximum(self.units.backward_peak)

    @cached_property
    def peak(self) -> Floats:
        """`[i, j]`: the same where they are recomputed first."""
        return np.maximum(self.backward_peak, self.recomputing_peak)

    @cached_property
    def backward_peak(self) -> Floats:
        """`[i, j]`: bytes that the backward of a region of units `i` to `j - 1` needs beyond what older units keep."""
        return self.stored_peak + self.units.inputs

    @cached_property
    def recomputing_peak(self) -> Floats:
        """`[i, j]`: the same of its recomputation before that."""
        return self.units.recompute_peak + self.units.gradients[None, :] + self.units.inputs

    @cached_property
    def forward_peak(self) -> Floats:
        """`[i, j]`: bytes that running them forward needs beyond what older units keep, if nothing is saved."""
        return _running_maximum(self.units.checkpointed_forward_peak)

    @cached_property
    def whole_cost(self) -> Floats:
        """By cut: cost of running every unit before it."""
        units = self.units
        total = np.concatenate([[0.0], np.cumsum(units.ops.node_costs[0])])
        return np.asarray([total[cut] - total[units.first] for cut in units.cuts])

    @cached_property
    def selection(self) -> Selection:
        """The products whose results regions may keep."""
        return Selection(self.units)

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """By level, the cost of checkpointing a stretch that keeps that level's products."""
        need, cost = np.maximum(self.peak, self.forward_peak), self.units.cost
        found = [Offer(self.regions, self.kept_bytes, need, cost)]
        for spared, held, extra in self.selection.offers:
            left = np.maximum(cost - spared, 0.0)
            less = left < found[-1].cost - 0.5  # else it keeps what the level before keeps
            # What is kept is handed out while the region runs again; its backward finds what it would find without.
            need = np.maximum(np.maximum(self.backward_peak, self.recomputing_peak + extra), self.forward_peak + held)
            found.append(Offer(self.regions & less, self.kept_bytes + held, need, left))
        return tuple(found)

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The model as a chain: every unit, or where regions are modules, the siblings that keep most for backward."""
        if self.spans is None:
            return tuple((unit, unit + 1) for unit in range(self.units.count))
        at = self.units.cut_at
        chain = siblings(self.units.profile, self.spans)
        return tuple((at[span.first], at[span.last]) for span in chain if span.first in at and span.last in at)

    def group(self, blocks: Sequence[tuple[int, int]], groups: Sequence[int]) -> tuple[Stretch, ...]:
        """Join neighbours of one group to a stretch, cut into as few regions as possible. The rest is stored.

        Args:
            blocks: first and last unit of each, in order.
            groups: by block, the number of its group.
        """
        found: list[tuple[int, int]] = []
        for index, (i, j) in enumerate(blocks):
            if index and groups[index] == groups[index - 1] and found[-1][1] == i:
                found[-1] = (found[-1][0], j)
            else:
                found.append((i, j))
        return tuple(stretch for i, j in found for stretch in self._legal(i, j))

    def _legal(self, i: int, j: int) -> Iterator[Stretch]:
        while i < j:
            end = next((end for end in range(j, i, -1) if self.regions[i, end]), None)
            if end is not None:
                yield Stretch(i, end)
            i = i + 1 if end is None else end

    def estimate(self, stretches: Sequence[Stretch]) -> int:
        """Peak of the step in bytes under these regions."""
        return round(max(self.units.floor, self._estimate(0, self.units.count, stretches, 0.0)))

    def _estimate(self, first: int, last: int, stretches: Sequence[Stretch], beside: float) -> float:
        """Bytes that units need forward and in backward, beyond what older units keep.

        Args:
            first, last: units of a region that is run again, or all.
            stretches: the regions within them.
            beside: bytes alive beside them while they run forward that were not in the step's own forward.
        """
        units, kept, most, cut = self.units, 0.0, 0.0, first
        for stretch in (*stretches, Stretch(last, last)):
            i, j = stretch.first, stretch.last
            for unit in range(cut, i):
                forward = units.forward_peak[unit, unit] + beside
                most = max(most, kept + units.backward_peak[unit, unit], kept + forward)
                kept += units.keeps[unit]
            if i == j:
                break
            offer = self.offers[stretch.level]
            if stretch.inner:
                gradients = float(units.gradients[j]) - units.resident
                inputs = units.inputs[i, j] - max(units.inputs[inner.first, inner.last] for inner in stretch.inner)
                need = self._estimate(i, j, stretch.inner, gradients) + max(inputs, 0.0)  # which none of those keeps
            else:
                need = offer.need[i, j]
            most = max(most, kept + need, kept + self.forward_peak[i, j] + beside)
            kept += offer.kept[i, j]
            cut = j
        return most

    # --- one level ----------------------------------------------------------------------------------------------------

    def flat(self, budget: float) -> tuple[Stretch, ...] | None:
        """The cheapest regions within the budget of bytes; None if there are none."""
        n = self.units.count
        kept, cost = np.full((2, n + 1, tuning.FRONT), np.inf)
        # Which point of which cut it comes from, cut * tuning.FRONT + point, and which of `_Ways.way` leads from there.
        origin, region = np.zeros((2, n + 1, tuning.FRONT), dtype=np.int64)
        kept[0, 0] = cost[0, 0] = 0.0
        for cut, ways in enumerate(self._ways_to_cuts, 1):
            base = kept[ways.source]
            rows, columns = np.nonzero((base + ways.need[:, None] <= budget) & np.isfinite(base))
            if not len(rows):
                continue
            total_kept = base[rows, columns] + ways.kept[rows]
            total_cost = cost[ways.source[rows], columns] + ways.cost[rows]
            chosen = _front(total_kept, total_cost, budget)
            size = len(chosen)
            kept[cut, :size], cost[cut, :size] = total_kept[chosen], total_cost[chosen]
            origin[cut, :size] = ways.source[rows[chosen]] * tuning.FRONT + columns[chosen]
            region[cut, :size] = ways.way[rows[chosen]]
        if not np.isfinite(cost[n]).any():
            return None
        found: list[Stretch] = []
        cut, point = n, int(np.argmin(cost[n]))
        while cut > 0:
            before, at = divmod(int(origin[cut, point]), tuning.FRONT)
            if region[cut, point]:
                found.append(Stretch(before, cut, level=int(region[cut, point]) - 1))
            cut, point = before, at
        return tuple(reversed(found))

    @cached_property
    def smallest(self) -> float:
        """The smallest budget that `flat` keeps, to a thousandth."""
        low, high = self.units.floor, max(self.units.unplanned_peak, self.units.floor) + 1
        if self._is_reachable(low):
            return low
        while high - low > self.units.unplanned_peak / 1000:
            middle = (low + high) / 2
            low, high = (low, middle) if self._is_reachable(middle) else (middle, high)
        return high

    def _is_reachable(self, budget: float) -> bool:
        """Whether `flat` has regions within a budget: by the fewest bytes kept at each cut, which its fronts all have,
        at any cost."""
        fewest = np.full(self.units.count + 1, np.inf)
        fewest[0] = 0.0
        for cut, ways in enumerate(self._ways_to_cuts, 1):
            base = fewest[ways.source]
            fewest[cut] = (base + ways.kept)[base + ways.need <= budget].min(initial=np.inf)
        return bool(np.isfinite(fewest[-1]))

    @cached_property
    def _ways_to_cuts(self) -> list[_Ways]:
        """By cut but the first, each way from an earlier one."""
        found = []
        for cut in range(1, self.units.count + 1):
            columns: list[tuple[ArrayLike, ...]] = [
                ([cut - 1], [0], [self.unit_need[cut - 1]], [self.units.keeps[cut - 1]], [0.0])
            ]
            for way, offer in enumerate(self.offers, 1):
                at = np.flatnonzero(offer.regions[:cut, cut])
                columns.append(
                    (at, np.full(len(at), way), offer.need[at, cut], offer.kept[at, cut], offer.cost[at, cut])
                )
            found.append(_Ways(*map(np.concatenate, zip(*columns, strict=True))))
        return found

    @cached_property
    def unit_need(self) -> Floats:
        """By unit: bytes that it needs, stored, beyond what older units keep."""
        return np.maximum(np.diagonal(self.units.backward_peak), np.diagonal(self.units.forward_peak))

    # --- several levels -----------------------------------------------------------------------------------------------

    def nested(self, budget: float, *, selective: bool = True) -> tuple[Stretch, ...] | None:
        """The cheapest nested regions that keep the budget; None if there are none. Some of them are selective if they
        may be.

        A budget near the one before is read from the same solution, in slots as fine or finer by a quarter at most.
        """
        solved = self._solved.get(selective)
        if solved is None or not tuning.NEAR_BUDGETS * tuning.SLOTS <= solved.count_whole_slots(budget) <= solved.slots:
            solved = self._solved[selective] = _Nested(self, budget, selective=selective)
        slots = solved.count_whole_slots(budget)
        return None if solved.fewest_slots is None or solved.fewest_slots > slots else solved.regions(slots)

    @cached_property
    def smallest_nested(self) -> tuple[float, tuple[Stretch, ...]] | None:
        """The smallest budget that `nested` keeps, to a hundredth, and its regions; None if it keeps none.

        What regions could keep only takes room.
        """
        budget, found = min(self.units.unplanned_peak, tuning.ROUNDED * self.smallest), None
        for _ in range(tuning.FINER):
            solved = _Nested(self, budget, selective=False)
            if solved.fewest_slots is None:
                break
            budget = solved.floor + solved.fewest_slots * solved.unit
            found = budget, solved.regions(solved.fewest_slots)
        return found


class _Nested:
    """`best[i][j][m]`: the least cost of a pass over units `i` to `j - 1` and of their backward, with `m` slots left
    above what older units keep. Stretches of one length are solved together."""

    def __init__(self, tables: Tables, budget: float, *, selective: bool = True) -> None:
        self.selective = tables.offers[1:] if selective else ()
        self.tables, self.n = tables, tables.units.count
        floor = float(tables.units.resident)
        self.unit = max((budget - floor) / tuning.SLOTS, 1.0)
        self.floor, self.slots = floor, tuning.SLOTS + tuning.SLOTS_ABOVE
        n = self.n
        padded = np.full((n + 1, n + 1, 2 * (self.slots + 1)), np.inf)
        self.best = padded[:, :, self.slots + 1 :]
        # `[i, j, slots + 1 - m]`: the same where `m` slots are taken already.
        self._shifted = np.lib.stride_tricks.sliding_window_view(padded, self.slots + 1, axis=2)
        self.ways = 2 + len(self.selective)
        # -2: none; -1: stored as a whole; else split at k, ways * k + the way that what is before it is run: 0 stored;
        # 1 checkpointed; 1 + level selective.
        self.how = np.full((n + 1, n + 1, self.slots + 1), -2, dtype=np.int32)
        self.fewest = np.full((n + 1, n + 1), self.slots + 1)
        """The fewest slots in which there is a way."""
        self._solve()

    @property
    def fewest_slots(self) -> int | None:
        """The fewest slots in which the whole step has a plan; None if it has none."""
        slots = np.flatnonzero(np.isfinite(self.best[0, self.n]))
        return int(slots[0]) if len(slots) else None

    def _count_slots(self, nbytes: Floats) -> Ints:
        """Slots for bytes that stay, rounded up."""
        return np.maximum(np.ceil(nbytes / self.unit - 1e-9), 0).astype(np.int64)

    def _count_needed(self, nbytes: Floats) -> Ints:
        """Slots that bytes including the resident ones need."""
        return self._count_slots(nbytes - self.floor)

    def _solve(self) -> None:
        tables, units, n = self.tables, self.tables.units, self.n
        whole = tables.whole_cost
        whole_needs, last_needs = self._count_needed(tables.peak), self._count_needed(tables.stored_peak[:, n])
        kept, forward = self._count_slots(tables.kept_bytes), self._count_needed(tables.forward_peak)
        levels = [
            (offer.regions, self._count_slots(offer.kept), self._count_needed(offer.need), offer.cost)
            for offer in self.selective
        ]
        unit_kept = self._count_slots(units.keeps)
        unit_needs = self._count_needed(tables.unit_need[:n])
        # Every way to begin: the units before `split` are checkpointed.
        begin, split = np.nonzero(np.triu(tables.regions[:n, :n], 1))
        for length in range(1, n + 1):
            i = np.arange(n + 1 - length)
            j = i + length
            stored, cost = whole_needs[i, j], units.cost[i, j]
            stored[-1], cost[-1] = last_needs[i[-1]], whole[n] - whole[i[-1]]
            # Stored as a whole, where the slots suffice.
            enough = np.arange(self.slots + 1) >= stored[:, None]
            self.best[i, j] = np.where(enough, cost[:, None], np.inf)
            self.how[i, j] = np.where(enough, -1, -2)
            inside = (begin <= i[-1]) & (split - begin < length)
            at, to = begin[inside], split[inside]
            self._offer(at, to, at + length, 1, kept[at, to], forward[at, to], whole[to] - whole[at], stored[at])
            # Selective in the step's own forward alone, and nothing within it.
            at, to = at[at == i[-1]], to[at == i[-1]]
            for level, (regions, stays, needs, again) in enumerate(levels, 2):
                allowed = regions[at, to]
                a, b = at[allowed], to[allowed]
                forth = whole[b] - whole[a] + again[a, b]
                self._offer(a, b, a + length, level, stays[a, b], needs[a, b], forth, stored[a])
            if length > 1:
                self._offer(i, i + 1, j, 0, unit_kept[i], unit_needs[i], whole[i + 1] - whole[i], stored)
            self.fewest[i, j] = np.isinf(self.best[i, j]).sum(axis=1)

    def _offer(self, i: Ints, k: Ints, j: Ints, way: int, kept: Ints, needed: Ints, cost: Floats, stored: Ints) -> None:
        """Offer to split units `i` to `j - 1` at `k`, in order of `i`.

        How what is before the split is run is `way`; `kept` slots stay of it, running it needs `needed` at all and
        costs `cost`. With `stored` slots nothing costs less than to store all of them.
        """
        fewest = np.maximum(needed, kept + self.fewest[k, j])
        if way == 1:
            fewest = np.maximum(fewest, self.fewest[i, k])
        at = fewest < np.minimum(stored, self.slots + 1)
        if not at.any():
            return
        i, k, j, kept, needed, cost = i[at], k[at], j[at], kept[at], needed[at], cost[at]
        total = self._shifted[k, j, self.slots + 1 - kept]
        total += cost[:, None]
        if way == 1:
            total += self.best[i, k]
        total[np.arange(self.slots + 1) < needed[:, None]] = np.inf
        starts = np.flatnonzero(np.diff(i, prepend=-1))
        for first, last in zip(starts, [*starts[1:], len(i)], strict=True):
            chosen = first + total[first:last].argmin(axis=0)
            least = total[chosen, np.arange(self.slots + 1)]
            best, how = self.best[i[first], j[first]], self.how[i[first], j[first]]
            better = least < best - 1e-9
            best[better], how[better] = least[better], self.ways * k[chosen[better]] + way

    def count_whole_slots(self, budget: float) -> int:
        """The whole slots in a budget."""
        return int((budget - self.floor) / self.unit + 1e-9)

    def regions(self, slots: int) -> tuple[Stretch, ...]:
        return tuple(self._build(0, self.n, slots))

    def _build(self, i: int, j: int, slots: int) -> Iterator[Stretch]:
        while i < j:
            code = int(self.how[i, j, slots])
            if code < 0:
                return
            k, way = divmod(code, self.ways)
            if way > 1:
                yield Stretch(i, k, level=way - 1)
                slots -= int(self._count_slots(self.tables.offers[way - 1].kept[i, k]))
            elif way == 1:
                yield Stretch(i, k, tuple(self._build(i, k, slots)))
                slots -= int(self._count_slots(self.tables.kept_bytes[i, k]))
            else:
                slots -= int(self._count_slots(self.tables.units.keeps[i]))
            i = k


def _running_maximum(by_unit: Floats) -> Floats:
    """From `[v, i]`, of unit `v` alone, `[i, j]`: the largest of units `i` to `j - 1`."""
    n = by_unit.shape[0]
    table = np.zeros((n + 1, n + 1))
    for i in range(n):
        table[i, i + 1 :] = np.maximum.accumulate(by_unit[i:, i])
    return table


def _front(kept: Floats, cost: Floats, budget: float) -> Ints:
    """Indices of the Pareto front, fewest bytes first, thinned to `tuning.FRONT`."""
    near = _drop_dominated(kept, cost, budget)
    order = near[np.lexsort((cost[near], kept[near]))]
    sorted_cost = cost[order]
    lowest = np.minimum.accumulate(sorted_cost)
    front: Ints = order[np.concatenate([[True], sorted_cost[1:] < lowest[:-1] - 1e-9])]
    if len(front) <= tuning.FRONT:
        return front
    steps = np.floor(kept[front] / (budget / (tuning.FRONT - 1)))
    last_of_step = np.concatenate([steps[1:] != steps[:-1], [True]])
    last_of_step[0] = True
    thinned: Ints = front[last_of_step]
    if len(thinned) > tuning.FRONT:
        thinned = thinned[np.linspace(0, len(thinned) - 1, tuning.FRONT).round().astype(np.int64)]
    return thinned


def _drop_dominated(kept: Floats, cost: Floats, budget: float) -> Ints:
    """Drop most points that are not on the Pareto front, without sorting. A point is dropped if one that keeps fewer
    bytes, by equal steps, costs no more."""
    steps = np.minimum((kept * (tuning.FRONT_STEPS / max(budget, 1.0))).astype(np.int64), tuning.FRONT_STEPS)
    lowest = np.full(tuning.FRONT_STEPS + 2, np.inf)
    np.minimum.at(lowest[1:], steps, cost)
    return np.flatnonzero(cost < np.minimum.accumulate(lowest)[steps])
