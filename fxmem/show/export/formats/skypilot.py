"""Resources for SkyPilot, as a part of a task's YAML.

`NVIDIA:24GB+` stands for each of its cards of so much memory or more; a number of cards follows (sky/resources.py of
SkyPilot 0.14). `memory` is the host's, in GiB.
"""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import find_resources


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """`resources`, and `num_nodes` where there are several."""
    asked = find_resources(profile, timeline)
    lines = [*asked.comments(), *([f"num_nodes: {asked.nodes}"] if asked.nodes > 1 else [])]
    parts = []
    if asked.cards:
        card = f"NVIDIA:{asked.card_gb}GB+" if asked.card is None else asked.card.target.name.upper()
        parts.append(f"accelerators: {card}:{asked.cards}")
    parts += [f"memory: {asked.host_gib}+"] if asked.host_gib is not None else []
    lines += ["resources:", *(f"  {each}" for each in parts)] if parts else ["resources: {}"]
    return "\n".join(lines) + "\n"
