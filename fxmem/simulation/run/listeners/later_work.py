"""What a program does later than in the few steps that are recorded."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from fxmem.records.parts import Schedule
from fxmem.records.profile import Assumption, ProgramRun
from fxmem.records.units import STEPS
from fxmem.simulation.run.listeners import register
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.round_listener import RoundListener, RoundOver
from fxmem.simulation.run.schedules import find_following, find_schedules


class LaterWork(RoundListener):
    """What a program's own code has still to do where its steps are ended: what it does every so many of them, and what
    follows their loop.

    Args:
        parts: of the program.
    """

    def __init__(self, parts: ProgramParts) -> None:
        self._notes, self._evaluations = parts.machine.notes, parts.evaluations
        self._peaks: list[int] = []
        """Of the whole rounds."""
        self._ran: dict[str, int] = {}
        """By line of the program that an operator or a call of a module came from, the first round in which one did."""
        self._schedules: dict[Schedule, list[str]] = {}
        self._following: tuple[Schedule, ...] = ()
        self._counted: dict[Schedule, Any] = {}
        """What each condition divided when the last step ended."""
        self._slower: dict[Schedule, str] = {}
        """Conditions that divide what a step left as it was, such as the number of an epoch."""

    def note_round(self, over: RoundOver) -> None:
        """Note where the operators and calls of a round come from."""
        for each in (*over.lines, *over.calls):
            if each is not None:
                self._ran.setdefault(each.place, over.number)
        if over.is_whole:
            self._peaks.append(over.record.requested_bytes)
            if over.number <= STEPS:
                self._search(sys._getframe(1))

    def _search(self, frame: types.FrameType | None) -> None:
        """Search the code of the frame that ends a step, and of its callers."""
        self._schedules, self._following, before = {}, find_following(frame), self._counted
        self._counted = {}
        for found, name, counted, lines in find_schedules(frame):
            self._counted[found] = counted
            if counted is not None and before.get(found) == counted:
                self._slower[found] = name
            self._schedules[found.model_copy(update={"counter": self._slower.get(found, "")})] = lines

    def describe(self, *, is_over: bool) -> dict[str, Any]:
        """What has not run, and what has run in a step with a higher peak than the next: it may come to that again.

        What a program that came to its own end has not called by then it does not call.
        """
        peaks, read = self._peaks, {each.place for each in self._notes.records()}
        later, last = [], len(peaks) - 1
        for each, lines in self._schedules.items():
            at = min((self._ran[line] for line in (*lines, each.calls) if line in self._ran), default=None)
            at = 0 if at is None and not read.isdisjoint(lines) else at
            is_shown = at is not None and (at == 0 or at > last or peaks[at - 1] <= peaks[at])
            # What comes last in a loop is asked one step less, and where its count begins, at 0, often does nothing.
            whole = len(peaks) - 2 if at is None and each.calls else len(peaks)
            if each.every is not None and (each.every > whole or each.counter) and not is_shown:
                later.append(each if at is None and not is_over else each.model_copy(update={"calls": ""}))
        known = {*self._ran, *(each.calls for each in later)}
        is_over |= self._evaluations.have_begun
        return {"schedules": (*later, *(each for each in self._following if not is_over and each.calls not in known))}

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """That the steps between do not do it."""
        for each in run.schedules:
            if each.every is not None and not each.counter:
                text = f"at most one of the steps did what {each.place} does every {each.every:,}"
                yield Assumption(topic="schedules", text=text)


register("later-work", LaterWork)
