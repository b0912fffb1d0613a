"""What a program does later than in the few steps that are recorded."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxmem.records.parts import Schedule
from fxmem.records.profile import Assumption, Phase, ProgramRun, SourceLine
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
        self._branches, self._loaders = parts.branches, parts.loaders
        self._goes_on = False
        self._after: list[RoundOver] = []
        """What ran after the recorded steps."""
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
        self._recording = parts.recording
        parts.branches.may_leave = self._may_leave

    def ends_before(self, module: torch.nn.Module) -> bool:
        """Whether the next step would begin, and nothing came before it."""
        return self._begins_step(module) and not (self._branches.taken or self._loaders.is_after)

    def _begins_step(self, module: torch.nn.Module) -> bool:
        branches = self._branches
        is_own = branches.is_on and branches.within is None and not branches.is_leaving
        return is_own and torch.is_grad_enabled() and module.training

    def _may_leave(self) -> bool:
        """Whether what follows the loops has not run meanwhile, and no epoch ends by itself."""
        ran = _find_places(each.source for each in self._recording.tracer.calls) | self._branches.saved
        is_pending = any((each.calls or each.saves) not in ran for each in self._following)
        is_over = self._loaders.has_begun_again or self._evaluations.have_begun
        return is_pending and (is_over or self._loaders.ending is None)

    def begin_call(self, module: torch.nn.Module) -> None:
        """With the next step's first forward all branches are over."""
        if self._begins_step(module):
            self._branches.end()
            self._loaders.is_ahead = False

    def note_last(self, number: int) -> None:
        """Take the branches that come much later."""
        if self._loaders.gives and not self._goes_on:
            self._goes_on = self._branches.begin(sys._getframe(1), self._ran)
            if self._goes_on:
                self._loaders.note_ahead()
            else:
                self.goes_beyond()

    def goes_on(self, number: int) -> bool:
        """Whether there may be such branches, which show in another step, or what follows the loops can run."""
        return self.end_step()

    def goes_beyond(self) -> bool:
        """Whether the loops are left, as what follows them has work to do."""
        pending = any((each.calls or each.saves) not in self._ran for each in self._following)
        if not (pending and self._loaders.gives and not self._branches.is_leaving):
            return False
        if self._branches.leave(sys._getframe(1)):
            self._loaders.note_ahead(stops=self._loaders.ending is None or self._loaders.is_after)
        return self._branches.is_leaving

    def end_step(self) -> bool:
        """The step after them is the last, and no batch that was fetched ahead has its own."""
        is_over = self._loaders.has_begun_again or self._loaders.ending is None
        return self._goes_on or (self._branches.is_leaving and is_over)

    def finish(self) -> None:
        """Take no further one."""
        self._branches.end()

    def note_round(self, over: RoundOver) -> None:
        """Note where the operators and calls of a round come from."""
        if self._branches.taken or self._branches.is_leaving:
            self._after.append(over)
            return
        for line in self._branches.saved | _find_places([*over.lines, *over.calls]):
            self._ran.setdefault(line, over.number)
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
            whole = len(peaks) - 2 if at is None and (each.calls or each.saves) else len(peaks)
            if each.every is not None and (each.every > whole or each.counter) and not is_shown:
                update = {} if at is None and not is_over else {"calls": "", "saves": ""}
                later.append(each.model_copy(update=update))
        is_over &= not self._branches.has_raised
        taken = self._describe_taken()
        later = [each for each in later if each.place not in taken]
        known = {*self._ran, *(each.calls or each.saves for each in (*later, *taken.values()))}
        is_over |= self._evaluations.have_begun and not self._branches.is_leaving
        following = [each for each in self._following if not is_over and (each.calls or each.saves) not in known]
        return {"schedules": (*taken.values(), *later, *following)}

    def _describe_taken(self) -> dict[str, Schedule]:
        """What was brought forward, with what it took: of a change, the whole step after it."""
        if not self._after:
            return {}
        counters = {each.place: each.counter for each in self._schedules}
        parts = [each for over in self._after for each in over.record.parts if each.phase is Phase.SAVE]
        ran = _find_places(each for over in self._after for each in (*over.lines, *over.calls)) | self._branches.saved
        followed = [each for each in self._following if ran & {each.calls, each.saves}]
        follows = {each.place: each.model_copy(update={"ran": True}) for each in followed}
        taken = self._branches.taken
        found = {}
        for place, each in (taken | follows | taken).items():
            saved = [part.requested_bytes for part in parts if part.model in (place, each.saves)]
            if not saved and place in taken:  # a trainer's, which saves at the program's call of it
                saved = [part.requested_bytes for part in parts]
            most = max(saved, default=None) if each.saves else None
            if not (each.saves or each.calls):
                most = self._after[0].record.requested_bytes
                if self._peaks and most == self._peaks[-1]:
                    continue  # it changes nothing of what is asked for
            counter = counters.get(place, each.counter)
            found[place] = each.model_copy(update={"counter": counter, "requested_bytes": most})
        return found

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """That the steps between do not do it."""
        for each in run.schedules:
            if each.every is not None and not each.counter and not each.ran:
                text = f"at most one of the steps did what {each.place} does every {each.every:,}"
                yield Assumption(topic="schedules", text=text)


def _find_places(lines: Iterable[SourceLine | None]) -> set[str]:
    return {each.place for each in lines if each is not None}


register("later-work", LaterWork)
