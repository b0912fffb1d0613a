"""The steps to come of a program that grows, replayed on its card."""

from __future__ import annotations

from typing import Final

from fxmem.memory.generation import LEAST_COMPARED, LoopSteps, find_events
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.card.card_memory import CardMemory, RepeatedSteps

_MOST_ACTS: Final = 1_000_000
"""Allocations and frees that are replayed at most to find the step at which the card is full."""


class FurtherSteps:
    """The steps to come of a program that grows, replayed on its card.

    Args:
        memory: the card's.
        trace: of what the program allocates and frees.
    """

    def __init__(self, memory: CardMemory, trace: BlockTrace) -> None:
        self._memory, self._trace = memory, trace
        self._steps = LoopSteps()
        self._acts = 1

    def note_round(self, number: int) -> None:
        """A round after which more is alive is over."""
        self._memory.ask_cudnn()
        acts, self._acts = self._trace.since(0)
        events = find_events(acts, self._memory.asked)
        if events is None:
            self._steps = LoopSteps()
        else:
            self._steps.add(number, events, (), None, 0)

    def find_full(self, number: int, growth_bytes: int) -> int | None:
        """The round within which the card has no more memory, if all to come are like the last; None: not known."""
        even = self._steps.find_even(LEAST_COMPARED)
        periods = self._memory.usable_bytes // growth_bytes + 1
        if even is None or periods * self._acts > _MOST_ACTS:
            return None
        further = RepeatedSteps(even, periods)
        self._memory.try_steps(further)
        return None if further.done == periods else number + further.done + 1
