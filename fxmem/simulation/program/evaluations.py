"""What a program keeps of each batch while it evaluates, and what the whole evaluation takes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fxmem.records.parts import EvaluationPass
from fxmem.records.profile import SourceLine
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.program.growth import GrowthLog
from fxmem.simulation.program.loader_watch import EVALUATED, LoaderPass, count_batches
from fxmem.simulation.residents import Holders


class Evaluations:
    """The passes that follow an epoch.

    Args:
        log: of the program's storages.
        find_live: finds what is requested now.
        find_peak: finds the most since the round began.
        holders: who keeps what.
        name_held: finds the owners of what is alive now.
        find_sources: finds the lines of the round's nodes.
    """

    def __init__(
        self,
        log: StepLog,
        find_live: Callable[[], int],
        find_peak: Callable[[], int],
        holders: Holders,
        name_held: Callable[[], None],
        find_sources: Callable[[], Sequence[SourceLine | None]],
    ) -> None:
        self._log, self._holders = log, holders
        self._find_live, self._find_peak = find_live, find_peak
        self._name_held, self._find_sources = name_held, find_sources
        self._tick = self._calls = 0
        self.passes: list[EvaluationPass] = []

    def note_call(self) -> None:
        """A model is called."""
        self._calls += 1

    def note_batch(self, of: LoaderPass, ran: int) -> None:
        """A pass asks for its next batch.

        Args:
            of: the pass.
            ran: the batches that it has had.
        """
        tick, self._tick = self._tick, self._log.tick
        if ran == 0:
            self._growth, self._calls = GrowthLog(self._log, self._holders), 0
            return
        if ran > EVALUATED:  # of other lengths
            return
        self._note_held(tick)
        if ran > 1:
            self.passes.pop()  # what was known a batch ago
        now = EvaluationPass(
            place=of.place,
            batches=count_batches(of.loader),
            ran=ran,
            requested_bytes=self._find_peak(),
            **self._growth.describe(),
        )
        self.passes.append(now.model_copy(update={"end_bytes": self._find_end(now)}))

    def _find_end(self, of: EvaluationPass) -> int | None:
        """The most requested at once in a whole pass; None where its end is not known."""
        ahead = _find_ahead(of, min(of.ran, self._calls))  # a batch may be fetched ahead
        if ahead is None:
            return None
        whole, joined = sum(ahead.values()), [each for each in of.grown if not each.tensors]
        # A tensor that is joined anew with each batch is there twice for a moment, as old and as new.
        again = [self._growth.held_bytes(each.holder) + ahead.get(each.holder, 0) - each.nbytes for each in joined]
        return max(of.requested_bytes + whole, self._find_live() + whole + max(again, default=0))

    def note_step(self) -> None:
        """The step after the passes is over: what the last one has kept may have been there throughout."""
        if not self.passes or not self.passes[-1].grown:
            return
        last = self.passes[-1]
        before = [self._growth.held_bytes(each.holder) for each in last.grown]
        self._note_held(self._tick)
        if all(self._growth.held_bytes(each.holder) >= held for each, held in zip(last.grown, before, strict=True)):
            ahead = _find_ahead(last, last.ran)
            if ahead is not None and last.end_bytes is not None:
                end = max(last.end_bytes, self._find_peak() + sum(ahead.values()))
                self.passes[-1] = last.model_copy(update={"end_bytes": end})

    def _note_held(self, tick: int) -> None:
        gc.collect()
        self._name_held()
        self._growth.note_made(self._find_sources())
        self._growth.note_round(Counter(each.nbytes for each in self._log.storages if each.birth > tick))


def _find_ahead(of: EvaluationPass, ran: int) -> dict[str, int] | None:
    """How many bytes the batches leave that come after so many, by owner; None where their number is not known."""
    found: dict[str, int] = {}
    growing = [(each.holder, each.nbytes, each.until) for each in of.grown] or [("", of.growth_bytes or 0, None)]
    for holder, nbytes, until in growing if of.growth_bytes else []:
        ends = [end for end in (of.batches, until) if end is not None]
        if not ends:
            return None
        found[holder] = nbytes * max(min(ends) - ran, 0)
    return found


def explain_evaluations(passes: Sequence[EvaluationPass]) -> Iterator[str]:
    """What is taken for granted of evaluations."""
    if passes:
        yield (
            f"the epoch was ended so that what follows it runs, and of each pass that follows the first {EVALUATED} "
            "batches ran, where their lengths vary the largest and the last as well; what a batch leaves, each batch "
            "to the last one leaves"
        )
