"""The machine that a program is recorded on."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping

import torch

from fxmem.records.profile import Target
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.asked.routing import Rule
from fxmem.simulation.asked.values import MadeUpValues
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.card.card_memory import CardMemory, LiveBytes, Part, PartPeak
from fxmem.simulation.card.card_thread import CardThread, Roots
from fxmem.simulation.card.device_border import Border
from fxmem.simulation.processes.sandbox.isolation import Isolation


@dataclasses.dataclass(frozen=True)
class PretendedMachine:
    """What a program finds itself on: the card, and what lies between it and the host."""

    memory: CardMemory | None
    """The card's; None for the CPU."""
    trace: BlockTrace
    """What the program allocates and frees."""
    live: LiveBytes
    border: Border
    thread: CardThread
    roots: Roots
    """The program's modules."""
    notes: MadeUpNotes
    values: MadeUpValues
    isolation: Isolation
    """What keeps its files apart."""

    @property
    def live_bytes(self) -> int:
        """What is requested now."""
        return self.live.now if self.memory is None else self.memory.stats().requested_bytes.current

    def find_peak(self) -> tuple[int, PartPeak | None, dict[Part, PartPeak]]:
        """The most requested since the round began, and on a card the most of each count, of all and of each part."""
        if self.memory is None:
            return self.live.highest, None, {}
        self.memory.ask_cudnn()
        parts = self.memory.part_peaks()
        most = functools.reduce(PartPeak.at_least, parts.values())
        return most.requested, most, parts


def make_machine(
    target: Target,
    *,
    raises: bool,
    prepare: Callable[[str, torch.nn.Module], None] | None,
    given: Mapping[str, torch.Tensor],
    rule: Rule,
    isolation: Isolation | None,
) -> PretendedMachine:
    """Pretend a machine.

    Args:
        target: what it is.
        raises: whether an allocation that the card has no room for raises `torch.cuda.OutOfMemoryError`.
        prepare: called with name and module of each model of the program before its first call.
        given: values that the user says it reads, by line.
        rule: how tokens are shared out among experts.
        isolation: what keeps its files apart; None where they are real.
    """
    notes, trace, live = MadeUpNotes(given), BlockTrace(), LiveBytes()
    on_card = target.device == "cuda"
    memory = CardMemory(target, os.environ, raises=raises, trace=trace) if on_card else None
    border = Border(memory, notes)
    if not on_card:
        live.on_rise = lambda passing: border.host.on_rise(passing)
    values = MadeUpValues(notes, rule)
    roots, thread = Roots(prepare), CardThread()
    return PretendedMachine(memory, trace, live, border, thread, roots, notes, values, isolation or Isolation())
