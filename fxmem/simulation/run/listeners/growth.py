"""What a program keeps more of after each round, on the card and on the host."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from fxmem.records.profile import Assumption, ProgramRun
from fxmem.simulation.recording.residents import Holders, find_variables
from fxmem.simulation.run.growth import FurtherSteps, GrowthLog
from fxmem.simulation.run.listeners import register
from fxmem.simulation.run.loops import LoopWatch
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.round_listener import RoundListener, RoundOver

_WORTH_GOING_ON: Final = 1 << 20
"""Bytes a step that more rounds are run for where they are kept on the host, whose size nobody has said."""


class GrowthWatch(RoundListener):
    """Finds what a program keeps more of after each round, and the round at which the card is full.

    Args:
        parts: of the program.
    """

    def __init__(self, parts: ProgramParts) -> None:
        self._owners, self._loops, self._cycles = parts.owners, parts.loops, parts.cycles
        self._memory, self._trace = parts.machine.memory, parts.machine.trace
        log, self._recording = parts.recording.log, parts.recording
        self._growth = GrowthLog(log, self._owners.holders, self._cycles)
        self._anew = GrowthLog(log, self._owners.holders, self._cycles)
        """After the first step of each optimizer that was made since the step before: of each fold, each trial."""
        self._has_new_optimizer = False
        self._host, self._host_log = parts.host, parts.host.ledger.log
        self._host_holders = Holders(self._host_log)
        self._host_growth = GrowthLog(self._host_log, self._host_holders, self._cycles)
        self._further: FurtherSteps | None = None
        self._full_at: int | None = None
        self._cycle_at = ""
        """As of `GrowthLog.prove`."""

    def note_optimizer(self) -> None:
        """The next round is the first of this one."""
        self._has_new_optimizer = True

    def note_round(self, over: RoundOver) -> None:
        """Count what is alive now."""
        self._cycle_at, self._recording.engine.cycle_at = self._recording.engine.cycle_at, ""
        self._cycles.collect()
        self._host_holders.search([(find_variables, None)], {})
        if over.is_whole:
            self._loops.note_round(sys._getframe(1))
        self._growth.note_made(over.lines)
        self._host_growth.note_made(over.lines)
        if not over.is_whole:
            return
        self._growth.note_round(over.sizes, over.forward_sizes)
        self._host_growth.note_round(Counter(each.nbytes for each in self._host_log.storages if each.birth > 0))
        if self._growth.may_go_on and not self._growth.known:
            self._prove(self._growth, self._loops, is_last=False)
        if self._has_new_optimizer:
            self._has_new_optimizer = False
            self._anew.note_made(over.lines)
            self._anew.note_round(over.sizes)
            self._prove(self._anew)
        if self._memory is None or not self._growth.nbytes:
            self._further = None
            return
        self._further = self._further or FurtherSteps(self._memory, self._trace)
        self._further.note_round(over.number)

    def note_last(self, number: int) -> None:
        """Prove what goes on, and replay the rounds to come."""
        self._prove(self._growth, self._loops)
        self._host_growth.prove(self._loops, [(find_variables, None)], {}, is_last=True)
        if self._further is not None and all(each.is_endless for each in self._growth.describe()["grown"]):
            self._full_at = self._further.find_full(number, self._growth.nbytes or 0)

    def _prove(self, growth: GrowthLog, loops: LoopWatch | None = None, *, is_last: bool = True) -> None:
        growth.prove(loops, self._owners.places, self._owners.find_saved(), self._cycle_at, is_last=is_last)

    @property
    def may_show_more(self) -> bool:
        """Whether what grows may come to an end."""
        is_worth_it = self._host.limit_bytes is not None or (self._host_growth.nbytes or 0) >= _WORTH_GOING_ON
        return self._growth.may_go_on or (is_worth_it and self._host_growth.may_go_on)

    def describe(self, *, is_over: bool) -> dict[str, Any]:
        """What grows, by whom."""
        host = self._host_growth.describe(is_over=is_over)
        return {
            **self._growth.describe(is_over=is_over),
            "full_at": self._full_at,
            "grown_anew": self._anew.describe()["grown"],
            "host": self._host.record().model_copy(update=host),
        }

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """That what is in reference cycles is freed after each round."""
        yield from (Assumption(topic="cycles", text=text) for text in self._cycles.explain(peak_bytes))


register("growth", GrowthWatch)
