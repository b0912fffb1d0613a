"""Tables of what checkpointing any stretch of a step would keep, allocate and cost.

The forward of a model is cut into *units*, stretches of nodes between two places where a region may begin or end. A
*cut* is a place between units: cut `i` stands before unit `i`. Everything here follows from the unplanned profile:

- what a storage made in forward is needed for: its producer, the last call that reads it, the nodes that keep it for
  backward;
- the live bytes at every tick of the unplanned step, of which what older units made can be taken off, so that
  `rest + H` is the live bytes when older units keep `H` bytes instead.

All tables are numpy arrays of bytes or FLOPs (float64: exact up to 2**53).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxmem.hardware.op_classes import is_product
from fxmem.hardware.step_time import recompute_seconds
from fxmem.memory import liveness
from fxmem.planning import tuning
from fxmem.planning.lookups import Floats, Ints, find_reads, last_needed, ops_by_node, results_by_op
from fxmem.planning.regions.candidates import earliest, random_nodes, writes_in_place
from fxmem.records.plan import Region
from fxmem.records.profile import Phase, Profile
from fxmem.records.units import group, sum_known

# --- what running the calls of a step's forward once more costs -------------------------------------------------------


class OpCosts:
    """FLOPs, and the planners' cost, of the ops and nodes of an unplanned step.

    Args:
        profile: of the step.
        taped: whether they are costs of a plan of single operators.
    """

    def __init__(self, profile: Profile, *, taped: bool = False) -> None:
        self.profile, self._taped = profile, taped

    @cached_property
    def forward(self) -> dict[int, list[int]]:
        """By node, the ops of its forward."""
        return ops_by_node(self.profile, Phase.FORWARD)

    @cached_property
    def node_costs(self) -> tuple[Floats, Floats, list[bool]]:
        """By node: cost of its forward; of its forward up to its last saved tensor; whether it saves any."""
        whole, until = np.zeros((2, len(self.profile.nodes)))
        for index, ops in self.forward.items():
            costs, last = [self.cost(op) for op in ops], self.last_saved(index)
            whole[index] = sum(costs)
            until[index] = sum(cost for op, cost in zip(ops, costs, strict=True) if op <= last)
        return whole, until, [bool(node.saved) for node in self.profile.nodes]

    def last_saved(self, node: int) -> int:
        """The last of a node's ops that helps to make what the node saves; -1 if there is none."""
        profile, ops = self.profile, self.forward.get(node, [])
        own = [op for storage in profile.nodes[node].saved if (op := profile.storages[storage].op) in ops]
        last = max((op for op in own if op is not None), default=-1)
        # On the CPU the mask of a dropout is allocated empty and then filled in place.
        empty = last >= 0 and "empty" in profile.ops[last].name
        while empty and last + 1 in ops and writes_in_place(profile.ops[last + 1].name):
            last += 1
        return last

    @cached_property
    def _allocated_bytes(self) -> Floats:
        """By op: bytes it allocates."""
        written = np.zeros(len(self.profile.ops))
        for storage in self.profile.storages:
            if storage.op is not None:
                written[storage.op] += storage.nbytes
        return written

    @cached_property
    def _seconds(self) -> list[float] | None:
        """By op, what running it once more adds to the step."""
        return recompute_seconds(self.profile, taped=self._taped)

    def cost(self, op: int) -> float:
        """What running an op once more costs: time where the card's rates are known, else its FLOPs, and a little for
        what it writes."""
        if self._seconds is not None:
            return tuning.COST_PER_SECOND * self._seconds[op]
        return (self.profile.ops[op].flops or 0) + tuning.TRAFFIC_FLOPS * float(self._allocated_bytes[op])

    def flops(self, first: int, last: int) -> int | None:
        """FLOPs of recomputing nodes `first` to `last - 1` up to their last saved tensor; None if one is unknown."""
        return sum_known(self.profile.ops[op].flops for op in self.recomputed(first, last))

    def recomputed(self, first: int, last: int) -> list[int]:
        """The ops that recomputing nodes `first` to `last - 1` runs: those up to their last saved tensor."""
        saves = self.node_costs[2]
        stop = next((node for node in range(last - 1, first - 1, -1) if saves[node]), -1)
        ran = [op for node in range(first, stop) for op in self.forward.get(node, ())]
        return ran + [op for op in self.forward.get(stop, ()) if op <= self.last_saved(stop)]


