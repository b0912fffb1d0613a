"""What of a step may be run twice, and what of it is random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fxmem.planning.arrays import Bools, Ints
from fxmem.planning.lookups import group
from fxmem.records.profile import Node, Phase, Profile

_NEVER_AGAIN = ("nonzero", "unique", "masked_select", "_local_scalar_dense", "item", "repeat_interleave", "bincount")
"""Operators whose result's shape depends on the data, which may not be the same the second time."""
_RANDOM = tuple(
    """
    dropout bernoulli rand normal uniform multinomial rrelu poisson exponential scaled_dot_product attention
    """.split()
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norms, which the code that applies a plan sees to it are updated once."""


def earliest(profile: Profile, readers: Mapping[int, Sequence[int]]) -> Ints:
    """By node: the first node that a region around it may begin with at the latest; -1 for a node that no region may
    contain.

    Args:
        profile: of an unplanned step.
        readers: by storage, the nodes that read it.
    """
    low = np.arange(len(profile.nodes))
    names = group((op.node, op.name) for op in profile.ops if op.phase is Phase.FORWARD)
    writers: dict[int, list[int]] = {}
    for index, node in enumerate(profile.nodes):
        own = names.get(index, [])
        if any(name.startswith(("c10d", "_c10d")) or name.split(".")[1] in _NEVER_AGAIN for name in own if "." in name):
            low[index] = -1
        owner = node.view_of
        if owner is not None and any(map(writes_in_place, own)) and not _is_statistic(profile.nodes[owner]):
            low[index] = -1 if profile.nodes[owner].op in ("placeholder", "get_attr") else min(low[index], owner)
            writers.setdefault(owner, []).append(index)
    for owner, written in writers.items():
        storages = {output.storage for output in profile.nodes[owner].outputs}
        for index in (node for storage in storages if storage is not None for node in readers.get(storage, ())):
            if owner < index < max(written) and low[index] >= 0:
                low[index] = min(low[index], owner)
    for region in profile.recomputed:
        low[region.first_node : region.last_node] = -1
    return low


def random_nodes(profile: Profile) -> Bools:
    """By node: whether its forward may draw random numbers."""
    may = np.asarray(["Drop" in node.module_type for node in profile.nodes], dtype=bool)
    for op in profile.ops:
        if op.phase is Phase.FORWARD and any(word in op.name for word in _RANDOM):
            may[op.node] = True
    return may


def writes_in_place(name: str) -> bool:
    """Whether an operator, by its qualified overload, writes to its first argument."""
    return name.count(".") > 0 and name.split(".")[1].endswith("_")


def _is_statistic(node: Node) -> bool:
    return node.op == "get_attr" and node.target.rpartition(".")[2] in _STATISTICS
