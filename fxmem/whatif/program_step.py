"""A user's program, which can be run again with something changed.

Each run is in a process of its own, so that none finds what another has left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.memory import report_reader
from fxmem.records.files import write_text
from fxmem.records.names import MAX_OPERATORS
from fxmem.records.profile import Report, Target, Timeline
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.simulation.program import Launch, RecordedProgram, check_program, launch, record
from fxmem.whatif.program_edits import AS_IT_IS, ProgramEdits

PLACE = "{}"
"""Stands in a program's arguments for the size that varies."""
_SHOWN = 20
"""Lines of its output that are shown of a program that failed."""


class ReportedStep(ProfiledStep):
    """A step as its report has it."""

    profile: Report

    def __init__(self, report: Report) -> None:
        self.profile = report

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at every moment; the peak is the report's."""
        return report_reader.timeline(self.profile)


@dataclasses.dataclass(frozen=True)
class ProgramCommand:
    """A program on the command line, for a card.

    Raises:
        UsageError: there is no such file, or no step to run.
    """

    launch: Launch
    target: Target
    steps: int

    def __post_init__(self) -> None:
        check_program(self.launch)
        if self.steps < 1:
            raise UsageError(f"expected steps of at least 1, got {self.steps}")

    @property
    def varied(self) -> str:
        """The argument that varies, with its option before it. Raises UsageError where there is none."""
        arguments = self.launch.arguments
        at = next((number for number, word in enumerate(arguments) if PLACE in word), None)
        if at is None:
            raise UsageError(
                f"expected {PLACE} among the program's arguments, in the place of the size that varies: --run "
                f"{self.launch.command} --batch-size {PLACE}"
            )
        has_option = at > 0 and arguments[at] == PLACE and arguments[at - 1].startswith("-")
        return " ".join(arguments[at - has_option : at + 1])

    def at_size(self, size: int, target: Target) -> ProgramCommand:
        """The same program with a size in its place, on another target."""
        arguments = tuple(word.replace(PLACE, str(size)) for word in self.launch.arguments)
        return dataclasses.replace(self, launch=dataclasses.replace(self.launch, arguments=arguments), target=target)

    def run(self, edits: ProgramEdits = AS_IT_IS) -> ReportedStep:
        """Run it as `fxmem run --oom continue` does, with edits, in another process.

        Raises:
            AnalysisError: it raised, or nothing ran on the card. The end of what it printed goes to standard error.
        """
        with tempfile.TemporaryDirectory() as folder:
            report, error, output = (Path(folder, name) for name in ("report.json", "error", "output"))
            code = _in_another_process(self, edits, report, error, output)
            if report.exists():
                return ReportedStep(report_reader.load_report(report))
            lines = output.read_text(errors="replace").splitlines() if output.exists() else []
            sys.stderr.writelines(f"{line}\n" for line in lines[-_SHOWN:])
            raise AnalysisError(error.read_text() if error.exists() else f"the program ended with exit code {code}")


def record_size(call: Callable[[int], Any], options: Mapping[str, Any], size: int, target: Target) -> RecordedProgram:
    """Record a function of the size, as `record_function` does."""
    return record_function(functools.partial(call, size), {**options, "target": target})


def record_function(
    call: Callable[[], Any], options: Mapping[str, Any], edits: ProgramEdits = AS_IT_IS
) -> RecordedProgram:
    """Record a function with edits, with options of `fxmem.record`.

    Raises:
        UsageError: it is a model, which `analyze` takes with its inputs.
        AnalysisError: it raised, or nothing ran on the target.
    """
    if isinstance(call, torch.nn.Module):
        raise UsageError(
            f"expected an analysis or a function that trains; got a model, {type(call).__name__}: "
            "give it to fxmem.analyze(model, inputs), and what that returns here"
        )
    try:
        with edits.apply(), record(**{"out_of_memory": "continue", "prepare": edits.prepare, **options}) as recorded:
            call()
    except FxmemError:
        raise
    except Exception as error:
        raise AnalysisError(f"the program raised {one_line(error)}") from error
    _ = recorded.profile  # raises where there is none
    return recorded


def _in_another_process(program: ProgramCommand, edits: ProgramEdits, *files: Path) -> int | None:
    """Run `_write_report` there; its exit code. Where this process can be forked, nothing has to be imported again."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if can_fork:
        _import_for_recordings()
    process = multiprocessing.get_context("fork" if can_fork else None).Process(
        target=_write_report, args=(program, edits, *files)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # threads; none of them is needed there
        process.start()
    try:
        process.join()
    finally:
        process.kill()
        process.join()
    return process.exitcode


@functools.cache
def _import_for_recordings() -> None:
    """Import what torch imports when it first runs on fakes: that takes several times as long as a small program."""
    with record("cpu"):
        torch.zeros(1)


def _write_report(program: ProgramCommand, edits: ProgramEdits, report: Path, error: Path, output: Path) -> None:
    """Run a program; write its report, or why there is none."""
    with _redirect_output(output), edits.apply():
        try:
            result = launch(
                program.launch,
                program.target,
                enough=lambda rounds: len(rounds) >= program.steps,
                out_of_memory="continue",
                max_operators=MAX_OPERATORS,
                prepare=edits.prepare,
            )
            if result.raised:
                raise AnalysisError(f"the program {result.recorded.ending}")
            write_text(report, result.recorded.to_json())
        except FxmemError as refused:
            error.write_text(str(refused))


@contextlib.contextmanager
def _redirect_output(file: Path) -> Iterator[None]:
    """Send all that this process writes, and those that it starts, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("wb") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    yield
    sys.stdout.flush()
    sys.stderr.flush()
