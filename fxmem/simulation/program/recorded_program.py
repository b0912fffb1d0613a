"""`fxmem.record` and its result: any code as a step, on a card that is not there."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import room_bytes
from fxmem.memory.allocator import CardRun, complete_timeline
from fxmem.records.parts import CompileRecord, CompileSettings, HostUse
from fxmem.records.profile import (
    MadeUp,
    Phase,
    Profile,
    ProgramFiles,
    ProgramRun,
    RefusedRequests,
    Round,
    Target,
    Timeline,
)
from fxmem.records.units import AS_IS, MAX_OPERATORS, format_bytes
from fxmem.simulation.card.card_memory import describe_shortage
from fxmem.simulation.card.machine import make_machine
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.code.round_rule import Enough
from fxmem.simulation.code.source_lines import error_place
from fxmem.simulation.processes.fork import one_at_a_time
from fxmem.simulation.processes.process_guard import postpone_interrupts
from fxmem.simulation.processes.sandbox.isolation import Isolation, IsolationSettings, isolate_block
from fxmem.simulation.program.recorded_code import RecordedCode
from fxmem.simulation.program.rounds import FinishedRound
from fxmem.simulation.program.watch import RunSettings, make_watch
from fxmem.simulation.ranks.mailbox import World
from fxmem.simulation.recording.error_advice import describe_end
from fxmem.simulation.recording.wiring import make_recording
from fxmem.simulation.run.host_memory import measure_dynamo
from fxmem.simulation.step.model_step import require_device

_TO_ITS_END: Final = "ran to its end"


class RecordedProgram(ProfiledStep):
    """What a program did on a pretended card: a profile of its largest round, and figures of all.

    Filled while the block of `fxmem.record` runs; to be read after it.
    """

    def __init__(self, code: RecordedCode) -> None:
        self._code = code
        self.ending = _TO_ITS_END
        """How the program ended, in words."""
        self._has_raised = False
        self._shortage = ""
        self._compiled: CompileRecord | None = None
        self.files: ProgramFiles | None = None
        """What the block wrote, which is dropped; None where it wrote nothing, or for real."""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at every moment of the largest round; its peak says whether the program fits."""
        memory, shown = self._code.memory, self._code.rounds.shown
        wanted = None if memory is None or not self._refusal else memory.wanted
        allocated, reserved = wanted or (0, 0)
        if shown is not None and not shown.record.is_whole:
            allocated = max(allocated, shown.record.allocated_bytes or 0)
        rounds = (self.setup, *self.rounds)
        reserved = max([reserved, *(each.reserved_bytes or 0 for each in rounds if each is not None)])
        longest = self.program.longest
        passes = [each for each in self.program.evaluations if each.growth_bytes]
        ends = [max(each.end_bytes or 0, each.reserved_bytes or 0) for each in passes]
        reserved = max([reserved, *ends, 0 if longest is None else longest.reserved_bytes or 0])
        plans = 0 if memory is None else memory.smaller_plans
        run = CardRun(allocated, reserved, self.shortage, wanted is not None, plans)
        return complete_timeline(self.profile, self.environ, run)

    @property
    def environ(self) -> Mapping[str, str]:  # type: ignore[override]
        """Contains the allocator's settings, which the program may have set."""
        return os.environ if self._code.memory is None else self._code.memory.environ

    @property
    def shortage(self) -> str:
        """What the card had no memory for, and where: what ended the program, or with `out_of_memory="continue"` the
        first such request. Empty where there was none."""
        memory = self._code.memory
        longest = self.program.longest
        later = "" if longest is None or longest.full_at is None else f"It runs out at step {longest.full_at:,}"
        later = self._find_full_evaluation() or later
        return self._refusal or ("" if memory is None else memory.shortage) or later

    @property
    def _refusal(self) -> str:
        """The refused request that ended the program, or after which nothing ran through; empty for none."""
        caught = self._refused
        return self._shortage or ("" if caught is None or caught.is_outlived else caught.last)

    @property
    def _refused(self) -> RefusedRequests | None:
        """The requests that the card refused and whose errors the program caught."""
        return self._code.rounds.refusals.record(has_ended=bool(self._shortage))

    @property
    def _failed(self) -> bool:
        """Whether an error of the program's own ended it, and not a refused request."""
        return self._has_raised and not self._shortage

    def _find_full_evaluation(self) -> str:
        """The evaluation in which the card is full, in words; empty for none."""
        room = room_bytes(self._code.recording.target)
        for each in self.program.evaluations:
            batch = None if room is None else each.find_full(room)
            if batch is not None:
                return f"It runs out in the {each.title}, at about {each.of} {batch:,} of {each.batches:,}"
        return ""

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, in order: of a training loop, its optimizer steps."""
        return tuple(each.record for each in self._code.rounds.finished)

    @property
    def setup(self) -> Round | None:
        """What came before the first round; None where nothing ran on the target then."""
        return self._code.rounds.setup

    @property
    def made_up(self) -> tuple[MadeUp, ...]:
        """What the program was told that no card had computed."""
        return self._code.notes.records()

    @property
    def host(self) -> HostUse:
        """What the program took of the host's memory, as far as it is measured or counted."""
        found = self.program.host
        assert found is not None
        return found

    @property
    def program(self) -> ProgramRun:
        """The record of the whole run."""
        run = self._code.summarize(self.ending, failed=self._failed)
        return run.model_copy(update={"files": self.files, "refused": self._refused})

    @functools.cached_property
    def profile(self) -> Profile:  # type: ignore[override]
        """The round with the highest peak, the steadiest of equals. Raises AnalysisError if nothing used the target, or
        an error of the program's own ended it before its first step was over."""
        profile = self._largest()
        program = self.program
        highest = max(each.requested_bytes for each in (self.setup, *self.rounds) if each is not None)
        taken = [text for each in self._code.watch.listeners for text in each.assume(program, highest)]
        profile = profile.model_copy(update={"assumptions": (*profile.assumptions, *self._code.notes.assumed, *taken)})
        made = {} if self._compiled is None else {"compiled": self._compiled}
        return profile.model_copy(update={"step": profile.step.model_copy(update={"program": program, **made})})

    def progress(self) -> str:
        """How far the program is, in words; another thread may ask."""
        return self._code.rounds.progress()

    def note_answer(self, what: str) -> None:
        """Note what the program is told otherwise than its launcher would say."""
        self._code.notes.note("answered", what)

    def note_peaks(self, peaks_bytes: Sequence[int]) -> None:
        """Note the peaks of the program with each answer to what is timed."""
        made = self.profile.step.compiled
        if made is not None:
            self._compiled = made.with_peaks(*peaks_bytes)
            del self.profile, self.timeline

    @property
    def is_ended(self) -> bool:
        """Whether the program was ended, and what it does since is on its way out."""
        return self._code.rounds.is_ended

    @property
    def is_after(self) -> bool:
        """Whether what follows the epoch runs, which was ended before its end, or what comes later."""
        loaders = self._code.watch.parts.loaders
        return loaders.is_after or loaders.was_ahead

    def note_stop(self, settings: RunSettings) -> None:
        """Note that the program was ended, and why."""
        done, most = len(self.program.steps), settings.most_steps
        self.ending = self._describe_stop()
        if (cut := self._code.rounds.cut) is not None:
            step = "set-up" if cut.is_setup else f"step {done + 1}{f' of {most}' if most else ''}"
            self.ending = (
                f"stopped within {step}{f' at {cut.place}' if cut.place else ''}, after {cut.operators:,} operators"
                f"{f', most of them in {cut.calls}' if cut.calls else ''}: --max-operators N of fxmem run "
                f"allows more{'' if done else ', and fxmem.mark_step() ends a step that no optimizer ends'}"
            )

    def _describe_stop(self) -> str:
        rounds, passes, also = self._code.rounds, self.program.evaluations, ""
        if rounds.is_cut_after and passes and passes[-1].is_loop:
            return f"stopped after {passes[-1].share} of the {passes[-1].title}: the others are made by arithmetic"
        if rounds.is_cut_after:
            also = ", and within what follows, which takes long"
        elif self._code.watch.parts.evaluations.have_begun:
            also = " and what follows the epoch"
        elif self._code.watch.parts.branches.has_raised or any(each.ran for each in self.program.schedules):
            also = " and what comes later"
        return f"stopped after step {len(self.program.steps)}{also}"

    def note_end(self, settings: RunSettings) -> None:
        """Note that the program ended by itself, perhaps before all steps that were asked for."""
        done, most = len(self.program.steps), settings.most_steps
        if self.is_after and self.ending == _TO_ITS_END:
            self.ending = self._describe_stop()
        elif done and most and done < most and not (self._failed or self._shortage):
            self.ending = f"ran to its end after step {done} of {most}"

    def note_afterwards(self, error: BaseException) -> None:
        """Note that what follows an epoch raised. The steps before stand: its batches are few, and its numbers made up,
        so that the error may come of these."""
        self._code.watch.parts.branches.has_raised = True
        raised = f"{describe_end(error)}{self._code.notes.explain(error)}"
        self.ending = f"{self._describe_stop()}; what follows raised {raised}"

    def note_exception(self, error: BaseException) -> None:
        """Note what the program raised, and which made-up value it may come of; or that the card had no more memory."""
        self._code.rounds.has_raised = True
        if (cause := self._code.rounds.refusals.find_cause(error)) is not None:
            complaint, place = cause
            place = error_place(error) if complaint in str(error) else place
            self.ending = f"ran out of memory{f' at {place}' if place else ''}"
            self._shortage = describe_shortage(complaint, place)
            return
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {describe_end(error)}"
        self.ending, self._has_raised = f"{what}{self._code.notes.explain(error)}", True

    def _largest(self) -> Profile:
        shown, target = self._code.rounds.shown, self._code.recording.target.name
        if self._code.rounds.cut and shown is not None and not self.program.steps:
            most = format_bytes(shown.record.requested_bytes)
            raise AnalysisError(f"the program {self.ending}. Until then it requested {most} at once")
        if self._failed and not self.program.steps:
            has_run = shown is not None or self._code.recording.log.ops
            when = "before its first step was over" if has_run else f"before anything ran on {target}"
            raise AnalysisError(f"the program {self.ending}, {when}")
        if shown is not None:
            return shown.profile
        advice = "Let it move its model and data there (.to('cuda')), or use target 'cpu'."
        if names := sorted(self._code.notes.unfollowed):
            advice = (
                f"Of processes that it starts ({', '.join(names)}), none is followed: call the function in its place."
            )
        raise AnalysisError(f"expected a program that uses the card; nothing ran on {target}. {advice}")


