"""What a program keeps of each batch while it evaluates, and what the whole evaluation takes."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import modules as torch_modules
from fxmem.hardware.hidden_memory import Events, HiddenEvent, HiddenMemory, alloc, free, output
from fxmem.hardware.workspaces import Seen
from fxmem.memory.generation import LEAST_COMPARED, LoopEvent, LoopSteps, find_events
from fxmem.records.parts import EvaluationPass
from fxmem.simulation.card.card_memory import CardMemory, RepeatedSteps
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.code.source_lines import is_own_code
from fxmem.simulation.recording.observe.event_log import LoggedStorage, StepLog
from fxmem.simulation.recording.observe.observer import PendingCall
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.growth import GrowthLog
from fxmem.simulation.run.loader_watch import LoaderPass, count_batches
from fxmem.simulation.run.owner_names import Cycles, OwnerNames

# --- calls of a model that are alike, while a whole evaluation runs: one runs, the others are made of it --------------
# What a call asks of the card's allocator, in order, and what it returns follow from its arguments' layouts for as
# long as it leaves nothing but its result, and under autocast the casts of weights that are kept to its end: then a
# further call is one operator, which makes tensors like those and passes through the memory that the first took
# meanwhile. What the model's Python does beside that is not done again. A call of which anything else stays, or is
# freed, runs each time; so does one of a model with a hook of the user's.


class _Made(NamedTuple):
    """A tensor that a call returns: which of its storages it lies in, and how."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Given(NamedTuple):
    """A tensor among the arguments, counted as they come."""

    position: int


class _Call(NamedTuple):
    """A call that ran."""

    leaves: list[Any]
    """Of its result: `_Made`, `_Given`, or the value itself."""
    structure: Any
    storages: dict[int, LoggedStorage]
    """Of its result and its casts, in the order in which they were allocated."""
    casts: tuple[int, ...]
    """Of these, those that autocast keeps."""
    whole: Seen
    """What it allocates and frees."""
    most: Seen
    """The same, summed up."""
    flops: int | None
    moved_bytes: int


