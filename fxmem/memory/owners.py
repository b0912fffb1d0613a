"""What is alive at the peak, by the part of the model it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fxmem.memory.module_tree import call_name
from fxmem.records.profile import Kind, Profile, Storage, Timeline

__all__ = ["Part", "bytes_at_peak", "owners_at_peak", "parts_at_peak"]


@dataclass
class Part:
    """A module, or the calls of one name in it, with all that is below it."""

    label: str
    """Last segment of the path, or the function's name. Untrusted text."""
    module: str = ""
    """Path of the module; of a call, of the module whose code made it."""
    by_kind: dict[Kind, int] = field(default_factory=dict)
    children: dict[tuple[str, str], Part] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())

    def child(self, kind: str, label: str, module: str) -> Part:
        """The part below it of this kind and name."""
        return self.children.setdefault((kind, label), Part(label, module))


def owners_at_peak(profile: Profile, timeline: Timeline) -> Iterator[tuple[Storage, int | None]]:
    """What is alive at the peak, and the node it counts for; optimizer state, there before any op, counts for the
    optimizer."""
    optimizer = next((index for index, node in enumerate(profile.nodes) if node.op == "optimizer"), None)
    for storage in (profile.storages[index] for index in timeline.alive):
        yield storage, optimizer if storage.node is None and storage.kind is Kind.OPTIMIZER_STATE else storage.node


def bytes_at_peak(profile: Profile, timeline: Timeline) -> list[int]:
    """For each node, of the bytes alive at the peak, those it brought."""
    nbytes = [0] * len(profile.nodes)
    for storage, owner in owners_at_peak(profile, timeline):
        if owner is not None:
            nbytes[owner] += storage.nbytes
    return nbytes


def parts_at_peak(profile: Profile, timeline: Timeline) -> Part:
    """The tree of parts that hold something at the peak, in the order of their first node; the root is all of it."""
    root = Part(profile.model)
    of_node: dict[int, dict[Kind, int]] = {}
    of_none: dict[Kind, int] = {}
    for storage, owner in owners_at_peak(profile, timeline):
        held = of_none if owner is None else of_node.setdefault(owner, {})
        held[storage.kind] = held.get(storage.kind, 0) + storage.nbytes
    for index in sorted(of_node):
        node = profile.nodes[index]
        way = [root]
        segments = node.module.split(".") if node.module else []
        for depth, segment in enumerate(segments, start=1):
            way.append(way[-1].child("module", segment, ".".join(segments[:depth])))
        if node.op in ("loss", "optimizer"):
            way.append(root.child("step", node.name, ""))
        elif node.op != "call_module":
            way.append(way[-1].child("call", call_name(node), node.module))
        _add(way, of_node[index])
    for kind, nbytes in of_none.items():
        _add([root, root.child("none", f"{kind.value.replace('_', ' ')} of no node", "")], {kind: nbytes})
    return root


def _add(way: list[Part], held: dict[Kind, int]) -> None:
    for part in way:
        for kind, nbytes in held.items():
            part.by_kind[kind] = part.by_kind.get(kind, 0) + nbytes
