"""An export format and a checkpoint strategy of your own, without a change in fxmem.

The format writes what each node saves for backward, one line per node; the strategy checkpoints every other block. In
a package of your own, entry points let the command line find both (`--to saved`, `--strategy every-other`):

    [project.entry-points."fxmem.exporters"]
    saved = "my_package.my_module"
    [project.entry-points."fxmem.planners"]
    every-other = "my_package.my_module"
"""

from collections.abc import Sequence

import torch
from torch import nn

import fxmem
from fxmem.planning import Stretch, Tables
from fxmem.planning import register as register_strategy
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export import register as register_exporter


def saved(profile: Profile, timeline: Timeline, settings: object) -> str:
    """One line per node that saves something: its name and the bytes."""
    return "".join(f"{node.name} {node.saved_bytes}\n" for node in profile.nodes if node.saved_bytes)


def every_other(tables: Tables, budget: float) -> Sequence[Stretch]:
    """The blocks of the model, each second one as a region; the budget is not looked at."""
    return [Stretch(first, last) for first, last in tables.blocks[1::2] if tables.regions[first, last]]


register_exporter("saved", saved)
register_strategy("every-other", every_other, follows_budget=False)


def block() -> nn.Module:
    """Wide inside, so that a checkpoint frees something."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


analysis = fxmem.analyze(lambda: nn.Sequential(*(block() for _ in range(6))), torch.empty(128, 64), target="cpu")
analysis.export("saved.txt", to="saved")
with open("saved.txt", encoding="utf-8") as file:
    print(file.read(), end="")
plan = fxmem.plan(analysis, "every-other", application="modules")
for region in plan.regions:
    print(f"checkpoint {region.title}: frees {region.freed_bytes:,} bytes")
print(f"peak {plan.before.requested_bytes:,} -> {plan.after.requested_bytes:,} bytes")