class RepeatedCalls:
    """The calls of models within one pass over a loader.

    Args:
        recording: of the program.
        machine: that it runs on; on the CPU each call runs.
    """

    def __init__(self, recording: Recording, machine: PretendedMachine) -> None:
        self._recording, self._log = recording, recording.log
        self._memory, self._trace = machine.memory, machine.trace
        self._mode, self._device = recording.fakes, recording.device
        self._maker = torch_fakes.Maker(self._mode)
        self.is_on = False
        """Whether calls that are alike are made of the first."""
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, _Call | None]] = weakref.WeakKeyDictionary()
        self._casts: list[torch.Tensor] = []
        """What autocast would keep of calls that were made."""
        self._has_cast = False
        """Whether a model was called since autocast kept nothing."""

    def clear_casts(self, original: Callable[[], None]) -> None:
        """`torch.clear_autocast_cache`."""
        original()
        self._has_cast = False
        while self._casts:
            del self._casts[0]

    def begin(self) -> None:
        """From here on, until `is_on` is no longer, calls are made of the first like them."""
        self.is_on, self._known = self._memory is not None, weakref.WeakKeyDictionary()

    def run(self, call: PendingCall) -> Any:
        """What a call of a model returns, which ran or was made, as one node of the graph. Where other ranks wait for
        what it sends, it runs."""
        if not self.is_on or self._recording.collectives.world is not None:
            return call.run()
        module = call.module
        leaves, structure = torch_common.tree_flatten((call.args, call.kwargs))
        key: list[Any] = [repr(structure), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]
        key += torch.is_inference_mode_enabled(), module.training, self._has_cast
        self._has_cast = torch.is_autocast_enabled("cuda")
        tensors: list[torch.Tensor] = []
        if torch.is_grad_enabled() or not torch_fakes.describe(leaves, self._mode, None, key, tensors):
            return call.run()
        known = self._known.setdefault(module, {})
        looks = tuple(key)
        if looks not in known:
            known[looks] = None
            if _has_own_hooks(module):
                return call.run()
            result, known[looks] = self._watch(type(module).__name__, call.run, tensors)
            return result
        like = known[looks]
        if like is not None and any(like.storages[each].death is None for each in like.casts):
            like = known[looks] = None
        return call.run() if like is None else call.as_node(lambda: self._make(like, tensors))

    def _watch(self, name: str, run: Callable[[], Any], tensors: list[torch.Tensor]) -> tuple[Any, _Call | None]:
        """Run a call; its result, and how to make one like it, None where that cannot be said."""
        log, ops, memory = self._log, self._log.ops, self._memory
        assert memory is not None
        _, acts = self._trace.since(0)
        first, stream = len(ops), log.streams.current
        result = run()
        memory.ask_cudnn()
        events = find_events(self._trace.since(acts)[0], memory.asked)
        if events is None or ops is not log.ops or any(each.stream != stream for each in events if each.nbytes):
            return result, None
        leaves, structure = torch_common.tree_flatten(result)
        made = [self._describe(each, tensors) for each in leaves]
        kept = {each.storage for each in made if isinstance(each, _Made)}
        alive = {each.key for each in events if each.nbytes is not None} - {e.key for e in events if e.nbytes is None}
        casts = tuple(each for each in alive - kept if isinstance(each, int)) if self._has_cast else ()
        kept.update(casts)
        hidden = _find_hidden(events, kept)
        if hidden is None or not kept or any(each is NotImplemented for each in made):
            return result, None
        order = [each.key for each in events if each.nbytes is not None and each.key in kept]
        storages = {index: log.storages[index] for index in order if isinstance(index, int)}
        ran = ops[first:]
        flops = None if any(op.flops is None for op in ran) else sum(op.flops or 0 for op in ran)
        sizes = [each.nbytes for each in storages.values()]
        whole, most = (
            Seen(name, multiplies=False, multiplies_lt=False, memory=HiddenMemory(events=each))
            for each in (hidden, _sum_up(hidden, sizes))
        )
        return result, _Call(made, structure, storages, casts, whole, most, flops, sum(op.moved_bytes for op in ran))

    def _describe(self, leaf: Any, tensors: list[torch.Tensor]) -> Any:
        """How to make what a call returns; NotImplemented where that cannot be said."""
        if not isinstance(leaf, torch.Tensor):
            return leaf if leaf is None or type(leaf) in (bool, int, float, str) else NotImplemented
        given = next((position for position, each in enumerate(tensors) if each is leaf), None)
        if given is not None:
            return _Given(given)
        index = self._log.find_storage(leaf) if type(leaf) is torch_common.FakeTensor else None
        if index is None or leaf.requires_grad:
            return NotImplemented
        return _Made(index, tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()), leaf.dtype)

    def _note_hidden(self, op: int, call: _Call) -> None:
        """A call was made of this one: the profile has the most of its memory, the card all."""
        logged = self._log.ops[op]
        self._recording.collector.note_seen(op, call.most, logged.phase, logged.stream)
        self._recording.subject.on_hidden(op, call.whole, logged.phase)

    def _make(self, call: _Call, tensors: list[torch.Tensor]) -> Any:
        """What a call like this one returns, as one operator makes it."""
        log, begin, first = self._log, self._log.tick, len(self._log.storages)
        bases: dict[int, torch.Tensor] = {}
        for index, like in call.storages.items():
            bases[index] = self._maker.empty((like.nbytes,), (1,), torch.uint8, self._device)
            log.enter(bases[index].untyped_storage(), like.nbytes, like.shape, like.dtype)
        op = log.note_op(call.whole.name, begin, call.flops, call.moved_bytes)
        try:
            self._note_hidden(op, call)
        except torch.cuda.OutOfMemoryError:
            log.discard(first)
            raise
        self._casts += [bases[each] for each in call.casts]
        made: dict[_Made, torch.Tensor] = {}

        def make(leaf: Any) -> Any:
            if isinstance(leaf, _Given):
                return tensors[leaf.position]
            if isinstance(leaf, _Made):
                if leaf not in made:
                    made[leaf] = self._maker.view(bases[leaf.storage], *leaf[1:], self._device)
                return made[leaf]
            return leaf

        return torch_common.tree_unflatten(map(make, call.leaves), call.structure)


def _has_own_hooks(module: torch.nn.Module) -> bool:
    return any(is_own_code(hook) for each in module.modules() for hook in torch_modules.forward_hooks(each))


def _find_hidden(events: list[LoopEvent], kept: set[int]) -> Events | None:
    """What a call allocates and frees, its result as outputs; None where something else of it stays, or something that
    was there is freed."""
    alive: dict[Any, str] = {}
    found: list[HiddenEvent] = []
    for key, nbytes, _ in events:
        if nbytes is None:
            if key not in alive or key in kept:
                return None
            found += free(alive.pop(key))
        else:
            alive[key] = str(len(found))
            found.append(output("result") if key in kept else alloc(alive[key], nbytes))
    return tuple(found) if alive.keys() == kept else None


def _sum_up(events: Events, results: list[int]) -> Events:
    """The most that a call has for itself at once, as one allocation around its result.

    Args:
        events: of the call.
        results: the bytes of each storage of its result, in order.
    """
    own: dict[str, int] = {}
    made = now = most = 0
    for event in events:
        if event.action == "free":
            now -= own.pop(event.name)
        elif event.action == "alloc":
            own[event.name] = event.nbytes or 0
            now += own[event.name]
        else:
            now += results[made]
            made += 1
        most = max(most, now)
    rest = most - sum(results)
    return (alloc("temporaries", rest), *(output("result") for _ in results)) if rest else ()


