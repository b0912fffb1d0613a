"""What watches a program while it is recorded, each part of it whole."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fxmem.records.units import MAX_OPERATORS, STEADY, STEPS
from fxmem.simulation.asked.routing import BALANCED, Rule
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.program.rounds import FinishedRound, IsEnough, Rounds
from fxmem.simulation.program.tensor_reads import TensorReads
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.branches import Branches
from fxmem.simulation.run.decode_loops import DecodeLoops
from fxmem.simulation.run.evaluations import Evaluations
from fxmem.simulation.run.host_memory import HostMeter
from fxmem.simulation.run.listeners import make_listeners
from fxmem.simulation.run.loader_watch import LoaderWatch
from fxmem.simulation.run.loops import LoopWatch
from fxmem.simulation.run.owner_names import Cycles, OwnerNames
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.repeated_calls import RepeatedCalls
from fxmem.simulation.run.round_listener import RoundListener
from fxmem.simulation.stand_ins.checkpoints import Checkpoints
from fxmem.simulation.stand_ins.vllm import Engines

# --- how a program is run ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How long a program runs, and how."""

    steps: int | None = None
    """Optimizer steps after which it is ended; `STEPS` where nothing is said, or up to `GROWING` while it grows."""
    until: str | None = None
    """"steady" ends it when a step allocates no more than the one before and leaves as much alive, at the latest after
    `steps` (`STEADY` where nothing is said); "end" never does; None after so many steps."""
    out_of_memory: str = "raise"
    """"raise" or "continue", as of `record`."""
    max_operators: int = MAX_OPERATORS
    """Operators of one round after which it is ended."""
    compile: str | None = None
    """"as-is" compiles what it compiles; None runs that as eager code."""
    prepare: Callable[[str, torch.nn.Module], None] | None = None
    """Called with name and module of each of its models before the first call."""
    given: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Values that it reads, by line (`train.py:41`), where they would be made up."""
    rule: Rule = BALANCED
    """How tokens are shared out among experts."""
    host_bytes: int | None = None
    """The host's memory; None where it is not known."""
    measures_host: bool = True
    """Whether what the process has there is measured, which differs a little from run to run."""
    reads_epoch: bool = False
    """Whether an epoch of its loader's batches is read, where they have different lengths."""
    explains: bool = True
    """Whether the report says what is found; see `ProfiledStep.report`."""
    watch: Callable[[Callable[[], str]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What the program runs inside; called with what says how far it is, which another thread may ask."""

    @property
    def most_steps(self) -> int | None:
        """After how many steps it is ended at the latest; None for never."""
        return None if self.until == "end" else self.steps or (STEADY if self.until == "steady" else STEPS)

    def is_enough(self, rounds: Sequence[FinishedRound]) -> bool:
        """Whether the program has run long enough, asked after each round with all of them."""
        is_steady = self.until == "steady" and len(rounds) > 1 and rounds[-1].repeats(rounds[-2])
        if rounds[-1].may_show_more and not (self.steps or self.until):
            return False
        return is_steady or (self.most_steps is not None and len(rounds) >= self.most_steps)


# --- what watches a program while it is recorded, each part of it whole -----------------------------------------------


class Watch(NamedTuple):
    """What watches a program while it is recorded."""

    rounds: Rounds
    listeners: tuple[RoundListener, ...]
    parts: ProgramParts
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
    repeats = RepeatedCalls(recording, machine, runs_all=settings.until == "end")
    evaluations = Evaluations(recording.log, machine, owners, cycles, repeats, settings.max_operators)
    host = HostMeter(machine, recording, settings.host_bytes, measures=settings.measures_host)
    loaders = LoaderWatch(
        reads=settings.reads_epoch,
        gives=not (settings.steps or settings.until),
        on_evaluated=evaluations.note_asked,
        apart=host.pause,
    )
    branches = Branches()
    parts = ProgramParts(recording, machine, owners, loops, cycles, evaluations, repeats, host, loaders, branches)
    listeners = make_listeners(parts)
    rounds = Rounds(recording, machine, owners, loops, listeners, enough=enough, max_operators=settings.max_operators)
    branches.saving = rounds.saving
    return Watch(
        rounds=rounds,
        listeners=listeners,
        parts=parts,
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
        checkpoints=Checkpoints(machine.border, notes, device, machine.isolation, branches.save),
    )
