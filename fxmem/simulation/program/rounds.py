"""The rounds and phases of a program, found while it runs.

Where a round ends is `RoundRule`'s. Within a round, forward lasts until a backward begins; what comes between a
backward and the next forward (clipping, unscaling, averaging) is the optimizer's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import AnalysisError
from fxmem.hardware.workspaces import Seen
from fxmem.memory.user_code import choose_line
from fxmem.records.names import STEPS
from fxmem.records.profile import Kind, PartOfRound, Phase, Profile, Round, SourceLine
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.card.card_memory import CardMemory, LiveBytes, Part, PartPeak
from fxmem.simulation.card.roots import Roots
from fxmem.simulation.code.round_rule import Enough, RoundRule, stepped_parameters
from fxmem.simulation.code.source_lines import program_place
from fxmem.simulation.program.refusals import Refusals
from fxmem.simulation.program.round_tracer import is_within_module
from fxmem.simulation.recording.observe.event_log import LOSS, OPTIMIZER
from fxmem.simulation.recording.observe.fx_tracer import CALLED_FROM, named_arguments
from fxmem.simulation.recording.observe.observer import PendingCall
from fxmem.simulation.recording.profile_builder import build_profile
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.recording.residents import (
    Holders,
    Place,
    Places,
    find_variables,
    name_modules,
    name_optimizer_state,
)
from fxmem.simulation.run.cycles import Cycles
from fxmem.simulation.run.evaluations import Evaluations
from fxmem.simulation.run.further_steps import FurtherSteps
from fxmem.simulation.run.growth import GrowthLog
from fxmem.simulation.run.host_memory import HostMeter
from fxmem.simulation.run.loader_watch import LoaderWatch
from fxmem.simulation.run.loops import LoopWatch
from fxmem.simulation.run.repeated_calls import RepeatedCalls
from fxmem.simulation.run.schedules import LaterWork

_ELSEWHERE: Final = 20
"""Steps of optimizers with nothing on the card after which a program is refused."""

_MOST_AFTER: Final = 20_000
"""Operators that may follow an epoch; a program whose steps have many may have four times as many as one of these."""

_MOST_SECONDS_AFTER: Final = 60.0
"""Time that it may take."""

_WORTH_GOING_ON: Final = 1 << 20
"""Bytes a step that more rounds are run for where they are kept on the host, whose size nobody has said."""

_MORE_IN_SETUP: Final = 5
"""As many times more operators than a round may set-up have."""

_NO_MODULE: Final = torch.nn.Module()
"""What a function is called in the place of."""


@dataclasses.dataclass(frozen=True)
class FinishedRound:
    """A round that is over."""

    record: Round
    sizes: Counter[int]
    """How often each number of bytes was allocated."""
    may_show_more: bool = False
    """Whether more is kept after each of the last ones, and another may show that it comes to an end; or whether
    batches have different lengths, and another may show what follows from them."""

    def repeats(self, before: FinishedRound) -> bool:
        """Whether it allocates nothing that the round before it did not, and leaves as much alive: the same, or less at
        no higher a peak, as where DeepSpeed's second step tells other ranks what it reads, and later ones do not."""
        ours, theirs = self.record, before.record
        is_less = self.sizes <= before.sizes and ours.requested_bytes <= theirs.requested_bytes
        return (is_less or self.sizes == before.sizes) and ours.retained_bytes == theirs.retained_bytes


IsEnough = Callable[[Sequence[FinishedRound]], bool]
"""Asked after each round, with all of them, whether the program has run long enough."""


@dataclasses.dataclass(frozen=True)
class ShownRound:
    """The round with the highest peak."""

    record: Round
    sizes: Counter[int]
    number: int
    """From 1; 0 for set-up."""
    profile: Profile


@dataclasses.dataclass(frozen=True)
class CutRound:
    """A round of too many operators, within which the program was ended."""

    is_setup: bool
    operators: int
    """How many it might have."""
    calls: str
    """The calls that most of these were made in; empty where no calls were."""
    place: str
    """The program's own line."""


