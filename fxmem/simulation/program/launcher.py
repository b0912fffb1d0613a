"""Runs a script or a module as `python` would, inside a recording."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import fxmem
from fxmem._torch import common as torch_common
from fxmem.errors import FxmemError
from fxmem.records.parts import CompileSettings
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Report, Target
from fxmem.records.units import package_path
from fxmem.simulation.code.profiled_step import ReportedStep
from fxmem.simulation.code.round_rule import Enough
from fxmem.simulation.code.source_lines import forget_lines
from fxmem.simulation.processes.executor import Cost, current_backend, largest_child_bytes, run_jobs
from fxmem.simulation.processes.sandbox.isolation import Isolation, IsolationSettings
from fxmem.simulation.processes.sandbox.process import run_apart, run_within
from fxmem.simulation.program.launchers import (
    HandedOver,
    Launch,
    check_program,
    find_started,
    handing_over,
    notebook_cells,
)
from fxmem.simulation.program.recorded_program import RecordedProgram, read_program_compile, record, record_rank
from fxmem.simulation.program.watch import RunSettings
from fxmem.simulation.ranks.classes import find_classes, with_classes
from fxmem.simulation.ranks.mailbox import Mailbox, MissingMail, World
from fxmem.simulation.recording.compiled.compiled_parts import Answered, Answers, answer_all_ways
from fxmem.simulation.run.host_memory import measure_dynamo
from fxmem.simulation.stand_ins.host import find_types

# --- the ranks of a program: each runs in a process of its own, as frameworks keep their groups in module globals -----


@dataclasses.dataclass(frozen=True)
class RankAnswer:
    """What came of a rank's run."""

    report: str = ""
    """As JSON; empty where the run was for what the rank sends alone, or waits for another."""
    raised: bool = False
    """Whether the program ended with an error of its own."""


RunRank = Callable[[Launch, RunSettings, Mailbox, Isolation], RankAnswer]
"""Runs a program as one rank in this process; raises MissingMail where it waits for objects of another."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What came of a rank's process."""

    answer: RankAnswer
    sent: Mapping[int, Sequence[bytes]]
    """What it has sent, by rank."""
    missing: tuple[int, int] | None = None
    """The rank whose objects it waits for, which is to run first, and how many of them it needs."""


@dataclasses.dataclass(frozen=True)
class _Job:
    """A rank's run in a process of its own, which other processes may carry out.

    Its output is shown where it is of the first rank, and else where it fails. The first alone writes and sends for
    real, where that is asked for.
    """

    program: Launch
    settings: RunSettings
    run: RunRank
    mailbox: Mailbox
    isolation: Isolation | None
    """That of the process; None where it is to be apart by itself."""
    is_first: bool
    folder: str = dataclasses.field(default_factory=os.getcwd)
    environment: Mapping[str, str] | None = None
    """Of the process; None for its own."""

    def __call__(self) -> _Outcome:
        """Run it. What the run raises passes through."""
        if self.is_first and self.isolation is not None:
            return _read(run_within(self._answer, self.isolation))
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "output")
            try:
                if self.isolation is not None:
                    found = _read(run_within(self._answer, self.isolation, output))
                else:
                    found = _read(run_apart(self._answer, IsolationSettings(), [self.folder], output).text)
            except FxmemError:
                _show(output)
                raise
            if found.answer.raised:
                _show(output)
        return found

    def _answer(self, isolation: Isolation) -> str:
        """What the process answers, as JSON."""
        answer, missing = RankAnswer(), None
        os.chdir(self.folder)
        if self.environment is not None:
            os.environ.clear()
            os.environ.update(self.environment)
        try:
            answer = self.run(self.program, self.settings, self.mailbox, isolation)
        except MissingMail as waiting:
            missing = waiting.source, waiting.number
        assert self.program.rank is not None
        sent = self.mailbox.sent_by(self.program.rank)
        letters = {str(to): [base64.b64encode(each).decode() for each in found] for to, found in sent.items()}
        return json.dumps({"answer": dataclasses.astuple(answer), "sent": letters, "missing": missing})


def _read(text: str) -> _Outcome:
    found = json.loads(text)
    sent = {int(to): [base64.b64decode(each) for each in letters] for to, letters in found["sent"].items()}
    return _Outcome(RankAnswer(*found["answer"]), sent, found["missing"] and tuple(found["missing"]))


def _show(output: Path) -> None:
    """Write what a rank printed to standard error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(output.read_text(encoding="utf-8", errors="replace"))


_MOST_PARTS: Final = 2
"""Runs of one rank for a letter each; stages of a pipeline send one or two before their first step."""


class _RankFailedError(Exception):
    """A rank's program raised: there are no classes."""

    def __init__(self, report: str) -> None:
        super().__init__()
        self.report = report