# --- bytes alive, unit by unit, in one sweep over births and deaths ---------------------------------------------------


def sum_alive(births: Ints, deaths: Ints, sizes: Floats, ticks: int) -> Floats:
    """By tick: bytes of those alive, each over `[birth, death)`."""
    change = np.zeros(ticks + 1)
    np.add.at(change, births, sizes)
    np.add.at(change, deaths, -sizes)
    alive: Floats = np.cumsum(change[:ticks])
    return alive


def most_above(
    at: Ints, of_unit: Ints, births: Ints, deaths: Ints, sizes: Floats, units: Ints, others: Floats, count: int
) -> Floats:
    """`[v, i]`: the most bytes alive at unit `v`'s ticks, less what units before cut `i` made; 0 for a unit of no
    ticks.

    Args:
        at, of_unit: the ticks, ascending, and the unit of each.
        births, deaths, sizes, units: of what the units make, alive over `[birth, death)`.
        others: by tick, the bytes alive besides.
        count: of units.

    Exact below 2**53 bytes. Time is linear in ticks and births, times units.
    """
    table = np.zeros((count, count + 1))
    when, where, change = np.concatenate([births, deaths]), np.tile(units + 1, 2), np.concatenate([sizes, -sizes])
    order = np.argsort(when, kind="stable")
    when, where, change = when[order], where[order], change[order]
    happened = np.searchsorted(when, at, side="right")
    alive_now, done = np.zeros(count + 1), 0
    for start in range(0, len(at), tuning.TICKS_TOGETHER):
        ticks, reached, of = (column[start : start + tuning.TICKS_TOGETHER] for column in (at, happened, of_unit))
        upto = int(reached[-1])
        rows = np.searchsorted(reached, np.arange(done, upto), side="right")
        steps = np.zeros((len(ticks), count + 1))
        np.add.at(steps, (rows, where[done:upto]), change[done:upto])
        steps[0] += alive_now
        alive = np.cumsum(steps, axis=0)  # [tick, i]: made by the unit before cut i
        alive_now, done = alive[-1], upto
        older = np.cumsum(alive, axis=1)  # [tick, i]: made before cut i
        beyond = (older[:, -1] + others[ticks])[:, None] - older
        by_unit = np.argsort(of, kind="stable")
        present, firsts = np.unique(of[by_unit], return_index=True)
        table[present] = np.maximum(table[present], np.maximum.reduceat(beyond[by_unit], firsts, axis=0))
    return table


# --- tables of what checkpointing any stretch of a step would keep, allocate and cost ---------------------------------


OUTSIDE = ("placeholder", "get_attr", "output", "loss", "optimizer")


@dataclass(frozen=True)
class _Made:
    """A storage that the forward makes."""

    index: int
    op: int
    nbytes: int
    node: int
    birth: int
    death: int
    flow_end: int
    """Tick at which the last call that reads it has run."""
    saved: bool


