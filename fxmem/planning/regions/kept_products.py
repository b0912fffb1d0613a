"""What keeping results of products saves a region in recomputation, and costs it in bytes.

A region that keeps results is run again like any other, except that those products are not: what they gave in the first
run is there (selective checkpointing, as in `torch.utils.checkpoint.create_selective_checkpoint_contexts`). Which to
keep is a knapsack of cost against bytes; here it is solved as its relaxation is, by cost per byte. A *level* keeps
every product of the region above one density, level 0 none, the highest all; so one region has as many offers as there
are levels, and what each keeps adds up over units.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxmem.hardware.op_classes import is_product
from fxmem.planning import tuning
from fxmem.planning.lookups import Floats, results_by_op
from fxmem.planning.regions.candidates import writes_in_place
from fxmem.planning.regions.cost_tables import CostTables
from fxmem.records.plan import Region
from fxmem.records.profile import Phase
from fxmem.records.units import group


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
