"""What a program keeps of each batch while it evaluates, and what the whole evaluation takes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fxmem.memory.generation import LEAST_COMPARED, LoopSteps, find_events
from fxmem.records.parts import EvaluationPass
from fxmem.records.profile import SourceLine
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.program.block_trace import BlockTrace
from fxmem.simulation.program.card_memory import CardMemory, RepeatedSteps
from fxmem.simulation.program.growth import GrowthLog
from fxmem.simulation.program.loader_watch import EVALUATED, MOST_EVALUATED, LoaderPass, count_batches
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
        trace: what the round asks of the allocator.
        memory: the card's; None for the CPU.
    """

    def __init__(
        self,
        log: StepLog,
        find_live: Callable[[], int],
        find_peak: Callable[[], int],
        holders: Holders,
        name_held: Callable[[], None],
        find_sources: Callable[[], Sequence[SourceLine | None]],
        trace: BlockTrace,
        memory: CardMemory | None,
    ) -> None:
        self._log, self._holders = log, holders
        self._find_live, self._find_peak = find_live, find_peak
        self._name_held, self._find_sources = name_held, find_sources
        self._trace, self._memory = trace, memory
        self._tick = self._calls = self._acts = 0
        self.passes: list[EvaluationPass] = []

    def note_call(self) -> None:
        """A model is called."""
        self._calls += 1

    def note_batch(self, of: LoaderPass, ran: int) -> bool:
        """A pass asks for its next batch. Say whether those that it has had tell what further ones are like.

        Args:
            of: the pass.
            ran: the batches that it has had.
        """
        tick, self._tick = self._tick, self._log.tick
        if ran == 0:
            self._steps = LoopSteps()
            _, self._acts = self._trace.since(0)
            self._growth, self._calls = GrowthLog(self._log, self._holders), 0
            self._is_known = False
            return False
        if self._is_known or ran > MOST_EVALUATED:  # of other lengths
            return True
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
        replayed = None if self._memory is None else self._replay(now, self._memory)
        self.passes.append(now.model_copy(update={"end_bytes": self._find_end(now), **(replayed or {})}))
        self._is_known = ran >= EVALUATED and (replayed is not None or not now.growth_bytes or self._memory is None)
        return self._is_known

    def _replay(self, of: EvaluationPass, memory: CardMemory) -> dict[str, int] | None:
        """The batches to the last one on the card; None where they do not yet ask for as many bytes more, each, as the
        one before."""
        memory.ask_cudnn()
        acts, self._acts = self._trace.since(self._acts)
        events = find_events(acts, memory.asked)
        if events is None:
            self._steps = LoopSteps()
            return None
        self._steps.add(of.ran, events, (), None, 0)
        even = self._steps.find_even(LEAST_COMPARED)
        if even is None or of.batches is None or of.ran < EVALUATED:
            return None
        over = min(of.ran, self._calls)  # a batch may be fetched ahead
        further = RepeatedSteps(even, of.batches - over)
        found = {"reserved_bytes": memory.try_steps(further).reserved}
        return found if further.done == further.periods else {**found, "full_at": over + further.done + 1}

    def _find_end(self, of: EvaluationPass) -> int | None:
        """The most requested at once in a whole pass; None where its end is not known."""
        ahead = _find_ahead(of, min(of.ran, self._calls))  # as in `_replay`
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
            f"to {MOST_EVALUATED} batches ran, where their lengths vary the largest and the last as well; what a batch "
            "leaves, each batch to the last one leaves"
        )
