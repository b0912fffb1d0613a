"""A part of a card for HAMi, as a Pod's spec.

`nvidia.com/gpumem` is in MiB of each card, and no process gets more: so it is the most that is known of the program
(Project-HAMi/HAMi, docs/userguide).
"""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import find_shares


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """A container's limits."""
    asked, share = find_shares(profile, timeline)
    limits = []
    if share is not None:
        limits += [f"nvidia.com/gpu: {asked.cards}", f"nvidia.com/gpumem: {share.most_mib} # {share.most}"]
    limits += [f"memory: {asked.host_gib}Gi"] if asked.host_gib is not None else []
    lines = [*asked.comments(), "containers:", "  - name: train", f"    resources:{'' if limits else ' {}'}"]
    lines += ["      limits:", *(f"        {each}" for each in limits)] if limits else []
    return "\n".join(lines) + "\n"
