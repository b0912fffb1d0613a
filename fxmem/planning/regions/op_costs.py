"""What running the calls of a step's forward once more costs."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from fxmem.hardware.step_time import recompute_seconds
from fxmem.planning import tuning
from fxmem.planning.lookups import Floats, Ints, ops_by_node
from fxmem.planning.regions.candidates import writes_in_place
from fxmem.records.profile import Phase, Profile
from fxmem.records.units import sum_known


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
