"""Who needs the results of a forward."""

from __future__ import annotations

from fxmem.records.profile import Kind, Profile
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
        if record.is_read or record.holder:
            return "the program keeps its input"
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