_active: list[RecordedCode] = []
"""What is recorded now, if there is one."""


def is_recording() -> bool:
    """Whether the program that calls this is being recorded: no card is there, and its report is still to be made."""
    return bool(_active)


def mark_step() -> None:
    """End a step of the recorded program here, where no optimizer shows its end.

    From the first mark on, marks alone end steps. Outside a recording nothing happens, so that a script may keep it.
    """
    for code in _active:
        code.rounds.mark_step()


def mark(phase: str) -> None:
    """Begin a phase of the recorded program here.

    It lasts until the next one that is marked or found. Outside a recording nothing happens, so that a script may keep
    it.

    Args:
        phase: "forward", "backward", "optimizer" or "evaluation".

    Raises:
        UsageError: another phase.
    """
    if phase not in list(Phase):
        raise UsageError(f"expected a phase of {', '.join(Phase)}; got {phase!r}")
    for code in _active:
        code.rounds.mark(Phase(phase))


@contextlib.contextmanager
def record(  # noqa: PLR0913 - the settings of the public API, by keyword
    target: str | Target = "h100",
    *,
    torch: str | None = None,
    steps: int | None = None,
    out_of_memory: str = "raise",
    name: str = "program",
    max_operators: int = MAX_OPERATORS,
    enough: Callable[[Sequence[FinishedRound]], bool] | None = None,
    prepare: Callable[[str, torch.nn.Module], None] | None = None,
    ranks: int | None = None,
    rank: int = 0,
    compile: str | None = None,
    write: bool = False,
    network: bool = False,
) -> Iterator[RecordedProgram]:
    """Run a block of code on a pretended card, and record its memory.

    Inside, `torch.cuda` speaks of one card, the target. Tensors there have no values, all else is real: data, random
    numbers on the host. Optimizers end rounds. Torch is put back as it was at the end, whatever is raised. Numbers that
    the code reads back are made up, and listed.

    What the block writes by Python's own ways goes to a folder apart, is read back from there, and is dropped at the
    end: `open`, `os`, and what is built on them, `torch.save`, safetensors. Libraries that write by themselves, and
    child processes, are not held in a live process; `fxmem run` holds them. What would be sent is not.

    Args:
        target: a name from the catalogue ("h100", "cpu"), or a `Target`.
        torch: the release of torch on the target, as for `fxmem.analyze`.
        steps: optimizer steps after which the block is left; None runs it to its end.
        out_of_memory: "raise" raises `torch.cuda.OutOfMemoryError` where the card would; "continue" goes on, and the
            record says by how much it was too small.
        name: what the program is called in the record.
        max_operators: operators of one round after which the block is left.
        enough: asked after each round whether to leave the block, in the place of `steps`.
        prepare: called with the name and the module of each model of the code before its first call, to change it: to
            checkpoint it, say.
        ranks: how many ranks there are, of which the code is one: `init_process_group` begins a group of so many,
            which is not there. None: it is alone in its group.
        rank: which of them.
        compile: "as-is" compiles what the code compiles, as inductor would run it on the target; None runs that as the
            eager code it was made from.
        write: whether the block writes its files for real.
        network: whether it sends what it would send.

    Yields:
        The record, to be read after the block: `peak`, `rounds`, `profile`, `table()`, `to_json()`, ...

    Raises:
        UsageError: an argument that cannot be understood.
        EnvironmentLacksError: this torch cannot hold tensors of the target's kind; the compiler lacks something.
        Whatever the block raises.
    """
    if steps is not None and steps < 1:
        raise UsageError(f"expected steps of at least 1, got {steps}")

    isolating = IsolationSettings(write=write, network=network)
    with (
        postpone_interrupts(),
        isolate_block(isolating) as isolation,
        record_rank(
            catalogue.with_torch(target, torch),
            None if ranks is None else World(ranks, rank),
            RunSettings(steps, None if steps else "end", out_of_memory, max_operators, compile, prepare),
            name=name,
            enough=enough,
            compiling=read_program_compile(compile),
            isolation=isolation,
        ) as recorded,
    ):
        try:
            yield recorded
        finally:
            files = isolation.find_written(isolating)
            recorded.files = files if files is not None and files.written else None


