"""One checkpoint around everything: backward recomputes all of it at once, and the peak is as without."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from fxmem.memory.findings import Finding
from fxmem.records.profile import Phase, Profile, Timeline

_MOST = 0.8
"""A region that makes this share of what its model makes is around everything."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the peak is in backward, while such a region's results are alive again."""
    if timeline.peak.phase is not Phase.BACKWARD or not profile.recomputed:
        return
    outputs = (0 if each.op in ("loss", "optimizer") else each.output_bytes for each in profile.nodes)
    made = [*accumulate(outputs, initial=0)]
    again = {each.op for each in profile.recomputed_ops}
    alive = [profile.storages[index] for index in timeline.alive if profile.storages[index].op in again]
    for region in profile.recomputed:
        nodes = range(region.first_node, region.last_node)
        if len(nodes) > 1 and made[region.last_node] - made[region.first_node] >= _MOST * made[-1]:
            source = next((each.source for each in profile.nodes[region.first_node :] if each.source), None)
            yield Finding(
                cause="whole-checkpoint",
                text=f"one checkpoint is around {len(nodes)} operations: backward makes all of them again at once",
                place="" if source is None else source.place,
                nbytes=sum(each.nbytes for each in alive if each.node in nodes),
                change="a checkpoint around each block in its place; fxmem plan finds where",
            )