def report_ranks(program: Launch, settings: RunSettings, run: RunRank, writes: bool, isolation: Isolation) -> str:
    """Run a program as its ranks; the report of the one that was asked for, or of the largest class, as JSON.

    Where a rank waits for objects of another, the program runs as that one first, as far as it sends them.

    Args:
        program: what is run, with ranks.
        settings: how long, and how.
        run: runs it as one rank, in the process that it is called in.
        writes: whether the program writes its files for real, which the first rank alone does.
        isolation: of this process.

    Raises:
        AnalysisError: ranks wait for each other; or as a rank raises it.
    """
    assert program.ranks is not None
    ranks = _Ranks(program, settings, run, isolation, writes=writes)
    if program.rank is not None:
        return ranks.run_one(program.rank).report
    try:
        found = find_classes(program.ranks, ranks.analyse)
    except _RankFailedError as failed:
        return failed.report
    profile = with_classes(found.largest.profile, found.records)
    assert isinstance(profile, Report)
    return profile.model_dump_json()


class _Ranks:
    """The runs of a program's ranks."""

    def __init__(
        self, program: Launch, settings: RunSettings, run: RunRank, isolation: Isolation, *, writes: bool
    ) -> None:
        self._program, self._settings, self._run = program, settings, run
        self._isolation, self._writes = isolation, writes
        self._first = program.rank or 0
        self._mailbox = Mailbox()
        self._cost: Cost | None = None
        """Of the first rank; None before it has run."""

    def analyse(self, ranks: Sequence[int]) -> Iterator[ReportedStep]:
        """The steps of ranks, which run side by side once the first has run: it may write what others read."""
        if self._cost is None:
            begin = time.monotonic()
            reports = {rank: self._check(self.run_one(rank)) for rank in ranks}
            self._cost = Cost((time.monotonic() - begin) / len(ranks), largest_child_bytes())
        else:
            reports = self._run_all(ranks)
        for rank in ranks:
            with pause_gc():
                step = ReportedStep(Report.model_validate_json(reports.pop(rank)))
            yield step

    def run_one(self, rank: int, settings: RunSettings | None = None) -> RankAnswer:
        """Run one rank, after those whose objects it waits for."""
        while True:
            outcome = self._make_job(rank, settings or self._settings)()
            self._mailbox.adopt(rank, outcome.sent)
            if outcome.missing is None:
                return outcome.answer
            self._send_first(*outcome.missing, rank)

    def _run_all(self, ranks: Sequence[int]) -> dict[int, str]:
        """The reports of ranks, as JSON."""
        reports: dict[int, str] = {}
        waiting = list(ranks)
        with self._settings.watch(lambda: f"{1 + len(reports)} of {1 + len(ranks)} ranks have run"):
            while waiting:
                jobs = [self._make_job(rank, self._settings) for rank in waiting]
                missing: dict[int, tuple[int, int]] = {}
                for rank, outcome in zip(waiting, run_jobs(jobs, self._cost), strict=True):
                    self._mailbox.adopt(rank, outcome.sent)
                    if outcome.missing is not None:
                        missing[rank] = outcome.missing
                    else:
                        reports[rank] = self._check(outcome.answer)
                for rank, (source, number) in missing.items():
                    self._send_first(source, number, rank)
                waiting = list(missing)
        return reports

    def _send_first(self, source: int, number: int, destination: int) -> None:
        """Run a rank as far as it sends what another waits for, unless that is there by now.

        One that sends again and again runs as long as any.
        """
        goes_on = number > _MOST_PARTS
        if not self._mailbox.has(source, destination, number):
            with self._mailbox.awaiting(source, destination, number, goes_on=goes_on):
                self.run_one(source, self._settings if goes_on else dataclasses.replace(self._settings, until="end"))

    def _check(self, answer: RankAnswer) -> str:
        if answer.raised:
            raise _RankFailedError(answer.report)
        return answer.report

    def _make_job(self, rank: int, settings: RunSettings) -> _Job:
        program, backend = dataclasses.replace(self._program, rank=rank), current_backend()
        isolation: Isolation | None = self._isolation
        is_first = rank == self._first and not self._mailbox.is_awaited
        if not is_first:
            settings = dataclasses.replace(settings, watch=contextlib.nullcontext)
            isolation = self._isolation.unsent() if backend.is_here and not self._writes else None
        environment = dict(os.environ) if backend.is_here else None
        return _Job(program, settings, self._run, self._mailbox, isolation, is_first, environment=environment)


# --- a program within a recording -------------------------------------------------------------------------------------


_Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes what a program runs inside."""
_OURS = os.path.dirname(fxmem.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """A program that was run."""

    recorded: RecordedProgram
    raised: bool
    """Whether it ended with an error of its own."""


def launch(
    program: Launch,
    target: Target,
    settings: RunSettings,
    isolation: Isolation | None = None,
    mailbox: Mailbox | None = None,
) -> LaunchResult:
    """Run a program until it ends, raises, or has run long enough. Its standard output goes to standard error.

    Of ranks it runs as the one that is named, or as the first. Where the compiler decides by timing on the card, the
    program runs once more with each other answer.

    Args:
        program: what is run.
        target: the machine to pretend.
        settings: how long, and how.
        isolation: what keeps its files apart; None where they are real.
        mailbox: what other ranks have sent; None where they cannot run.

    Raises:
        UsageError: the program cannot be found.
        MissingMail: it is a rank that waits for objects of another.
    """
    program = find_started(program)
    check_program(program)
    isolation = isolation or Isolation()
    compiling = read_program_compile(settings.compile)
    world = None
    if program.ranks is not None:
        world = World(program.ranks, program.rank or 0, mailbox, program.per_machine)

    def run(compiling: CompileSettings | None) -> LaunchResult:
        if mailbox is not None:
            mailbox.begin(program.rank or 0)
        recording = record_rank(target, world, settings, name=program.command, compiling=compiling, isolation=isolation)
        with recording as recorded:
            raised = False
            raised = _run_recorded(program, recorded, world, settings)
        return LaunchResult(recorded, raised)

    launched = run(compiling)
    is_asked = mailbox is None or not mailbox.is_awaited  # else the run is for what the rank sends
    if compiling is None or not is_asked or launched.raised or launched.recorded.shortage:
        return launched

    def rerun(answers: Answers) -> Answered | None:
        other = run(compiling.model_copy(update={"answers": answers}))
        return None if other.raised else _find_answered(other.recorded)

    first = _find_answered(launched.recorded)
    if first.made is not None and first.made.timed:
        launched.recorded.note_peaks(answer_all_ways(first, rerun))
    return launched


def launch_apart(
    program: Launch,
    target: Target,
    settings: RunSettings,
    isolation: IsolationSettings,
    *,
    around: _Around = contextlib.nullcontext,
    output: Path | None = None,
) -> ReportedStep:
    """Run a program as `launch` does, in a process apart from the user's files.

    Each rank runs in a process of its own. Of ranks without a number each class of equal ones runs, and the largest is
    the result, with all of them beside it.

    Args:
        program, target, settings: as for `launch`; where processes cannot be forked, they are pickled.
        isolation: what it may do for real.
        around: what it runs inside, beside the recording.
        output: the file to which all goes that it prints.

    Raises:
        FxmemError: as `launch` or its result's `profile`, ranks wait for each other, or the program's process ended by
            itself.
    """
    forget_lines(program.program)
    program = find_started(program)
    check_program(program)
    _import_for_recordings()
    work: Callable[[Isolation], str] = functools.partial(_report, program, target, settings, around)
    if program.ranks is not None:
        one = functools.partial(_run_rank, target, around)
        work = functools.partial(report_ranks, program, settings, one, isolation.write)
    text, files, network = run_apart(work, isolation, [os.getcwd(), _first_folder(program)], output)
    with pause_gc(stays=True):
        report = Report.model_validate_json(text)
    run = report.step.program
    if run is not None:
        step = report.step.model_copy(update={"program": run.model_copy(update={"files": files, "network": network})})
        report = report.model_copy(update={"step": step})
    return ReportedStep(report)


@pause_gc()
def _report(program: Launch, target: Target, settings: RunSettings, around: _Around, isolation: Isolation) -> str:
    """Run a program; its report as JSON."""
    with around():
        recorded = launch(program, target, settings, isolation).recorded
        return recorded.report(explains=settings.explains).model_dump_json()


@pause_gc()
def _run_rank(
    target: Target, around: _Around, program: Launch, settings: RunSettings, mailbox: Mailbox, isolation: Isolation
) -> RankAnswer:
    """Run a program as one rank, in this process; of a run for what the rank sends alone there is no report."""
    with around():
        launched = launch(program, target, settings, isolation, mailbox)
        if mailbox.is_awaited:
            return RankAnswer("", launched.raised)
        return RankAnswer(launched.recorded.report(explains=settings.explains).model_dump_json(), launched.raised)


@functools.cache
def _import_for_recordings() -> None:
    """Import what torch imports when it first runs on fakes: that takes several times as long as a small program."""
    measure_dynamo()
    with record("cpu"):
        torch.zeros(1)


def _find_answered(recorded: RecordedProgram) -> Answered:
    """What the compiler made of a program's step, and its peak."""
    return Answered(recorded.profile.step.compiled, recorded.timeline.peak.counted_bytes)