class CostTables:
    """The tables for one profile and one choice of cuts.

    Args:
        profile: of an unplanned training step.
        cuts: node indices where regions may begin or end, ascending; the first and the last node of the model are
            added.
        taped: whether costs are those of a plan of single operators.
    """

    def __init__(self, profile: Profile, cuts: Sequence[int], *, taped: bool = False) -> None:
        self.profile = profile
        inside = [index for index, node in enumerate(profile.nodes) if node.op not in OUTSIDE]
        self.first, self.last = (inside[0], inside[-1] + 1) if inside else (0, 0)
        self.cuts = sorted({self.first, self.last, *(cut for cut in cuts if self.first < cut < self.last)})
        """Node index of every cut."""
        self.cut_at = {node: cut for cut, node in enumerate(self.cuts)}
        """By such a node, its cut."""
        self.count = len(self.cuts) - 1
        """Number of units."""
        self.unit_of = np.searchsorted(np.asarray(self.cuts), np.arange(len(profile.nodes)), side="right") - 1
        self.unit_of[: self.first] = -1
        self.unit_of[self.last :] = self.count
        self.live = np.asarray(liveness.live_bytes(profile), dtype=np.float64)
        self.ops = OpCosts(profile, taped=taped)
        self.forward_end = np.zeros(len(profile.nodes), dtype=np.int64)
        for node, ops in self.ops.forward.items():
            self.forward_end[node] = max(profile.ops[op].end for op in ops)

    # --- what forward makes -------------------------------------------------------------------------------------------

    @cached_property
    def forward_storages(self) -> tuple[_Made, ...]:
        """Storages made by the model's nodes in forward. A view's users count as its storage's."""
        profile = self.profile
        saved = {storage for node in profile.nodes for storage in node.saved}
        results = sorted((index, op) for op, made in results_by_op(profile).items() for index in made)
        found = []
        for index, op in results:
            one, node = profile.storages[index], profile.storages[index].node
            if node is not None and self.first <= node < self.last and profile.ops[op].phase is Phase.FORWARD:
                end = max(
                    one.birth + 1, *(int(self.forward_end[each]) for each in (node, *self.readers.get(index, ())))
                )
                found.append(_Made(index, op, one.nbytes, node, one.birth, one.death, end, index in saved))
        return tuple(found)

    @cached_property
    def storages_by_node(self) -> dict[int, list[int]]:
        """By node, the storages among them that it makes."""
        return group((each.node, each.index) for each in self.forward_storages)

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """For each node, the storages it reads."""
        return find_reads(self.profile)

    @cached_property
    def last_reader(self) -> dict[int, int]:
        """For each storage, the last unit of the model that reads or keeps it; the number of units if the output or the
        loss does."""
        return {storage: int(self.unit_of[node]) for storage, node in last_needed(self.profile, self.reads).items()}

    # --- bytes --------------------------------------------------------------------------------------------------------

    @cached_property
    def keeps(self) -> Floats:
        """By unit: bytes it makes that are there until backward if it is stored."""
        kept = np.zeros(self.count)
        for made in self.forward_storages:
            if made.saved:
                kept[self.unit_of[made.node]] += made.nbytes
        return kept

    @cached_property
    def outputs(self) -> Floats:
        """`[i, j]`: bytes that units `i` to `j - 1` make and later units read or keep: what stays when they are
        checkpointed.

        What nothing keeps for backward is kept by the regions that read it, and counts as their input.
        """
        n = self.count
        table = np.zeros((n + 1, n + 1))
        grid = np.zeros((n + 2, n + 2))
        for made in self.forward_storages:
            producer, reader = int(self.unit_of[made.node]), min(self.last_reader.get(made.index, -1), n)
            if reader > producer and made.saved:
                # It crosses every cut j with producer < j <= reader.
                grid[producer, producer + 1] += made.nbytes
                grid[producer, reader + 1] -= made.nbytes
        crossing = np.cumsum(grid, axis=1)[:n, : n + 1]  # [producer, cut]
        from_first = np.vstack([np.zeros((1, n + 1)), np.cumsum(crossing, axis=0)])  # [i, j]: producers before i
        for i in range(n + 1):
            table[i, i:] = np.diagonal(from_first)[i:] - from_first[i, i:]
        return table

    @cached_property
    def inputs(self) -> Floats:
        """`[i, j]`: bytes made before cut `i` that units `i` to `j - 1` read, and that nothing keeps unless they are
        checkpointed.

        What two regions read is counted for both.
        """
        n = self.count
        table = np.zeros((n + 1, n + 1))
        for made in self.forward_storages:
            if made.saved:
                continue
            after = int(self.unit_of[made.node]) + 1
            # Not what only views it.
            users = (int(self.unit_of[n]) for n in self.readers.get(made.index, ()) if not self._views(n))
            for reader in sorted({unit for unit in users if after <= unit < n}):
                table[after : reader + 1, reader + 1 :] += made.nbytes
                after = reader + 1
        return table

    def _views(self, node: int) -> bool:
        """Whether a node gives what it was given, looked at in another way."""
        return self.profile.nodes[node].view_of is not None and not any(
            writes_in_place(self.profile.ops[op].name) for op in self.ops.forward.get(node, ())
        )

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """By storage, the nodes that read it."""
        return group((storage, index) for index, storages in enumerate(self.reads) for storage in storages)

    def _rest(self, phase: Phase, death: str | None) -> Floats:
        """`[v, i]`: the most bytes alive at the ticks of unit `v`'s ops in a phase, less what units before cut `i` keep
        for backward.

        What a unit keeps counts until `death`, a field of `_Made`; None: throughout. Backward may have freed some of it
        before the unit, for a later one that saved it, and planners count all that older units keep.
        """
        births, original, sizes, units = self._columns(kept_only=True)
        if death is None:
            deaths = original = np.full(len(births), len(self.live), dtype=np.int64)
        else:
            deaths = np.asarray([getattr(m, death) for m in self.forward_storages if m.saved], dtype=np.int64)
        others = self.live - sum_alive(births, original, sizes, len(self.live))
        return most_above(*self._ticks(phase), births, deaths, sizes, units, others, self.count)

    def _columns(self, *, kept_only: bool) -> tuple[Ints, Ints, Floats, Ints]:
        """Birth, death, bytes and unit of all that forward makes, or keeps for backward."""
        chosen = [m for m in self.forward_storages if m.saved or not kept_only]
        births, deaths = (np.asarray([getattr(m, name) for m in chosen], dtype=np.int64) for name in ("birth", "death"))
        sizes = np.asarray([m.nbytes for m in chosen], dtype=np.float64)
        return births, deaths, sizes, np.asarray([self.unit_of[m.node] for m in chosen], dtype=np.int64)

    def _ticks(self, phase: Phase, *, until_stop: bool = False) -> tuple[Ints, Ints]:
        """Return the ascending ticks of the units' ops in a phase, with each one's unit. A tick of two units is there
        twice.

        `until_stop`: of forward, the ops of each unit up to its last saved tensor alone.
        """
        stops = self._stops if until_stop else {}
        found: set[tuple[int, int]] = set()
        for index, op in enumerate(self.profile.ops):
            unit = int(self.unit_of[op.node])
            if op.phase is phase and 0 <= unit < self.count and (not until_stop or index <= stops.get(unit, -1)):
                found.update((tick, unit) for tick in range(max(op.begin - 1, 0), op.end))
        columns = np.asarray(sorted(found), dtype=np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    @cached_property
    def _stops(self) -> dict[int, int]:
        """By unit that saves something, the last op that has a part in it: where recomputation stops if nothing later
        is saved."""
        saving = {int(self.unit_of[index]): index for index, node in enumerate(self.profile.nodes) if node.saved}
        stops: dict[int, int] = {}
        for unit, index in saving.items():  # with the last node that saves
            if 0 <= unit < self.count:
                before = (op for at in range(self.cuts[unit], index) for op in self.ops.forward.get(at, ()))
                stops[unit] = max(self.ops.last_saved(index), max(before, default=-1))
        return stops

    @cached_property
    def backward_peak(self) -> Floats:
        """`[v, i]`: most bytes alive during unit `v`'s backward, less what older units than `i` keep."""
        return self._rest(Phase.BACKWARD, None)

    @cached_property
    def forward_peak(self) -> Floats:
        """`[v, i]`: the same during its forward, everything from `i` on kept."""
        return self._rest(Phase.FORWARD, "death")

    @cached_property
    def checkpointed_forward_peak(self) -> Floats:
        """`[v, i]`: the same during its forward if nothing from `i` on is kept that forward does not need."""
        return self._rest(Phase.FORWARD, "flow_end")

    @cached_property
    def recompute_peak(self) -> Floats:
        """`[i, j]`: most bytes that units `i` to `j - 1` have made and keep while they are recomputed, workspace
        included: up to their last saved tensor."""
        births, deaths, sizes, units = self._columns(kept_only=False)
        others = self.live - sum_alive(births, deaths, sizes, len(self.live)) - self.resident
        ticks = (self._ticks(Phase.FORWARD, until_stop=until_stop) for until_stop in (False, True))
        whole, stopped = (most_above(*each, births, deaths, sizes, units, others, self.count) for each in ticks)
        last = np.full(self.count + 1, -1, dtype=np.int64)  # by cut, the last unit before it that saves something
        last[[unit + 1 for unit in self._stops]] = list(self._stops)
        last = np.maximum.accumulate(last)
        table = np.zeros((self.count + 1, self.count + 1))
        for i in range(self.count):
            before = np.maximum.accumulate(np.concatenate([[0.0], whole[i:, i]]))  # by number of units
            cuts = np.arange(i + 1, self.count + 1)
            cuts = cuts[last[cuts] >= i]
            table[i, cuts] = np.maximum(before[last[cuts] - i], stopped[last[cuts], i])
        return table

    @cached_property
    def resident(self) -> float:
        """Bytes alive before the step that stay throughout."""
        return float(sum(s.nbytes for s in self.profile.storages if s.birth == 0))

    @cached_property
    def gradients(self) -> Floats:
        """By cut: bytes alive when backward reaches it, less what units before it keep: gradients, parameters, the
        optimizer's state."""
        ops = ((int(self.unit_of[op.node]), op.begin) for op in self.profile.ops if op.phase is Phase.BACKWARD)
        begins = {unit: min(ticks) for unit, ticks in group(ops).items()}
        births, _, sizes, units = self._columns(kept_only=True)
        found = np.full(self.count + 1, self.resident)
        for cut in range(1, self.count + 1):
            tick = next((begins[unit] for unit in range(cut - 1, -1, -1) if unit in begins), None)
            if tick is None:
                continue
            at = max(tick - 1, 0)
            older = (units < cut) & (births <= at)
            found[cut] = self.live[at] - sizes[older].sum()
        return found

    @cached_property
    def unplanned_peak(self) -> float:
        """The peak without a plan."""
        return float(self.live.max(initial=0.0))

    @cached_property
    def floor(self) -> float:
        """The most bytes alive at a moment no plan changes: outside the model's own forward and backward."""
        peak = liveness.peak_in_phase(self.profile, Phase.OPTIMIZER)
        return 0.0 if peak is None else float(peak.requested_bytes)

    # --- compute ------------------------------------------------------------------------------------------------------

    @cached_property
    def cost(self) -> Floats:
        """`[i, j]`: cost of running units `i` to `j - 1` again up to their last saved tensor; 0 where they save
        nothing."""
        whole, until, packs = self.ops.node_costs
        total = np.concatenate([[0.0], np.cumsum(whole)])
        table = np.zeros((self.count + 1, self.count + 1))
        stops = np.full(self.count, -1.0)
        for unit in range(self.count):
            for node in range(self.cuts[unit], self.cuts[unit + 1]):
                if packs[node]:
                    stops[unit] = total[node] + until[node]
        for i in range(self.count):
            reached = np.maximum.accumulate(stops[i:])
            table[i, i + 1 :] = np.where(reached < 0, 0.0, np.maximum(reached - total[self.cuts[i]], 0.0))
        return table

    # --- what may be a region -----------------------------------------------------------------------------------------

    @cached_property
    def earliest(self) -> Ints:
        """By node: the first node that a region around it may begin with at the latest; -1 for a node that no region
        may contain."""
        return earliest(self.profile, self.readers)

    def draws(self, first: int, last: int) -> bool:
        """Whether they may draw random numbers."""
        return bool(self._random_before[first] < self._random_before[last])

    @cached_property
    def _random_before(self) -> Ints:
        """By node: how many before it may draw random numbers."""
        return np.concatenate([[0], np.cumsum(random_nodes(self.profile))])


# --- what keeping results of products saves a region in recomputation, and costs it in bytes --------------------------
# A region that keeps results is run again like any other, except that those products are not: what they gave in the
# first run is there (selective checkpointing, as in `torch.utils.checkpoint.create_selective_checkpoint_contexts`).
# Which to keep is a knapsack of cost against bytes; here it is solved as its relaxation is, by cost per byte. A *level*
# keeps every product of the region above one density, level 0 none, the highest all; so one region has as many offers
# as there are levels, and what each keeps adds up over units.


@dataclass(frozen=True)
class Product:
    """A product that the forward runs."""

    op: int
    node: int
    flops: int
    cost: float
    """Of running it again, as the planner counts."""
    storages: tuple[int, ...]
    """What it allocates for its results."""
    nbytes: int
    needed: int
    """The first node at or after its own that keeps something for backward once it has run; a region that ends before
    stops early, without it."""

    @property
    def density(self) -> float:
        """Cost per byte kept."""
        return self.cost / max(self.nbytes, 1)


class Selection:
    """The products of a step's units, and the effect of keeping them on any stretch."""

    def __init__(self, units: CostTables) -> None:
        self.units = units
        self.described: dict[Hashable, Region] = {}
        """Regions that have been described, by what describes them: plans of one search have most in common."""

    @cached_property
    def numbers(self) -> dict[int, list[int]]:
        """By node, its products as indices into the profile's ops, in the order they run."""
        ops = enumerate(self.units.profile.ops)
        return group((op.node, index) for index, op in ops if op.phase is Phase.FORWARD and is_product(op.name))

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Products whose results can be kept: their FLOPs are known, and no later call writes to them."""
        units, profile = self.units, self.units.profile
        made = results_by_op(profile)
        packs = [node for node, own in enumerate(profile.nodes) if own.saved]
        found = []
        for node, ops in self.numbers.items():
            if not units.first <= node < units.last:
                continue
            later = int(np.searchsorted(packs, node, side="right"))
            after = packs[later] if later < len(packs) else len(profile.nodes)
            saved_by = (profile.storages[storage].op for storage in profile.nodes[node].saved)
            own = max((op for op in saved_by if op is not None), default=-1)
            for op in ops:
                storages, flops = tuple(made.get(op, ())), profile.ops[op].flops
                if not storages or not flops or self._overwritten_storages.intersection(storages):
                    continue
                nbytes = sum(profile.storages[index].nbytes for index in storages)
                cost = units.ops.cost(op)
                found.append(Product(op, node, flops, cost, storages, nbytes, node if own >= op else after))
        return tuple(found)

    @cached_property
    def _by_op(self) -> dict[int, Product]:
        return {product.op: product for product in self.products}

    @cached_property
    def _first_keeper(self) -> dict[int, int]:
        """By storage, the first unit that keeps it for backward."""
        first: dict[int, int] = {}
        for index, node in enumerate(self.units.profile.nodes):
            for storage in node.saved:
                first.setdefault(storage, int(self.units.unit_of[index]))
        return first

    @cached_property
    def _overwritten_storages(self) -> set[int]:
        """Storages that a node after the one that made them writes to."""
        profile = self.units.profile
        written = {op.node for op in profile.ops if op.phase is Phase.FORWARD and writes_in_place(op.name)}
        owners = {owner for node in written if (owner := profile.nodes[node].view_of) is not None}
        return {
            output.storage for owner in owners for output in profile.nodes[owner].outputs if output.storage is not None
        }

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """By level, the cost per byte from which a product's result is kept; the densest first."""
        densities = sorted({product.density for product in self.products}, reverse=True)
        most = tuning.LEVELS if self.units.count < tuning.LEVELS_MANY_UNITS else tuning.LEVELS_OF_MANY
        if len(densities) > most:
            densities = [densities[round((index + 1) * len(densities) / most) - 1] for index in range(most)]
        return (np.inf, *densities)

    @cached_property
    def offers(self) -> tuple[tuple[Floats, Floats, Floats], ...]:
        """For each level but 0: cost that is saved, bytes that are kept, and those among them that a stored region
        would not keep."""
        return tuple(self._offer(threshold) for threshold in self.thresholds[1:])

    def _offer(self, threshold: float) -> tuple[Floats, Floats, Floats]:
        """`[i, j]`: sums over the products that a region of units `i` to `j - 1` keeps from a density on."""
        units, n = self.units, self.units.count
        grids = np.zeros((3, n + 1, n + 2))
        cost, kept, extra = grids
        for product in self.products:
            if product.density < threshold or product.needed >= units.last:
                continue
            unit, needed = int(units.unit_of[product.node]), int(units.unit_of[product.needed])
            cost[unit, needed + 1] += product.cost
            for index in product.storages:
                nbytes = units.profile.storages[index].nbytes
                # What later units read stays anyway.
                kept[unit, min(max(needed, units.last_reader.get(index, -1)), n) + 1] += nbytes
                # Until its first keeper's backward has run, a stored region would have it too.
                extra[unit, needed + 1] += nbytes
                extra[unit, max(needed, self._first_keeper.get(index, n)) + 1] -= nbytes
        cost, kept, extra = np.cumsum(np.cumsum(grids[:, ::-1], axis=1)[:, ::-1], axis=2)[:, :, : n + 1]
        return cost, kept, extra

    def find_kept(self, first: int, last: int, level: int) -> tuple[tuple[int, Product], ...]:
        """What a region of nodes `first` to `last - 1` keeps at a level. Each has its number among the region's
        products."""
        known = self._by_op
        ops = [op for node in range(first, last) for op in self.numbers.get(node, ())]
        chosen = ((number, known[op]) for number, op in enumerate(ops) if op in known)
        return tuple(
            (number, each) for number, each in chosen if each.density >= self.thresholds[level] and each.needed < last
        )
