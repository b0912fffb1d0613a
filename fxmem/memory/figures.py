"""Sums over nodes, and the node that each byte of the peak belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxmem.records.profile import Kind, Node, Profile, Storage, Timeline


@dataclass(frozen=True)
class Flops:
    """A sum of FLOPs, and how many calls in it have no formula."""

    known: int = 0
    unknown_calls: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.known + other.known, self.unknown_calls + other.unknown_calls)


@dataclass(frozen=True)
class Figures:
    """What some nodes amount to; in bytes, but for the FLOPs.

    `scratch` and `live` are the largest of the nodes', because nodes run one after another; all others are sums.
    """

    params: int = 0
    output: int = 0
    saved: int = 0
    at_peak: int = 0
    """Of the bytes alive at the peak, those the nodes brought."""
    scratch: int = 0
    live: int = 0
    forward: Flops = Flops()
    backward: Flops = Flops()

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            params=self.params + other.params,
            output=self.output + other.output,
            saved=self.saved + other.saved,
            at_peak=self.at_peak + other.at_peak,
            scratch=max(self.scratch, other.scratch),
            live=max(self.live, other.live),
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
        )

    @property
    def largest(self) -> int:
        """The largest byte count of the nodes' own; `live` counts other nodes' bytes, too."""
        return max(self.params, self.output, self.saved, self.at_peak, self.scratch)


NO_FIGURES = Figures()


def sum_figures(nodes: Iterable[Node], at_peak: Iterable[int] = ()) -> Figures:
    """Sum over nodes; `at_peak` are their bytes at the peak, as from `bytes_at_peak`."""
    return sum(map(_figures, nodes), Figures(at_peak=sum(at_peak)))


def owners_at_peak(profile: Profile, timeline: Timeline) -> Iterator[tuple[Storage, int | None]]:
    """Each storage alive at the peak, and the node it counts for.

    Optimizer state, which is there before any op, counts for the optimizer.
    """
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


def alive_by_node(profile: Profile, timeline: Timeline) -> dict[int, int]:
    """Requested bytes alive at the peak, by the node that allocated them; those of no node are left out."""
    nbytes: dict[int, int] = {}
    for storage in (profile.storages[index] for index in timeline.alive):
        if storage.node is not None:
            nbytes[storage.node] = nbytes.get(storage.node, 0) + storage.nbytes
    return nbytes


def _figures(node: Node) -> Figures:
    return Figures(
        params=node.params_bytes,
        output=node.output_bytes,
        saved=node.saved_bytes,
        scratch=node.scratch_bytes.max,
        live=node.live_bytes.max,
        forward=read_flops(node.forward_flops, ran=node.op not in ("placeholder", "get_attr", "output")),
        backward=read_flops(node.backward_flops, ran=node.live_bytes.backward is not None),
    )


def read_flops(count: int | None, *, ran: bool = True) -> Flops:
    """A node's count as a sum: None is an unknown one only for what ran at all."""
    if count is None:
        return Flops(unknown_calls=1) if ran else Flops()
    return Flops(known=count)