def _run_recorded(program: Launch, recorded: RecordedProgram, world: World | None, settings: RunSettings) -> bool:
    """Run a program as the rank of a world; whether it ended with an error of its own."""
    try:
        with settings.watch(recorded.progress), _on_its_way_out(recorded):
            run_as_main(program, recorded.note_answer, {} if world is None else world.variables)
    except FxmemError:
        raise
    except SystemExit as leaving:
        if leaving.code and not recorded.is_after:
            recorded.note_exception(leaving)
        return bool(leaving.code) and not recorded.is_after
    except BaseException as error:
        if not _is_programs(error):
            raise
        if recorded.is_after and isinstance(error.__cause__ or error, StopIteration):
            return False  # `next` had no more of the batches that were left out
        _print_traceback(error)
        if recorded.is_after and not isinstance(error, torch.cuda.OutOfMemoryError):
            recorded.note_afterwards(error)
            return False
        recorded.note_exception(error)
        return True
    return False


def _is_programs(error: BaseException) -> bool:
    """Whether the program raised an error; else it is our end of the program, or a signal that came from outside.

    Those are raised by functions of ours, a user's interrupt by `postpone_interrupts`.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, Exception) or not frames[-1].f_code.co_filename.startswith(_OURS)


@contextlib.contextmanager
def _on_its_way_out(recorded: RecordedProgram) -> Iterator[None]:
    """What a program does that catches its end, as by `except:`, is no end of its own."""
    try:
        yield
    except BaseException as error:
        if not (recorded.is_ended and (isinstance(error, SystemExit) or _is_programs(error))):
            raise
    if recorded.is_ended:
        raise Enough


def run_as_main(
    program: Launch, note_answer: Callable[[str], None] = lambda what: None, place: Mapping[str, str] | None = None
) -> None:
    """Run a program as `python` would, its standard output on standard error. What it raises passes through.

    What a launcher would start runs here. `note_answer` gets what it is told otherwise than the launcher would say;
    `place` has the environment variables of a rank; None for the first process, alone.
    """
    program = find_started(program)
    check_program(program)
    if program.launcher:
        as_what = f"run as with --ranks {place['WORLD_SIZE']}" if place else "the first runs here, alone"
        note_answer(f"{program.launcher}: {as_what}")
    try:
        _run_there(program, place)
    except HandedOver as given:
        # Outside of the handler, so that the errors of what runs now are not shown as raised within this one.
        started = dataclasses.replace(given.started, environment=(*program.environment, *given.started.environment))
    else:
        return
    run_as_main(started, note_answer, place)


def _run_there(program: Launch, place: Mapping[str, str] | None) -> None:
    """Run a program until it ends, or starts another in its place."""
    forget_lines(program.program)
    with (
        handing_over(program),
        torch_common.replace(sys, "argv", [program.program, *program.arguments]),
        torch_common.replace(sys, "path", [_first_folder(program), *sys.path]),
        torch_common.set_environment({**dict(program.environment), **(place or {})}),
        contextlib.redirect_stdout(sys.stderr),
    ):
        if program.is_module:
            runpy.run_module(program.program, run_name="__main__", alter_sys=True)
        elif program.is_notebook:
            _run_notebook(program.program)
        else:
            runpy.run_path(program.program, find_types(program.program), run_name="__main__")


def _run_notebook(file: str) -> None:
    """Run the cells of a notebook one after another, as one module."""
    before, module = sys.modules["__main__"], types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        for name, source in notebook_cells(file):
            exec(compile(source, name, "exec"), module.__dict__)
    finally:
        sys.modules["__main__"] = before


def _first_folder(program: Launch) -> str:
    """The folder in which Python looks for the program's modules first."""
    return os.getcwd() if program.is_module else os.path.dirname(os.path.abspath(program.program))


def _print_traceback(error: BaseException) -> None:
    """Print the error as Python does, without the frames that run and watch the program.

    Where memory ran out, those of libraries say no more than the answer does: the innermost one is enough.
    """
    told = traceback.TracebackException.from_exception(error)
    shown = [each for each in told.stack if not each.filename.startswith(_OURS)]
    runpy_files = ("runpy", "runpy.py")  # frozen in Python, or a file of its library
    shown = [each for each in shown if not os.path.basename(each.filename).removesuffix(">").endswith(runpy_files)]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        own = [each for each in shown[:-1] if package_path(each.filename) == each.filename]
        shown = [*own, *shown[-1:]] if own else shown
    told.stack = traceback.StackSummary.from_list(shown)
    told.__cause__ = None if isinstance(error, torch.cuda.OutOfMemoryError) else told.__cause__
    print("".join(told.format()), end="", file=sys.stderr)