class Rounds(RoundRule):
    """The rounds of one program.

    Args:
        roots: the program's modules.
        live: the bytes that it has alive.
        memory: the card's; None for the CPU.
        host: what measures the host's.
        trace: told where set-up and each round end.
        loaders: told where each round ends.
        enough: asked after each round, with all of them, whether the program has run long enough.
        max_operators: how many operators a round may have before the program is ended.
    """

    def __init__(
        self,
        roots: Roots,
        live: LiveBytes,
        memory: CardMemory | None,
        host: HostMeter,
        trace: BlockTrace,
        loaders: LoaderWatch,
        *,
        enough: IsEnough,
        max_operators: int,
    ) -> None:
        super().__init__()
        self._trace, self._loaders = trace, loaders
        self._roots = roots
        self._host = host
        self._host_holders = Holders(host.ledger.log)
        self.host_growth = GrowthLog(host.ledger.log, self._host_holders)
        self._live = live
        self._memory = memory
        self._enough = enough
        self._max_operators = max_operators
        self.setup: Round | None = None
        self.finished: list[FinishedRound] = []
        self.shown: ShownRound | None = None
        self.stepped_names: dict[str, None] = {}
        self.cut: CutRound | None = None
        """Where the program was ended within a round of too many operators."""
        self._ended_after = -1
        """How many rounds were finished when the program was last ended."""
        self.refusals = Refusals(memory)
        self._elsewhere = 0
        self._is_generating = False
        self.is_cut_after = False
        """Whether what follows the epoch was ended, as it had taken long."""
        self.has_evaluated = False
        """Whether a model was called after the epoch was ended."""
        self._part: Part = None
        self._arguments: Callable[[], Iterable[Place]] = list
        self._trained: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()

    def attach(self, recording: Recording) -> None:
        """Watch the program of this recording."""
        self._recording, self._log = recording, recording.log
        self._holders = Holders(recording.log)
        self.growth = GrowthLog(recording.log, self._holders)
        self.anew, self._optimizers_before = GrowthLog(recording.log, self._holders), 0
        """After the first step of each optimizer that was made since the step before: of each fold, each trial."""
        self.later = LaterWork()
        self._loops = LoopWatch(sys._getframe(1))
        self._further: FurtherSteps | None = None
        self.full_at: int | None = None
        """The round at which the card is full, where those after the last recorded one are like it."""
        self.repeats = RepeatedCalls(
            *(recording.log, self._memory, self._trace, recording.fakes, recording.device, self._note_hidden)
        )
        self.cycles = Cycles(lambda: self._live.now)
        self.evaluations = Evaluations(
            recording.log,
            lambda: self._live.now if self._memory is None else self._memory.stats().requested_bytes.current,
            lambda: self._find_peak()[0],
            self._holders,
            self._name_held,
            self.cycles.collect,
            self.repeats,
            self._max_operators,
        )
        self._loaders.on_evaluated = self.evaluations.note_batch

    # --- what the program does ----------------------------------------------------------------------------------------

    def module_called(self, module: torch.nn.Module) -> None:
        """A root is about to be called: forward or evaluation, if the phase was another."""
        self.end_long_round()
        if self._loaders.has_begun_again and not self.has_evaluated:
            self._end()  # nothing came between the epochs
        self.end_long_evaluation()
        if self._loaders.is_after and (self._loaders.has_another_pass or not module.training):
            self.has_evaluated = True
            self.evaluations.note_call()
        super().module_called(module)
        if self._is_generating:
            return
        if self._evaluates(module):
            self._enter(Phase.EVALUATION)
        else:
            self.begin_forward()
        if self._log.phase in (Phase.EVALUATION, Phase.FORWARD):
            self._begin_part(self._log.phase, self._roots.find_path(module) or "", is_forward=True)

    def run_module(self, call: PendingCall) -> Any:
        """The result of a call of a root. Where other ranks wait for what it sends, it runs."""
        if not self.repeats.is_on or self._recording.collectives.world is not None:
            result = call.run()
        else:
            result = self.repeats.run(call)
        self.refusals.end_call()
        return result

    def _note_hidden(self, op: int, most: Seen, whole: Seen) -> None:
        """A call was made of one like it: the profile has the most of its memory, the card all."""
        recording, logged = self._recording, self._log.ops[op]
        recording.collector.saw(op, most, logged.phase, logged.stream)
        recording.subject.on_hidden(op, whole, logged.phase)

    def _describe_calls(self) -> str:
        """The calls of one model at one line that made most of the round, in words; empty where none did."""
        tracer, calls, nodes = self._recording.tracer, Counter[str](), Counter[str]()
        for call in tracer.calls:
            if "." not in call.module:
                at = "" if call.source is None else f" at {call.source.place}"
                what = f"{call.module}{at}{'' if call.leads_to_gradients else ' without gradients'}"
                calls[what] += 1
                nodes[what] += call.last_node - call.first_node
        for what, count in nodes.most_common(1):
            if 2 * count > len(tracer.nodes):
                return f"{calls[what]:,} calls of {what}"
        return ""

    def end_long_round(self) -> None:
        """End the program where a round has too many operators, or set-up has, in which each weight has some."""
        most = self._max_operators * (_MORE_IN_SETUP if self._is_setup else 1)
        if len(self._log.ops) > most:
            self.cut = CutRound(self._is_setup, most, self._describe_calls(), program_place(sys._getframe()))
            self._end()

    def end_long_evaluation(self) -> None:
        """End the program where what follows its epoch has taken long."""
        if self._loaders.is_after and self.finished:
            most = max(_MOST_AFTER, 4 * self.finished[-1].record.operators) + self.evaluations.whole_operators
            seconds = _MOST_SECONDS_AFTER + self.evaluations.whole_seconds
            if len(self._log.ops) > most or self._loaders.seconds_after > seconds:
                self.is_cut_after = True
                self._end()

    def _begin_part(self, phase: Phase, model: str = "", *, is_forward: bool = False) -> None:
        """Let peaks be a part's own from here on."""
        part = phase, model, torch.is_grad_enabled() or not is_forward
        if self._memory is not None and part != self._part:
            self._part = part
            self._memory.begin_part(part)

    @contextlib.contextmanager
    def generating(self, module: torch.nn.Module, phase: Phase = Phase.ROLLOUT) -> Iterator[None]:
        """A model's `generate` runs inside, or what else an engine does in another phase."""
        before, is_generating = self._log.phase, self._is_generating
        if before is Phase.BACKWARD:
            yield
            return
        super().module_called(module)
        before = self._log.phase
        self._enter(phase)
        self._begin_part(phase, self._roots.find_path(module) or "", is_forward=True)
        self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = is_generating
            if self._log.phase is phase:
                self._enter(before)
                self._begin_part(before)

    @contextlib.contextmanager
    def holding(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Inside, these arguments of a call are what the program holds, too: no variable may have them."""
        self._arguments = lambda: named_arguments(module, args, kwargs)
        try:
            yield
        finally:
            self._arguments = list

    def function_called(self) -> None:
        """A compiled function is about to be called, within no module."""
        if self._in_step:
            return
        super().module_called(_NO_MODULE)
        if self._log.phase is not Phase.OPTIMIZER or torch.is_grad_enabled():
            self.begin_forward()

    def torch_called(self) -> None:
        """Torch is about to be called: where gradients are returned, perhaps first in another pass of their loop."""
        if self._backwards and not self._accumulates and self._loops.has_passed(sys._getframe(1)):
            self._is_setup = False
            super().module_called(_NO_MODULE)

    def mark(self, phase: Phase) -> None:
        """Begin a phase where the program says so."""
        self._is_setup = False
        self._log.set_phase(phase)
        self._recording.nodes.resume_call(OPTIMIZER if phase is Phase.OPTIMIZER else LOSS)

    def begin_forward(self) -> None:
        """Forward goes on after a backward or an evaluation: another micro-batch, another network."""
        if not self._in_step or torch.is_grad_enabled():
            self._enter(Phase.FORWARD)

    def _enter(self, phase: Phase) -> None:
        if self._log.phase not in (phase, Phase.BACKWARD):
            self._log.set_phase(phase)
            self._recording.nodes.resume_call(LOSS)
            self._recording.tracer.resume()

    def _evaluates(self, module: torch.nn.Module) -> bool:
        """Whether a call evaluates what is trained: not a teacher, not a frozen part."""
        if torch.is_grad_enabled() or module.training or self._in_step:
            return False
        if module not in self._trained:
            stepped = {id(each) for optimizer in self.optimizers for each in stepped_parameters(optimizer)}
            self._trained[module] = any(id(each) in stepped for each in module.parameters())
        return self._trained[module]

    @contextlib.contextmanager
    def observe_backward(self, roots: Sequence[Any], *, accumulates: bool, is_inner: bool) -> Iterator[None]:
        """What runs inside is a backward: a phase of its own, unless it is part of another."""
        log = self._log
        if not accumulates or log.phase is Phase.BACKWARD:
            yield
            if not accumulates and not is_inner:
                self.backward_ends(accumulates=False)
                self._loops.note_gradients(sys._getframe(1))
            return
        self.backward_begins()
        self.refusals.begin_backward()
        for root in roots:
            if isinstance(root, torch.Tensor):
                log.rename(root, "", Kind.OUTPUT)
        self._recording.nodes.end_of_forward()
        log.set_phase(Phase.BACKWARD)
        self._begin_part(Phase.BACKWARD)
        try:
            yield
            self.refusals.end_backward()
        finally:
            self.backward_ends()
            self._name_residents()
            log.set_phase(Phase.OPTIMIZER)
            self._begin_part(Phase.OPTIMIZER)
            self._recording.nodes.resume_call(OPTIMIZER)
            self._recording.tracer.pause()

    def progress(self) -> str:
        """Which round it is, its operators so far, and what ends it."""
        waiting = [type(each).__name__ for each in self._find_waiting()]
        awaited = "a backward" if self._log.phase is Phase.FORWARD or not waiting else f"a step of {', '.join(waiting)}"
        where = f"step {len(self.finished) + 1}"
        if self._is_setup:
            where, awaited = "set-up", "the first call of a module"
        if self._is_marked:
            awaited = "fxmem.mark_step()"
        return f"{where}, {len(self._log.ops):,} operators, waiting for {awaited}"

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._counts(optimizer):
            if self._log.phase is not Phase.OPTIMIZER:
                self._log.set_phase(Phase.OPTIMIZER)
                self._begin_part(Phase.OPTIMIZER)
            self._recording.nodes.resume_call(OPTIMIZER)
            self._recording.tracer.pause()

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._counts(optimizer):
            self.stepped_names.setdefault(type(optimizer).__name__)
            self._name_residents()
            return
        self._elsewhere += 1
        if self._elsewhere >= _ELSEWHERE and not self.finished and self._memory is not None:
            raise AnalysisError(
                f"expected a program that trains on the card; {_ELSEWHERE} optimizer steps are over and nothing is "
                f"there: it trains on the CPU as it was called. Tell it to use the card (--device cuda, "
                f".to('cuda')), or analyse it with --target cpu."
            )

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        # Where the CPU is the target, so are the real tensors of a model that was made before the recording; else
        # parameters of the host count where the card has worked for them.
        return any(
            self._memory is None
            or (torch_wrappers.is_fake(each) and (each.device.type != "cpu" or bool(self._log.ops)))
            for each in stepped_parameters(optimizer)
        )

    # --- the ends of set-up and rounds --------------------------------------------------------------------------------

    def _end_setup(self) -> None:
        self._trace.end_setup()
        if self._log.ops or self._log.tick > 1:
            self.setup = self._close(0, is_whole=False).record
            self._start()

    def _end_round(self) -> None:
        if self.has_evaluated:
            self.evaluations.note_step()
            self._end_after()
        self.refusals.end_step()
        self._loaders.end_round()
        self.finished.append(self._close(len(self.finished) + 1))
        is_enough = self._enough(self.finished)
        if is_enough:
            frame = sys._getframe(1)
            self._prove(self.growth, self._loops)
            self.host_growth.prove(
                frame, self._loops, [(find_variables, None)], {}, cycles_stay=not self.cycles.are_freed
            )
        self._look_further(is_last=is_enough)
        self._trace.end_round(keeps=self._loaders.keeps_steps)
        self._start()
        if is_enough and not self._loaders.end_epoch(len(self.finished)):
            self._end()

    def _look_further(self, *, is_last: bool) -> None:
        """Note a round of a program that grows; after the last, replay those to come."""
        if self._memory is None or not self.growth.nbytes:
            self._further = None
            return
        self._further = self._further or FurtherSteps(self._memory, self._trace)
        self._further.note_round(len(self.finished))
        if is_last and all(each.is_endless for each in self.growth.describe()["grown"]):
            self.full_at = self._further.find_full(len(self.finished), self.growth.nbytes)

    def _end_after(self) -> None:
        """End the program in what follows its epoch."""
        self.finish()
        self._start()
        self._end()

    def _end(self) -> None:
        """End the program."""
        self._ended_after = len(self.finished)
        raise Enough

    @property
    def was_ended(self) -> bool:
        """Whether the program was ended, and not by itself."""
        return self._ended_after >= 0

    @property
    def is_ended(self) -> bool:
        """Whether the program was ended, and has come no further: what it does since is on its way out."""
        return self._ended_after == len(self.finished)

    def finish(self) -> None:
        """End what is under way where the program itself has ended."""
        if self._log.ops and (not self.finished or any(storage.birth for storage in self._log.storages)):
            self.finished.append(self._close(len(self.finished) + 1, is_whole=False))

    def _close(self, number: int, *, is_whole: bool = True) -> FinishedRound:
        """End the log of the round with this number, 0 for set-up."""
        log = self._log
        log.end_phase()
        self._name_residents()
        sources = self._name_held()
        if all(span.phase is not Phase.BACKWARD for span in log.phases):
            self._recording.nodes.end_without_backward(self._live.tick)
        for index, place in self._live.made_at.items():
            log.storages[index].made_at = place
        sizes = Counter(storage.nbytes for storage in log.storages if storage.birth > 0)
        record = self._record().model_copy(update={"is_whole": is_whole})
        if number and self._memory is not None:
            self._memory.forget_history()
        # Rounds begin with what set-up leaves.
        if self._is_shown(record, sizes) if number else record.requested_bytes > self._live.now:
            self.shown = ShownRound(record, sizes, number, build_profile(self._recording))
        self.cycles.collect()
        self._host_holders.search([(find_variables, None)], {})
        backward = min((span.begin for span in log.phases if span.phase is Phase.BACKWARD), default=log.tick)
        if is_whole:
            self._loops.note_round(sys._getframe(1))
        for growth, of in ((self.growth, log), (self.host_growth, self._host.ledger.log)):
            growth.note_made(sources)
            if is_whole:
                made = [(each.nbytes, each.birth) for each in of.storages if each.birth > 0]
                forward = Counter(nbytes for nbytes, birth in made if birth < backward) if of is log else None
                growth.note_round(Counter(nbytes for nbytes, _ in made), forward)
        if is_whole and self.made_optimizers > self._optimizers_before:
            self._optimizers_before = self.made_optimizers
            self.anew.note_made(sources)
            self.anew.note_round(sizes)
            self._prove(self.anew)
        self.later.note_ran(number, [*sources, *(each.source for each in self._recording.tracer.calls)])
        if is_whole and number <= STEPS:
            self.later.search(sys._getframe(1))
        self._host.note_round(number)
        self._mark_kept_results()
        record = record.model_copy(update={"retained_bytes": self._live.now})
        is_worth_it = self._host.limit_bytes is not None or (self.host_growth.nbytes or 0) >= _WORTH_GOING_ON
        may_grow_on = self.growth.may_go_on or (is_worth_it and self.host_growth.may_go_on)
        return FinishedRound(record, sizes, is_whole and (may_grow_on or self._loaders.may_go_on))

    def _is_shown(self, record: Round, sizes: Counter[int]) -> bool:
        """Whether a round has the highest peak so far; of equals the later one, which is the steadier: in the first,
        optimizers make their state. One that allocates the same as the round shown is not looked at again."""
        if self.shown is None:
            return True
        highest = self.shown.record.requested_bytes
        return record.requested_bytes > highest or (record.requested_bytes == highest and sizes != self.shown.sizes)

    def _start(self) -> None:
        self._recording.begin()
        self._host.ledger.log.begin()
        self._live.clear_highest()
        if self._memory is not None:
            self._begin_part(Phase.FORWARD)
            self._memory.clear_highest()

    def _record(self) -> Round:
        log, live = self._log, self._live
        requested, most, parts = self._find_peak()
        phases = {part[0] for part, peak in parts.items() if part is not None and peak.requested == requested}
        phase, place, node = live.find_place(phases or {live.phase})  # cuDNN is asked when the round is over
        if phase is Phase.BACKWARD:  # else all of it is at the line that calls backward
            place = self._find_forward_place(node) or place
        spans = [span for span in log.phases if span.end > span.begin or span.last_op > span.first_op]
        return Round(
            requested_bytes=requested,
            allocated_bytes=most and most.allocated,
            reserved_bytes=most and most.reserved,
            phase=phase,
            place=place,
            operators=len(log.ops),
            phases=tuple(span.phase for span in spans),
            parts=_describe_parts(parts),
        )

    def _find_forward_place(self, node: int) -> str:
        """The line that a node of the round runs for, as `Peak` names it; empty for none."""
        tracer = self._recording.tracer
        if not 0 <= node < len(tracer.sources):
            return ""
        line = choose_line(node, (tracer.sources[node], tracer.nodes[node].meta.get(CALLED_FROM)), tracer.calls)
        return "" if line is None else line.place

    def _find_peak(self) -> tuple[int, PartPeak | None, dict[Part, PartPeak]]:
        """The most requested since the round began, and on a card the most of each count, of all and of each part."""
        if self._memory is None:
            return self._live.highest, None, {}
        self._memory.ask_cudnn()
        parts = self._memory.part_peaks()
        most = functools.reduce(PartPeak.at_least, parts.values())
        return most.requested, most, parts

    # --- whose a storage is -------------------------------------------------------------------------------------------

    def _name_residents(self) -> None:
        """Name what modules and optimizers keep, as far as the program has made it."""
        self._roots.adopt_moved()
        name_optimizer_state(self._log, list(self.optimizers), name_modules(self._log, self._roots))

    def _name_held(self) -> Sequence[SourceLine | None]:
        """Name what else the program keeps: what it calls it, or the line that made it. Return the lines of the round's
        nodes."""
        recording, log = self._recording, self._log
        for index in self._holders.search(self._places(), self._find_saved()):
            node = log.storages[index].node
            if node is not None and node >= 0:
                log.storages[index].holder = recording.tracer.describe_node(node)
        sources: Sequence[SourceLine | None] = recording.tracer.sources
        return sources

    def _prove(self, growth: GrowthLog, loops: LoopWatch | None = None) -> None:
        cycles_stay = not self.cycles.are_freed
        growth.prove(sys._getframe(1), loops, self._places(), self._find_saved(), cycles_stay=cycles_stay)

    def _places(self) -> Places:
        return (self._arguments, Kind.INPUT), (find_variables, None)

    def _mark_kept_results(self) -> None:
        """What a module returned and the program keeps is an output in the next round, too."""
        log, nodes = self._log, self._recording.tracer.nodes
        saved = self._find_saved()
        for index in log.alive():
            storage = log.storages[index]
            is_plain = storage.kind in (None, Kind.SAVED) and index not in saved and storage.held_kind is None
            is_plain = is_plain and index not in log.communication  # a bucket of gradients, made within a forward
            node = storage.node if is_plain and storage.birth else None
            if node is not None and 0 <= node < len(nodes) and is_within_module(nodes[node]):
                storage.kind = Kind.OUTPUT

    def _find_saved(self) -> dict[int, int]:
        """By storage that autograd keeps, the number of its node."""
        return self._recording.nodes.find_kept(self._recording.engine.find_saved())


def _describe_parts(parts: Mapping[Part, PartPeak]) -> tuple[PartOfRound, ...]:
    """The parts of a round that does more than a plain step: it generates, or runs a model without gradients."""
    named = {part: peak for part, peak in parts.items() if part is not None}
    if all(gradients and phase not in (Phase.ROLLOUT, Phase.SYNC) for phase, _, gradients in named):
        return ()
    return tuple(
        PartOfRound(
            phase=phase,
            model=model,
            with_gradients=gradients,
            requested_bytes=peak.requested,
            allocated_bytes=peak.allocated,
            reserved_bytes=peak.reserved,
        )
        for (phase, model, gradients), peak in named.items()
    )
