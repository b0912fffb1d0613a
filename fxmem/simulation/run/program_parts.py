"""What the listeners of a program's rounds are made of."""

from __future__ import annotations

import dataclasses

from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.branches import Branches
from fxmem.simulation.run.evaluations import Evaluations
from fxmem.simulation.run.host_memory import HostMeter
from fxmem.simulation.run.loader_watch import LoaderWatch
from fxmem.simulation.run.loops import LoopWatch
from fxmem.simulation.run.owner_names import Cycles, OwnerNames
from fxmem.simulation.run.repeated_calls import RepeatedCalls


@dataclasses.dataclass(frozen=True)
class ProgramParts:
    """What watches a program while it runs."""

    recording: Recording
    machine: PretendedMachine
    """That it runs on."""
    owners: OwnerNames
    """Of its storages."""
    loops: LoopWatch
    """Around its steps."""
    cycles: Cycles
    """Of references, freed after each round."""
    evaluations: Evaluations
    """The passes that follow an epoch."""
    repeats: RepeatedCalls
    """Of models, which need not run."""
    host: HostMeter
    loaders: LoaderWatch
    branches: Branches
    """That it takes later."""
