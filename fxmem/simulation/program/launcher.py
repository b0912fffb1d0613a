"""Runs a script or a module as `python` would, inside a recording."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
from fxmem.simulation.processes.sandbox.isolation import Isolation, IsolationSettings
from fxmem.simulation.processes.sandbox.process import run_apart
from fxmem.simulation.program.launchers import (
    HandedOver,
    Launch,
    check_program,
    find_started,
    handing_over,
    notebook_cells,
)
from fxmem.simulation.program.rank_runs import RankAnswer, report_ranks
from fxmem.simulation.program.recorded_program import RecordedProgram, read_program_compile, record, record_rank
from fxmem.simulation.program.watch import RunSettings
from fxmem.simulation.ranks.mailbox import Mailbox, World
from fxmem.simulation.recording.compiled.compiled_parts import Answered, Answers, answer_all_ways
from fxmem.simulation.run.host_memory import measure_dynamo

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
            runpy.run_path(program.program, run_name="__main__")


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
