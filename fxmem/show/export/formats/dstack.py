"""Resources for dstack, as a part of a run's configuration.

As `GPUSpec` and `Range` of dstack 0.22 read them: `nvidia:24GB..` is 24 GB or more, a number of cards
follows.
"""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import find_resources


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """`resources`, and `nodes` where there are several."""
    asked = find_resources(profile, timeline)
    lines = [*asked.comments(), *([f"nodes: {asked.nodes}"] if asked.nodes > 1 else [])]
    parts = [f"memory: {asked.host_gib}GB.."] if asked.host_gib is not None else []
    if asked.cards:
        card = f"nvidia:{asked.card_gb}GB.."
        if asked.card is not None:
            # dstack tells cards of one name apart by their memory: V100-32GB is V100:32GB.
            name, size = asked.card.target.name.upper(), f"{asked.card.sold_gb}GB"
            card = f"{name.removesuffix(f'-{size}')}:{size}"
        parts.append(f"gpu: {card}:{asked.cards}")
    lines += ["resources:", *(f"  {each}" for each in parts)] if parts else ["resources: {}"]
    return "\n".join(lines) + "\n"
