"""A part of a card for KAI Scheduler, as a Pod's metadata and spec.

The annotations are its own: `gpu-memory` of each card in MiB, `gpu-memory.limit` beside it, and of several cards
`gpu-fraction-num-devices` (kai-scheduler/KAI-Scheduler, pkg/common/constants). The scheduler itself holds no process to
them.
"""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import find_shares


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """Annotations for what the steps take, and for the most that is known of the whole program."""
    asked, share = find_shares(profile, timeline)
    lines = [*asked.comments(), "metadata:", "  labels:", "    kai.scheduler/queue: default # or yours"]
    if share is not None:
        lines += ["  annotations:", f'    gpu-memory: "{share.steps_mib}" # MiB']
        lines += (
            [f'    gpu-memory.limit: "{share.most_mib}" # {share.most}'] if share.most_mib > share.steps_mib else []
        )
        lines += [f'    gpu-fraction-num-devices: "{asked.cards}"'] if asked.cards > 1 else []
    lines += ["spec:", "  schedulerName: kai-scheduler"]
    if asked.host_gib is not None:
        limits = ["    resources:", "      limits:", f"        memory: {asked.host_gib}Gi"]
        lines += ["  containers:", "  - name: train", *limits]
    return "\n".join(lines) + "\n"
