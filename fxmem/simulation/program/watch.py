"""What watches a program while it is recorded, each part of it whole."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.program.rounds import IsEnough, Rounds
from fxmem.simulation.program.run_settings import RunSettings
from fxmem.simulation.program.tensor_reads import TensorReads
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.cycles import Cycles
from fxmem.simulation.run.decode_loops import DecodeLoops
from fxmem.simulation.run.evaluations import Evaluations
from fxmem.simulation.run.host_memory import HostMeter
from fxmem.simulation.run.listeners import make_listeners
from fxmem.simulation.run.loader_watch import LoaderWatch
from fxmem.simulation.run.loops import LoopWatch
from fxmem.simulation.run.owner_names import OwnerNames
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.repeated_calls import RepeatedCalls
from fxmem.simulation.run.round_listener import RoundListener
from fxmem.simulation.stand_ins.checkpoints import Checkpoints
from fxmem.simulation.stand_ins.vllm import Engines


class Watch(NamedTuple):
    """What watches a program while it is recorded."""

    rounds: Rounds
    listeners: tuple[RoundListener, ...]
    parts: ProgramParts
    repeats: RepeatedCalls
    decode_loops: DecodeLoops
    engines: Engines | None
    """Serving engines that it starts; None on the CPU."""
    reads: TensorReads
    checkpoints: Checkpoints


def make_watch(machine: PretendedMachine, recording: Recording, settings: RunSettings, enough: IsEnough) -> Watch:
    """Watch the program of a recording; its rounds tell all listeners.

    Args:
        machine: that it runs on.
        recording: of it.
        settings: how it is run.
        enough: asked after each round, with all of them, whether it has run long enough.
    """
    memory, notes, device = machine.memory, machine.notes, recording.device
    owners, loops, cycles = OwnerNames(recording, machine.roots), LoopWatch(sys._getframe(1)), Cycles(machine.live)
    repeats = RepeatedCalls(recording, machine)
    evaluations = Evaluations(recording.log, machine, owners, cycles, repeats, settings.max_operators)
    host = HostMeter(machine, recording, settings.host_bytes, measures=settings.measures_host)
    loaders = LoaderWatch(
        reads=settings.reads_epoch,
        gives=not (settings.steps or settings.until),
        on_evaluated=evaluations.note_batch,
        apart=host.pause,
    )
    parts = ProgramParts(recording, machine, owners, loops, cycles, evaluations, host, loaders)
    listeners = make_listeners(parts)
    rounds = Rounds(recording, machine, owners, loops, listeners, enough=enough, max_operators=settings.max_operators)
    return Watch(
        rounds=rounds,
        listeners=listeners,
        parts=parts,
        repeats=repeats,
        decode_loops=DecodeLoops(
            *(recording.log, machine.trace, machine.values.maker),
            memory=memory,
            rolling=rounds.generating,
            # A rank in a fork would send what others wait for.
            fork=host.look_ahead if hasattr(os, "fork") and recording.collectives.world is None else None,
            is_compiled=recording.compilation.compiles,
        ),
        engines=None if memory is None else Engines(memory, rounds.generating, machine.roots, recording),
        reads=TensorReads(machine.border, notes, device),
        checkpoints=Checkpoints(machine.border, notes, device, machine.isolation),
    )
