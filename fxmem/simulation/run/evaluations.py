"""What a program keeps of each batch while it evaluates, or of each pass of a loop that trains nothing, and what all of
them take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from fxmem.records.parts import EvaluationPass
from fxmem.simulation.card.card_memory import RepeatedSteps
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.run.growth import FurtherSteps, GrowthLog
from fxmem.simulation.run.loader_watch import LoaderPass, count_batches
from fxmem.simulation.run.owner_names import Cycles, OwnerNames
from fxmem.simulation.run.repeated_calls import RepeatedCalls

EVALUATED: Final = 5
"""Batches of its own that a pass gets after the epoch was ended: three show what a batch leaves, a fourth that it is
so, and one may be fetched ahead."""
MOST_EVALUATED: Final = 9
"""The same, where those do not yet show how the next one differs: what the first ones do takes a few more to be
over."""
MOST_SECONDS: Final = 60.0
"""Time that the other batches of a pass may take where something is kept of each, so that what the program makes of all
of it is of all of it. Where they would take longer, or the card is full before, they do not run."""
_TIMED: Final = 3
"""Of these, the batches that show how long they take; in the first each model still runs."""


class Evaluations:
    """The passes that follow an epoch, and the loops of a program that trains nothing, whose passes are batches here.

    Args:
        log: of the program's storages.
        machine: that it runs on.
        owners: of these.
        cycles: freed after each batch.
        repeats: the calls of models within a pass.
        most_operators: that a round may have.
    """

    def __init__(
        self,
        log: StepLog,
        machine: PretendedMachine,
        owners: OwnerNames,
        cycles: Cycles,
        repeats: RepeatedCalls,
        most_operators: int,
    ) -> None:
        self._log, self._owners, self._cycles = log, owners, cycles
        self._machine, self._memory, self._trace = machine, machine.memory, machine.trace
        self._repeats = repeats
        self._most_operators = most_operators
        self._tick = self._calls = self._acts = 0
        self._until = 0.0
        """When the pass that is run whole is ended at the latest; 0 for none."""
        self.have_begun = False
        """Whether a model was called after the epoch was ended."""
        self.passes: list[EvaluationPass] = []
        self.whole_operators = 0
        """Of the batches that run so that passes are whole."""
        self.whole_seconds = 0.0
        """That these may take."""
        self.is_cut = False
        """Whether the other batches would take long."""

    def note_call(self, *, is_loop: bool = False) -> None:
        """A model is called, after the epoch or within a loop."""
        self.have_begun |= not is_loop
        self._calls += 1

    def begin(self, ran: int = 0) -> None:
        """A pass begins, or another begins to be followed when so many of its batches are over."""
        self._tick, self._calls = self._log.tick, ran
        self._further = None if self._memory is None else FurtherSteps(self._memory, self._trace)
        _, self._acts = self._trace.since(0)
        self._growth = GrowthLog(self._log, self._owners.holders, self._cycles)
        self._is_known, self._until, self._repeats.is_on = False, 0.0, False
        self._is_listed = self.is_cut = False
        self._ended = self._machine.notes.loops_ended

    def end_loop(self, ran: int, *, is_over: bool = True) -> None:
        """A loop that was followed is over after so many passes, or the program is before."""
        is_over &= self._machine.notes.loops_ended == self._ended  # else nobody knows how many it has
        if self._is_listed and not self.is_cut:
            most = self._machine.find_peak()[0]
            whole = {"batches": ran, "end_bytes": most, "reserved_bytes": None, "full_at": None} if is_over else {}
            self.passes[-1] = self.passes[-1].model_copy(update={"ran": ran, "requested_bytes": most, **whole})

    def drop_loop(self) -> None:
        """The loop that was followed is a part of another's passes."""
        del self.passes[len(self.passes) - self._is_listed :]

    def note_asked(self, of: LoaderPass, ran: int) -> bool:
        """A pass over a loader asks for its next batch; as `note_batch`."""
        if ran == 0:
            self.begin()
            return True
        return self.note_batch(of.place, count_batches(of.loader), ran)

    def note_batch(self, place: str, batches: int | None, ran: int, *, is_loop: bool = False) -> bool:
        """A pass asks for its next batch. Say whether it gets it: the first ones tell what further ones are like, and
        where something is kept of each, all run if that is soon done; those of a loop always, then.

        Args:
            place: of the pass.
            batches: of all of it; None where that is not known.
            ran: the batches that it has had.
            is_loop: whether it is a loop that trains nothing.
        """
        if self._until:
            return self._note_further(ran)
        if self._is_known or ran > MOST_EVALUATED:  # of other lengths
            return False
        self._note_held()
        if self._is_listed:
            self.passes.pop()  # what was known a batch ago
        self._is_listed = True
        if self._growth.nbytes and not self._growth.known:
            self._growth.prove(None, self._owners.places, self._owners.find_saved(), is_last=False)
        now = EvaluationPass(
            place=place,
            batches=batches,
            is_loop=is_loop,
            ran=ran,
            requested_bytes=self._machine.find_peak()[0],
            **self._growth.describe(),
        )
        replayed = None if self._further is None else self._replay(now, self._further)
        self._is_known = ran >= EVALUATED and (replayed is not None or not now.growth_bytes or self._memory is None)
        now = now.model_copy(update={"end_bytes": self._find_end(now), **(replayed or {})})
        self.passes.append(now)
        if ran < EVALUATED or (not self._is_known and ran < MOST_EVALUATED):
            return True
        return self._begin_whole(now)

    def _begin_whole(self, of: EvaluationPass) -> bool:
        """Let the other batches run where more is kept after each, and the card has room for it."""
        if of.batches is None or not (of.growth_bytes or of.is_loop):
            return False
        most = None if self._memory is None or not self._memory.raises else self._memory.usable_bytes
        is_full = most is not None and of.find_full(most) is not None
        self.is_cut = of.is_loop and is_full
        if is_full or (most is not None and of.growth_bytes and of.end_bytes is None and of.is_proved):
            return False
        self._repeats.is_on = True
        self._first, self._until = of.ran, time.monotonic() + 2 * MOST_SECONDS
        self.whole_seconds += 2 * MOST_SECONDS
        return True

    def _note_further(self, ran: int) -> bool:
        """Another batch of a pass that is run whole is over. Say whether the next one runs, too."""
        last, now = self.passes[-1], (time.monotonic(), len(self._log.ops))
        whole, ends = last.batches or 0, [each.until for each in last.grown]
        if ends and None not in ends:  # with what is done of all that was kept until then
            whole = min(whole, max(each or 0 for each in ends) + _TIMED)
        left, goes_on = whole - ran, now[0] < self._until and (ran < whole or whole == last.batches)
        if ran == self._first + 1:
            self._timed = now
        elif ran == self._first + _TIMED:
            seconds, operators = (round(left * (b - a) / (_TIMED - 1)) for a, b in zip(self._timed, now, strict=True))
            goes_on = seconds <= MOST_SECONDS and now[1] + operators <= self._most_operators
            self.whole_operators += operators
        if left < 2 or not goes_on:
            self._note_held()
            held = [2 * self._growth.held_bytes(each.holder) >= each.nbytes * (ran - 1) for each in last.grown]
            if whole == last.batches and not all(held):  # it was let go of meanwhile
                last = last.model_copy(update={"growth_bytes": None, "grown": ()})
        last = last.model_copy(update={"ran": ran, "requested_bytes": self._machine.find_peak()[0]})
        last = last.model_copy(update={"end_bytes": self._find_end(last)})
        if goes_on and left < 2 and whole == last.batches:  # who knows the number asks for no batch after the last one
            last = last.model_copy(update={"ran": last.batches, "reserved_bytes": None, "full_at": None})
        self.passes[-1] = last
        self._repeats.is_on, self.is_cut = goes_on and left > 0, not goes_on
        return goes_on

    def _replay(self, of: EvaluationPass, steps: FurtherSteps) -> dict[str, int] | None:
        """The batches to the last one on the card; None where they do not yet ask for as many bytes more, each, as the
        one before."""
        self._acts = steps.note_round(of.ran, self._acts)
        even = steps.find_even()
        if even is None or of.batches is None or of.ran < EVALUATED:
            return None
        over = min(of.ran, self._calls)  # a batch may be fetched ahead
        if _find_ahead(of, over) is None:
            return {}
        ends = [min(of.batches, each.until or of.batches) for each in of.grown]
        further = RepeatedSteps(even, max(min(ends, default=of.batches) - over, 0))
        found = {"reserved_bytes": steps.memory.try_steps(further).reserved}
        if further.done == further.periods and min(ends, default=0) < max(ends, default=0):
            return {}  # something else goes on
        return found if further.done == further.periods else {**found, "full_at": over + further.done + 1}

    def _find_end(self, of: EvaluationPass) -> int | None:
        """The most requested at once in a whole pass; None where its end is not known."""
        ahead = _find_ahead(of, min(of.ran, self._calls))  # as in `_replay`
        if ahead is None or (of.is_loop and not self._is_known):  # passes of a loop may become anything
            return None
        if not any(ahead.values()):
            return of.requested_bytes
        whole, joined = sum(ahead.values()), [each for each in of.grown if not each.tensors]
        # A tensor that is joined anew with each batch is there twice for a moment, as old and as new.
        again = [self._growth.held_bytes(each.holder) + ahead.get(each.holder, 0) - each.nbytes for each in joined]
        return max(of.requested_bytes + whole, self._machine.live_bytes + whole + max(again, default=0))

    def note_step(self) -> None:
        """The step after the passes is over: what the last one has kept may have been there throughout."""
        if not self.passes or not self.passes[-1].grown or not self.passes[-1].is_carried_on:
            return
        last = self.passes[-1]
        before = [self._growth.held_bytes(each.holder) for each in last.grown]
        self._note_held()
        if all(self._growth.held_bytes(each.holder) >= held for each, held in zip(last.grown, before, strict=True)):
            ahead = _find_ahead(last, last.ran)
            if ahead is not None and last.end_bytes is not None:
                end = max(last.end_bytes, self._machine.find_peak()[0] + sum(ahead.values()))
                self.passes[-1] = last.model_copy(update={"end_bytes": end})

    def _note_held(self) -> None:
        tick, self._tick = self._tick, self._log.tick
        self._cycles.collect()
        self._growth.note_made(self._owners.name_held())
        self._growth.note_round(Counter(each.nbytes for each in self._log.storages if each.birth > tick))


def _find_ahead(of: EvaluationPass, ran: int) -> dict[str, int] | None:
    """How many bytes the batches leave that come after so many, by owner; None where their number is not known, or
    whether they do."""
    if not of.growth_bytes:
        return {}
    if of.batches is None or not of.grown or not (of.is_proved or of.batches - ran < 2):
        return None
    return {each.holder: each.nbytes * max(min(each.until or of.batches, of.batches) - ran, 0) for each in of.grown}


def explain_evaluations(passes: Sequence[EvaluationPass]) -> Iterator[str]:
    """What is taken for granted of evaluations."""
    if passes:
        yield (
            f"the epoch was ended so that what follows it runs. Of a pass that follows, the first {EVALUATED} to "
            f"{MOST_EVALUATED} batches ran, where their lengths vary the largest and the last as well; where something "
            f"is kept of each, all that take at most {MOST_SECONDS:.0f} s and for which the card has room, with calls "
            "of a model that are alike made of those that ran; else what a batch leaves, each batch to the last one "
            "leaves"
        )
