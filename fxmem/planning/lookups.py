"""What the planners look up in a profile: the ops of a node, the readers of a storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fxmem.records.profile import Kind, Phase, Profile
from fxmem.records.units import group


def ops_by_node(profile: Profile, phase: Phase) -> dict[int, list[int]]:
    """By node, the ops that it runs in a phase."""
    return group((op.node, index) for index, op in enumerate(profile.ops) if op.phase is phase)


def results_by_op(profile: Profile) -> dict[int, list[int]]:
    """By op, the storages that it allocates for its results."""
    made = ((each.op, index) for index, each in enumerate(profile.storages) if each.kind is not Kind.WORKSPACE)
    return group((op, index) for op, index in made if op is not None)


def find_reads(profile: Profile) -> list[tuple[int, ...]]:
    """For each node, the storages it reads."""
    written = [[each.storage for each in node.outputs if each.storage is not None] for node in profile.nodes]
    return [
        tuple(dict.fromkeys(storage for source in node.inputs for storage in written[source])) for node in profile.nodes
    ]


def last_needed(profile: Profile, reads: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """For each storage, the last node that reads it or keeps it for backward. `reads`: as `find_reads`."""
    return {storage: index for index, node in enumerate(profile.nodes) for storage in (*reads[index], *node.saved)}


def first_saves(profile: Profile, phase: Phase) -> dict[int, int]:
    """By saved storage, the tick at which the first of the nodes that save it begins a phase."""
    begins: dict[int, int] = {}
    for op in profile.ops:
        if op.phase is phase:
            begins.setdefault(op.node, op.begin)
    saves = group((s, begins[i]) for i, node in enumerate(profile.nodes) if i in begins for s in node.saved)
    return {storage: min(ticks) for storage, ticks in saves.items()}


# --- types of the planners' arrays ------------------------------------------------------------------------------------


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
