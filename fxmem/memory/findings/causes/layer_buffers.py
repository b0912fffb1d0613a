"""A table of each layer's own: rotary angles, or a mask, that all layers could share."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_place, name_call
from fxmem.memory.findings import Finding
from fxmem.records.profile import Kind, Node, Profile, Timeline

_SHARE: Final = 10
"""Said where all but one are this share of the peak, one in so many."""
_MASKING: Final = frozenset("eq ne masked_fill where logical_not bitwise_not invert".split())
_IN_PLACE: Final = frozenset("setitem iadd isub imul itruediv iand ior".split())


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for such buffers of one name and shape in several layers: those that nothing writes to, and that no
    checkpoint has, or that are square and read as a mask. What they hold is not known."""
    first, masks, written = dict[int, int](), set[int](), set[int]()

    for index, node in enumerate(profile.nodes):
        for each in node.inputs:
            for made in profile.nodes[each].outputs:
                if made.storage is not None and profile.storages[made.storage].kind is Kind.BUFFER:
                    first.setdefault(made.storage, index)
                    if _writes(node):
                        written.add(made.storage)
                    elif name_call(node) in _MASKING:
                        masks.add(made.storage)
    layers = defaultdict[tuple[str, tuple[int, ...], str], list[int]](list)
    for index in first.keys() - written:
        of = profile.storages[index]
        if of.birth == 0 and (of.is_derived or (index in masks and of.shape[-1:] == of.shape[-2:-1])):
            layers[re.sub(r"\.\d+\b", ".*", of.name), of.shape, of.dtype].append(index)
    for (name, shape, _), indices in layers.items():
        nbytes = sum(profile.storages[index].nbytes for index in indices[1:])
        if nbytes * _SHARE >= timeline.peak.requested_bytes > 0 and "*" in name:
            yield Finding(
                cause="layer-buffers",
                text=f"{len(indices)} layers have each their own {name.rpartition('.')[2]} of "
                f"{'x'.join(map(str, shape))}, to which nothing writes",
                place=find_place(profile, first[indices[0]]),
                nbytes=nbytes,
                change="one that all layers share, where they are equal",
            )


def _writes(node: Node) -> bool:
    name = node.target.rpartition(".")[2]
    return (name.endswith("_") and not name.endswith("__")) or name.strip("_") in _IN_PLACE
