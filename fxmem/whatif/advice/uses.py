"""Who needs the results of a forward, and when for the last time."""

from __future__ import annotations

from fxmem.memory import liveness
from fxmem.records.profile import Kind, Phase, Profile, Storage
from fxmem.records.units import to_words

_SEVERAL_VIEWS = (
    "chunk",
    "split",
    "tensor_split",
    "unbind",
    "hsplit",
    "vsplit",
    "dsplit",
    "split_with_sizes",
    "unsafe_chunk",
    "unsafe_split",
)
"""Calls whose results autograd lets nothing write to where they are views (`CreationMeta::MULTI_OUTPUT_NODE`,
torch/csrc/autograd/variable.h)."""


class Uses:
    """Which nodes keep and which read each storage of a forward."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._keepers: dict[int, set[int]] = {}
        self._readers: dict[int, set[int]] = {}
        for index, node in enumerate(profile.nodes):
            for storage in node.saved:
                self._keepers.setdefault(storage, set()).add(index)
            for source in node.inputs:
                for output in profile.nodes[source].outputs:
                    if output.storage is not None:
                        self._readers.setdefault(output.storage, set()).add(index)

    def obstacle(self, index: int) -> str:
        """Why the node at `index` must not overwrite what it reads; empty if it may."""
        nodes = self._profile.nodes
        for source in nodes[index].inputs:
            made_by = [nodes[parent] for parent in nodes[source].inputs if nodes[source].target.endswith("getitem")]
            if any(parent.target.rpartition(".")[2] in _SEVERAL_VIEWS for parent in made_by):
                return f"its input is one of several views that {made_by[0].name} made"
            for storage in {output.storage for output in nodes[source].outputs}:
                reason = self._of_storage(storage, index)
                if reason:
                    return reason
        return ""

    def _of_storage(self, storage: int | None, index: int) -> str:
        if storage is None:
            return "its input has no storage of its own"
        nodes, record = self._profile.nodes, self._profile.storages[storage]
        if record.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OUTPUT) or not record.birth:
            return f"its input is {to_words(record.kind)} of the step"
        kept = self._keepers.get(storage, set()) - {index}
        if kept:
            return f"{nodes[min(kept)].name} keeps its input for backward"
        readers = self._readers.get(storage, set()) | {index}
        if max(readers) > index:
            return f"{nodes[max(readers)].name} reads its input afterwards"
        for region in self._profile.recomputed:
            again = sorted(reader for reader in readers if region.first_node <= reader < region.last_node)
            if again and record.node is not None and not region.first_node <= record.node < region.last_node:
                return f"{nodes[again[0]].name} is checkpointed, and reads its input again in backward"
        return ""


def find_idle(profile: Profile, tick: int) -> list[int]:
    """Nodes with results that are kept at a tick and that nothing needs any more."""
    ends = _last_use(profile)
    alive = (index for index in liveness.alive_storages(profile, tick) if index in ends and ends[index] < tick)
    return list(dict.fromkeys(node for index in alive if (node := profile.storages[index].node) is not None))


def _last_use(profile: Profile) -> dict[int, int]:
    """For each storage made in forward that nothing keeps for backward: the tick at which the last call that reads it
    has run."""
    ends: dict[int, int] = {}
    for op in profile.ops:
        if op.phase is Phase.FORWARD:
            ends[op.node] = max(op.end, ends.get(op.node, 0))
    saved = {storage for node in profile.nodes for storage in node.saved}
    made = {
        index: ends[storage.node]
        for index, storage in enumerate(profile.storages)
        if storage.kind in (Kind.TEMPORARY, Kind.OUTPUT) and index not in saved and storage.op is not None
        if profile.ops[storage.op].phase is Phase.FORWARD
        and storage.node is not None
        and profile.nodes[storage.node].op not in ("loss", "optimizer")
    }
    for index, node in enumerate(profile.nodes):
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage in made:
                    made[output.storage] = max(made[output.storage], ends.get(index, 0))
    return made


def free_after_last_use(profile: Profile, names: frozenset[str]) -> Profile:
    """The profile with these nodes' results freed after their last use."""
    if not names:
        return profile
    ends = _last_use(profile)

    def free_early(index: int, storage: Storage) -> Storage:
        node = storage.node
        if index not in ends or node is None or profile.nodes[node].name not in names:
            return storage
        return storage.model_copy(update={"death": min(storage.death, max(ends[index], storage.birth + 1))})

    return profile.model_copy(
        update={"storages": tuple(free_early(index, storage) for index, storage in enumerate(profile.storages))}
    )