# --- what a program keeps of each batch while it evaluates, and what the whole evaluation takes -----------------------


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
    """The passes that follow an epoch.

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

    def note_call(self) -> None:
        """A model is called."""
        self.have_begun = True
        self._calls += 1

    def note_batch(self, of: LoaderPass, ran: int) -> bool:
        """A pass asks for its next batch. Say whether it gets it: the first ones tell what further ones are like, and
        where something is kept of each, all run if that is soon done.

        Args:
            of: the pass.
            ran: the batches that it has had.
        """
        tick, self._tick = self._tick, self._log.tick
        if ran == 0:
            self._steps = LoopSteps()
            _, self._acts = self._trace.since(0)
            self._growth, self._calls = GrowthLog(self._log, self._owners.holders), 0
            self._is_known, self._until, self._repeats.is_on = False, 0.0, False
            return True
        if self._until:
            return self._note_further(ran, tick)
        if self._is_known or ran > MOST_EVALUATED:  # of other lengths
            return False
        self._note_held(tick)
        if ran > 1:
            self.passes.pop()  # what was known a batch ago
        now = EvaluationPass(
            place=of.place,
            batches=count_batches(of.loader),
            ran=ran,
            requested_bytes=self._machine.find_peak()[0],
            **self._growth.describe(),
        )
        replayed = None if self._memory is None else self._replay(now, self._memory)
        now = now.model_copy(update={"end_bytes": self._find_end(now), **(replayed or {})})
        self.passes.append(now)
        self._is_known = ran >= EVALUATED and (replayed is not None or not now.growth_bytes or self._memory is None)
        if ran < EVALUATED or (not self._is_known and ran < MOST_EVALUATED):
            return True
        return self._begin_whole(now)

    def _begin_whole(self, of: EvaluationPass) -> bool:
        """Let the other batches run where more is kept after each, and the card has room for it."""
        if not of.growth_bytes or of.batches is None:
            return False
        most = None if self._memory is None or not self._memory.raises else self._memory.usable_bytes
        if most is not None and (of.end_bytes is None or of.find_full(most) is not None):
            return False
        self._repeats.begin()
        self._first, self._until = of.ran, time.monotonic() + 2 * MOST_SECONDS
        self.whole_seconds += 2 * MOST_SECONDS
        return True

    def _note_further(self, ran: int, tick: int) -> bool:
        """Another batch of a pass that is run whole is over. Say whether the next one runs, too."""
        last, now = self.passes[-1], (time.monotonic(), len(self._log.ops))
        left, goes_on = (last.batches or 0) - ran, now[0] < self._until
        if ran == self._first + 1:
            self._timed = now
        elif ran == self._first + _TIMED:
            seconds, operators = (round(left * (b - a) / (_TIMED - 1)) for a, b in zip(self._timed, now, strict=True))
            goes_on = seconds <= MOST_SECONDS and now[1] + operators <= self._most_operators
            self.whole_operators += operators
        if left == 0 or not goes_on:
            self._note_held(tick)
        last = last.model_copy(update={"ran": ran, "requested_bytes": self._machine.find_peak()[0]})
        last = last.model_copy(update={"end_bytes": self._find_end(last)})
        if goes_on and left < 2:  # who knows the number asks for no batch after the last one
            last = last.model_copy(update={"ran": last.batches, "reserved_bytes": None, "full_at": None})
        self.passes[-1] = last
        self._repeats.is_on = goes_on and left > 0
        return goes_on

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
        self._note_held(self._tick)
        if all(self._growth.held_bytes(each.holder) >= held for each, held in zip(last.grown, before, strict=True)):
            ahead = _find_ahead(last, last.ran)
            if ahead is not None and last.end_bytes is not None:
                end = max(last.end_bytes, self._machine.find_peak()[0] + sum(ahead.values()))
                self.passes[-1] = last.model_copy(update={"end_bytes": end})

    def _note_held(self, tick: int) -> None:
        self._cycles.collect()
        self._growth.note_made(self._owners.name_held())
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
            f"the epoch was ended so that what follows it runs. Of a pass that follows, the first {EVALUATED} to "
            f"{MOST_EVALUATED} batches ran, where their lengths vary the largest and the last as well; where something "
            f"is kept of each, all that take at most {MOST_SECONDS:.0f} s and for which the card has room, with calls "
            "of a model that are alike made of one that ran; else what a batch leaves, each batch to the last one "
            "leaves"
        )