@contextlib.contextmanager
def record_rank(
    target: Target,
    world: World | None,
    settings: RunSettings,
    *,
    name: str,
    compiling: CompileSettings | None = None,
    isolation: Isolation | None = None,
    enough: Callable[[Sequence[FinishedRound]], bool] | None = None,
) -> Iterator[RecordedProgram]:
    """As `record`, of a rank of a world, or of None. The settings' compiler is read already."""
    if (out_of_memory := settings.out_of_memory) not in ("raise", "continue"):
        raise UsageError(f"expected out_of_memory 'raise' or 'continue', got {out_of_memory!r}")
    require_device(target)
    measure_dynamo()  # before a recording imports it
    machine = make_machine(
        target,
        raises=out_of_memory == "raise",
        prepare=settings.prepare,
        given=settings.given,
        rule=settings.rule,
        isolation=isolation,
    )
    code = RecordedCode(name, machine)
    recording = make_recording(target, code, world, compiling)
    code.record(make_watch(machine, recording, settings, enough or settings.is_enough))
    recorded = RecordedProgram(code)
    with one_at_a_time(), postpone_interrupts(), contextlib.ExitStack() as stack:
        _active.append(code)
        stack.callback(_active.remove, code)
        try:
            with recording.environment():
                yield recorded
            recorded.note_end(settings)
        except Enough:
            recorded.note_stop(settings)
        except BaseException as error:
            recorded.note_exception(error)
            raise
        finally:
            code.finish()


def read_program_compile(compile: str | None) -> CompileSettings | None:
    """The compiler's settings for a program; None where what it compiles runs as eager code.

    Raises:
        UsageError: neither "as-is" nor None.
    """
    if compile not in (None, AS_IS):
        raise UsageError(f"expected compile {AS_IS!r} or None, got {compile!r}: a program says itself what it compiles")
    return None if compile is None else CompileSettings(as_is=True)
