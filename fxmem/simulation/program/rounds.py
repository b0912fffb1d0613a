"""The rounds and phases of a program, found while it runs.

Where a round ends is `RoundRule`'s. Within a round, forward lasts until a backward begins; what comes between a
backward and the next forward (clipping, unscaling, averaging) is the optimizer's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import AnalysisError, linked_errors
from fxmem.memory.figures import choose_line
from fxmem.records.profile import Kind, PartOfRound, Phase, Profile, RefusedRequests, Round
from fxmem.simulation.card.card_memory import CardMemory, Part, PartPeak, describe_shortage
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.code.round_rule import Enough, RoundRule, stepped_parameters
from fxmem.simulation.code.source_lines import program_place
from fxmem.simulation.program.round_tracer import is_within_module
from fxmem.simulation.recording.observe.event_log import LOSS, OPTIMIZER
from fxmem.simulation.recording.observe.fx_tracer import CALLED_FROM
from fxmem.simulation.recording.profile_builder import build_profile
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.loops import LoopWatch
from fxmem.simulation.run.owner_names import OwnerNames
from fxmem.simulation.run.round_listener import RoundListener, RoundOver

# --- the requests that a program's card refused: which of them ended it, and which it caught and went on from ---------


class Refusals:
    """Follows whether a program goes on from a refused request.

    It does where a step runs through after the last one: a backward that ended, then the step of an optimizer. Of a
    program without a backward a call of a module is enough.

    Args:
        memory: the card's; None for the CPU, which refuses nothing.
    """

    def __init__(self, memory: CardMemory | None) -> None:
        self._memory = memory
        self._outlived = 0
        """How many refused requests a step ran through after."""
        self._before: int | None = None
        """How many there were when a backward ended last; None before any began."""

    @property
    def _refused(self) -> tuple[tuple[str, str], ...]:
        return () if self._memory is None else self._memory.refused

    def begin_backward(self) -> None:
        """A backward begins: it trains."""
        self._before = self._before or 0

    def end_backward(self) -> None:
        """A backward has ended."""
        self._before = len(self._refused)

    def end_call(self) -> None:
        """A call of a module has ended."""
        if self._before is None:
            self._outlived = len(self._refused)

    def end_step(self) -> None:
        """A step has ended."""
        if self._before == len(self._refused):
            self._outlived = self._before

    def find_cause(self, error: BaseException) -> tuple[str, str] | None:
        """The refused request that an error of the program comes of, as torch's message and the line; None for none.

        That is its own error, one that was raised from it or while it was handled, or that the program leaves after it.
        """
        if len(self._refused) == self._outlived:
            return None
        texts = [str(each) for each in linked_errors(error)]
        found = (each for each in reversed(self._refused) if any(each[0] in text for text in texts))
        return next(found, self._refused[-1] if isinstance(error, SystemExit) else None)

    def record(self, *, has_ended: bool) -> RefusedRequests | None:
        """What the program caught; None for nothing. `has_ended`: the error of the last request ended it."""
        caught = self._refused[: -1 if has_ended else None]
        if not caught:
            return None
        is_outlived = self._outlived >= len(caught)
        return RefusedRequests(count=len(caught), last=describe_shortage(*caught[-1]), is_outlived=is_outlived)


# --- rounds, and the phases within them -------------------------------------------------------------------------------


_ELSEWHERE: Final = 20
"""Steps of optimizers with nothing on the card after which a program is refused."""

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
        recording: of the program.
        machine: that it runs on.
        owners: of its storages.
        loops: around its steps.
        listeners: told of each round.
        enough: asked after each round, with all of them, whether the program has run long enough.
        max_operators: how many operators a round may have before the program is ended.
    """

    def __init__(
        self,
        recording: Recording,
        machine: PretendedMachine,
        owners: OwnerNames,
        loops: LoopWatch,
        listeners: Sequence[RoundListener],
        *,
        enough: IsEnough,
        max_operators: int,
    ) -> None:
        super().__init__(compiles=recording.compilation.compiles)
        self._recording, self._log, self._machine = recording, recording.log, machine
        self._roots, self._live, self._memory = machine.roots, machine.live, machine.memory
        self._owners, self._loops = owners, loops
        self._listeners = listeners
        self._enough, self._max_operators = enough, max_operators
        self.setup: Round | None = None
        self.finished: list[FinishedRound] = []
        self.shown: ShownRound | None = None
        self.stepped_names: dict[str, None] = {}
        self.cut: CutRound | None = None
        """Where the program was ended within a round of too many operators."""
        self.is_cut_after = False
        """Whether what follows the epoch was ended, as it had taken long."""
        self.has_raised = False
        """Whether the program was ended by an error."""
        self._ended_after = -1
        """How many rounds were finished when the program was last ended."""
        self.refusals = Refusals(machine.memory)
        self._elsewhere = 0
        self._is_generating = False
        self._part: Part = None
        self._trained: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()

    # --- what the program does ----------------------------------------------------------------------------------------

    def module_called(self, module: torch.nn.Module) -> None:
        """A root is about to be called: forward or evaluation, if the phase was another."""
        self._end_long_round()
        if any(each.ends_before(module) for each in self._listeners):
            self._end()
        self._end_what_takes_long()
        for each in self._listeners:
            each.begin_call(module)
        super().module_called(module)
        if self._is_generating:
            return
        if self._evaluates(module):
            self._enter(Phase.EVALUATION)
        else:
            self.begin_forward()
        if self._log.phase in (Phase.EVALUATION, Phase.FORWARD):
            self._begin_part(self._log.phase, self._roots.find_path(module) or "", is_forward=True)

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

    def _end_long_round(self) -> None:
        """End the program where a round has too many operators, or set-up has, in which each weight has some."""
        most = self._max_operators * (_MORE_IN_SETUP if self._is_setup else 1)
        if len(self._log.ops) > most:
            self.cut = CutRound(self._is_setup, most, self._describe_calls(), program_place(sys._getframe()))
            self._end()

    def _end_what_takes_long(self) -> None:
        """End the program where a listener says so."""
        if any(each.takes_long(len(self._log.ops)) for each in self._listeners):
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
    def saving(self, place: str) -> Iterator[None]:
        """What the program trains is saved inside, at a place of its own."""
        before = self._log.phase
        if before in (Phase.BACKWARD, Phase.SAVE) or self._in_step:
            yield
            return
        self._enter(Phase.SAVE)
        self._begin_part(Phase.SAVE, place)
        try:
            yield
        finally:
            if self._log.phase is Phase.SAVE:
                self._log.set_phase(before)
                self._begin_part(before)
                if before is Phase.OPTIMIZER:
                    self._enter_optimizer()

    def function_called(self) -> None:
        """A compiled function is about to be called, within no module."""
        if self._in_step:
            return
        super().module_called(_NO_MODULE)
        if self._log.phase is not Phase.OPTIMIZER or torch.is_grad_enabled():
            self.begin_forward()

    def torch_called(self) -> None:
        """Torch is about to be called: where gradients are returned, perhaps first in another pass of their loop."""
        if self.cut or self.is_cut_after:  # closing the round calls torch, too
            return
        self._end_long_round()
        self._end_what_takes_long()
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
            self._owners.name_residents(self.optimizers)
            self._enter_optimizer()

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
            self._enter_optimizer()

    def _enter_optimizer(self) -> None:
        if self._log.phase is not Phase.OPTIMIZER:
            self._log.set_phase(Phase.OPTIMIZER)
            self._begin_part(Phase.OPTIMIZER)
        self._recording.nodes.resume_call(OPTIMIZER)
        self._recording.tracer.pause()

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._counts(optimizer):
            self.stepped_names.setdefault(type(optimizer).__name__)
            self._owners.name_residents(self.optimizers)
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

    def _note_optimizer(self) -> None:
        for each in self._listeners:
            each.note_optimizer()

    def _end_setup(self) -> None:
        self._machine.trace.end_setup()
        if self._log.ops or self._log.tick > 1:
            self.setup = self._close(0, is_whole=False).record
            self._start()

    def _end_round(self) -> None:
        ends = [each.end_step() for each in self._listeners]
        if any(ends):
            self.finish()
            self._start()
            if any(each.goes_beyond() for each in self._listeners):
                return
            self._end()
        self.refusals.end_step()
        self.finished.append(self._close(len(self.finished) + 1))
        number, is_enough = len(self.finished), self._enough(self.finished)
        if is_enough:
            for each in self._listeners:
                each.note_last(number)
        self._machine.trace.end_round(keeps=any(each.keeps_acts for each in self._listeners))
        self._start()
        if is_enough and not any(each.goes_on(number) for each in self._listeners):
            self._end()

    def _end(self) -> None:
        """End the program."""
        self._ended_after = len(self.finished)
        raise Enough

    @property
    def infers(self) -> bool:
        """Whether the program has trained nothing so far, and has made nothing that would."""
        return not (self.finished or self._backwards or self.optimizers)

    @property
    def was_ended(self) -> bool:
        """Whether the program was ended, and not by itself."""
        return self._ended_after >= 0

    @property
    def is_ended(self) -> bool:
        """Whether the program was ended, and has come no further: what it does since is on its way out."""
        return self._ended_after == len(self.finished)

    def finish(self, *, is_over: bool = False) -> None:
        """End what is under way where the program has ended, at its own end or not."""
        if self._log.ops and (not self.finished or any(storage.birth for storage in self._log.storages)):
            self.finished.append(
                self._close(len(self.finished) + 1, is_whole=False, is_over=is_over and not self.has_raised)
            )

    def _close(self, number: int, *, is_whole: bool = True, is_over: bool = False) -> FinishedRound:
        """End the log of the round with this number, 0 for set-up."""
        log = self._log
        log.end_phase()
        self._owners.name_residents(self.optimizers)
        lines = self._owners.name_held()
        if all(span.phase is not Phase.BACKWARD for span in log.phases):
            self._recording.nodes.end_without_backward(self._live.tick)
        for index, place in self._live.made_at.items():
            log.storages[index].made_at = place
        made = [(each.nbytes, each.birth) for each in log.storages if each.birth > 0]
        sizes = Counter(nbytes for nbytes, _ in made)
        record = self._record().model_copy(update={"is_whole": is_whole})
        if number and self._memory is not None:
            self._memory.forget_history()
        # Rounds begin with what set-up leaves.
        if self._is_shown(record, sizes) if number else record.requested_bytes > self._live.now:
            self.shown = ShownRound(record, sizes, number, build_profile(self._recording))
        backward = min((span.begin for span in log.phases if span.phase is Phase.BACKWARD), default=log.tick)
        forward_sizes = Counter(nbytes for nbytes, birth in made if birth < backward)
        calls = [each.source for each in self._recording.tracer.calls]
        for listener in self._listeners:
            listener.note_round(RoundOver(number, is_whole, is_over, record, sizes, forward_sizes, lines, calls))
        self._mark_kept_results()
        record = record.model_copy(update={"retained_bytes": self._live.now})
        may_show_more = is_whole and any(each.may_show_more for each in self._listeners)
        return FinishedRound(record, sizes, may_show_more)

    def _is_shown(self, record: Round, sizes: Counter[int]) -> bool:
        """Whether a round has the highest peak so far; of equals the later one, which is the steadier: in the first,
        optimizers make their state; what is no whole step only where it is higher. One that allocates the same as the
        round shown is not looked at again."""
        if self.shown is None:
            return True
        highest = self.shown.record.requested_bytes
        is_other = sizes != self.shown.sizes and (record.is_whole or not self.shown.record.is_whole)
        return record.requested_bytes > highest or (record.requested_bytes == highest and is_other)

    def _start(self) -> None:
        self._recording.begin()
        self._machine.border.host.log.begin()
        self._live.clear_highest()
        if self._memory is not None:
            self._begin_part(Phase.FORWARD)
            self._memory.clear_highest()

    def _record(self) -> Round:
        log, live = self._log, self._live
        requested, most, parts = self._machine.find_peak()
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

    def _mark_kept_results(self) -> None:
        """What a module returned and the program keeps is an output in the next round, too."""
        log, nodes = self._log, self._recording.tracer.nodes
        saved = self._owners.find_saved()
        for index in log.alive():
            storage = log.storages[index]
            is_plain = storage.kind in (None, Kind.SAVED) and index not in saved and storage.held_kind is None
            is_plain = is_plain and not storage.is_communicated  # a bucket of gradients, made within a forward
            node = storage.node if is_plain and storage.birth else None
            if node is not None and 0 <= node < len(nodes) and is_within_module(nodes[node]):
                storage.kind = Kind.OUTPUT


def _describe_parts(parts: Mapping[Part, PartPeak]) -> tuple[PartOfRound, ...]:
    """The parts of a round that does more than a plain step: it generates, or runs a model without gradients."""
    named = {part: peak for part, peak in parts.items() if part is not None}
    if all(gradients and phase not in (Phase.ROLLOUT, Phase.SYNC) for phase, _, gradients in named):
        named = {part: peak for part, peak in named.items() if part[0] is Phase.SAVE}
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
