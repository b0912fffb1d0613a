"""Resources for SLURM, as the head of a batch script.

`--gres` and `--mem` are of each node (`man sbatch`). SLURM has no word for a card's memory: each site names its cards,
or its nodes' features, itself.
"""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import find_resources


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """Lines of `#SBATCH`."""
    asked = find_resources(profile, timeline)
    lines = asked.comments()
    if asked.cards:
        card = f"a card of {asked.card_gb} GB or more" if asked.card is None else asked.card.target.full_name
        lines += [f"# {card}: `sinfo -o %G,%f` lists what --gres=gpu:NAME:{asked.cards} or --constraint may name"]
    if asked.nodes * asked.cards > 1:
        lines += [f"# torchrun, one task a node, starts {asked.cards} ranks; count CPUs for their loaders, too"]
        lines += [f"#SBATCH --nodes={asked.nodes}", "#SBATCH --ntasks-per-node=1"]
    lines += [f"#SBATCH --gres=gpu:{asked.cards}"] if asked.cards else []
    lines += [f"#SBATCH --mem={asked.host_gib}G"] if asked.host_gib is not None else []
    return "\n".join(lines) + "\n"
