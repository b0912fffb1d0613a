"""Checkpointing that does nothing: it acts in train mode alone, and the model is in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_place
from fxmem.memory.findings import Finding
from fxmem.records.profile import Kind, Profile, Timeline

_SHARE: Final = 10
"""Said where what it would not keep is this share of the peak, one in so many."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for what modules have saved at the peak that are told to checkpoint, where nothing within does."""
    regions = [range(each.first_node, each.last_node) for each in profile.recomputed]
    calls = [
        each
        for each in profile.calls
        if each.skips_checkpoint
        and each.leads_to_gradients
        and not any(each.first_node < region.stop and region.start < each.last_node for region in regions)
    ]
    nodes = {node for each in calls for node in range(each.first_node, each.last_node)}
    alive = (profile.storages[index] for index in timeline.alive)
    nbytes = sum(each.nbytes for each in alive if each.kind is Kind.SAVED and each.node in nodes)
    if nbytes * _SHARE >= timeline.peak.requested_bytes > 0:
        yield Finding(
            cause="skipped-checkpoint",
            text="gradient checkpointing is on and does nothing: the model is in eval mode",
            place=find_place(profile, min(nodes)),
            nbytes=nbytes,
            change="model.train(), in which it does; dropout does too",
        )
