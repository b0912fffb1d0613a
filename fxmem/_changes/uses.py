"""When the results of a forward are needed for the last time."""

from __future__ import annotations

from fxmem import liveness
from fxmem.records import Kind, Phase, Profile, Storage

__all__ = ["freed_after_last_use", "idle_at"]


def idle_at(profile: Profile, tick: int) -> list[int]:
    """Nodes with results that are held at a tick and that nothing needs any more."""
    ends = _last_use(profile)
    alive = (index for index in liveness.alive_at(profile, tick) if index in ends and ends[index] < tick)
    return list(dict.fromkeys(node for index in alive if (node := profile.storages[index].node) is not None))


def _last_use(profile: Profile) -> dict[int, int]:
    """For each storage made in forward that nothing keeps for backward: the tick at which the last call that reads it has run."""
    ends: dict[int, int] = {}
    for op in profile.ops:
        if op.phase is Phase.FORWARD:
            ends[op.node] = max(op.end, ends.get(op.node, 0))
    saved = {storage for node in profile.nodes for storage in node.saved}
    made = {
        index: ends[storage.node]
        for index, storage in enumerate(profile.storages)
        if storage.kind in (Kind.TEMPORARY, Kind.OUTPUT) and index not in saved and storage.op is not None
        if profile.ops[storage.op].phase is Phase.FORWARD and storage.node is not None and profile.nodes[storage.node].op not in ("loss", "optimizer")
    }
    for index, node in enumerate(profile.nodes):
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage in made:
                    made[output.storage] = max(made[output.storage], ends.get(index, 0))
    return made


def freed_after_last_use(profile: Profile, names: frozenset[str]) -> Profile:
    """The profile with these nodes' results freed after their last use."""
    if not names:
        return profile
    ends = _last_use(profile)

    def freed(index: int, storage: Storage) -> Storage:
        node = storage.node
        if index not in ends or node is None or profile.nodes[node].name not in names:
            return storage
        return storage.model_copy(update={"death": min(storage.death, max(ends[index], storage.birth + 1))})

    return profile.model_copy(update={"storages": tuple(freed(index, storage) for index, storage in enumerate(profile.storages))})
