"""A result of far more numbers than what it is made of: `cdist`, a broadcast or a product of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.findings import Finding, register
from fxmem.memory.user_code import find_place
from fxmem.records.profile import Node, Profile, Timeline

_TIMES: Final = 50
"""So many times the bytes of its inputs."""
_SHARE: Final = 4
"""At least this share of the peak, one in so many."""
_PAIRS: Final = frozenset(
    "cdist pairwise_distance matmul bmm mm einsum sub add mul div eq ne lt gt le ge logical_and".split()
)


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each such call that has so much at the peak; those that read parameters are meant so."""
    alive = [profile.storages[index] for index in timeline.alive]
    for index, node in enumerate(profile.nodes):
        if node.target.rpartition(".")[2].strip("_") not in _PAIRS or not node.inputs or not node.outputs:
            continue
        read, made = sum(_read_bytes(profile, profile.nodes[each]) for each in node.inputs), node.output_bytes
        if not read or made < _TIMES * read:
            continue
        nbytes = sum(each.nbytes for each in alive if each.node == index)
        if nbytes * _SHARE >= timeline.peak.requested_bytes:
            name, shape = node.target.rpartition(".")[2], "x".join(map(str, node.outputs[0].shape))
            yield Finding(
                cause="wide-result",
                text=f"{name} makes {shape} numbers, {made // read} times the bytes of what it reads",
                place=find_place(profile, index),
                nbytes=nbytes,
                change="a part of the rows at a time, if all pairs are meant",
            )


def _read_bytes(profile: Profile, node: Node) -> int:
    storages = {each.storage for each in node.outputs if each.storage is not None}
    return sum(profile.storages[each].nbytes for each in storages)


register("wide-result", find)
