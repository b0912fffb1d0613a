"""A user's program, which can be run again with something changed.

Each run is in a process of its own, so that none finds what another has left behind.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.hardware import catalogue
from fxmem.records.names import STEPS
from fxmem.records.profile import Report, Target
from fxmem.simulation.code.profiled_step import ReportedStep
from fxmem.simulation.program import (
    IsolationSettings,
    Launch,
    RunSettings,
    check_program,
    launch_apart,
    record,
)
from fxmem.whatif.program_edits import AS_IT_IS, ProgramEdits

PLACE = "{}"
"""Stands in a program's arguments for the size that varies."""
_SHOWN = 20
"""Lines of its output that are shown of a program that failed."""


@dataclasses.dataclass(frozen=True)
class ProgramCommand:
    """A program on the command line, for a card.

    Raises:
        UsageError: there is no such file, or no step to run.
    """

    launch: Launch
    target: Target
    steps: int
    compile: str | None = None
    """"as-is" compiles what it compiles; None runs that as eager code."""
    goes_on: bool = False
    """Whether it runs on as `fxmem run` does: while it grows, through the longest batch and what follows the epoch."""

    def __post_init__(self) -> None:
        check_program(self.launch)
        if self.steps < 1:
            raise UsageError(f"expected steps of at least 1, got {self.steps}")

    @property
    def name(self) -> str:
        """How it is called on the command line."""
        return self.launch.command

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

    def run(self, edits: ProgramEdits = AS_IT_IS) -> Report:
        """Run it as `fxmem run --oom continue --steps N` does, with edits, in another process; without `--steps` where
        it goes on.

        Raises:
            AnalysisError: it raised, or nothing ran on the card. The end of what it printed goes to standard error.
        """
        settings = RunSettings(
            None if self.goes_on else self.steps,
            out_of_memory="continue",
            compile=self.compile,
            prepare=edits.prepare,
            reads_epoch=self.goes_on,
            explains=edits == AS_IT_IS,  # what is tried is held to it by its bytes
        )
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "output")
            try:
                report = launch_apart(
                    self.launch, self.target, settings, IsolationSettings(), around=edits.apply, output=output
                ).profile
                run = report.step.program
                if run is not None and run.failed:
                    raise AnalysisError(f"the program {run.ending}")
            except AnalysisError:
                lines = output.read_text(errors="replace").splitlines() if output.exists() else []
                sys.stderr.writelines(f"{line}\n" for line in lines[-_SHOWN:])
                raise
        return report


@dataclasses.dataclass(frozen=True)
class ProgramFunction:
    """A function that trains as a script does, for a card.

    Raises:
        UsageError: it is a model, which `analyze` takes with its inputs.
    """

    call: Callable[..., Any]
    target: Target
    options: Mapping[str, Any]
    """Further ones of `fxmem.record`."""
    varied: ClassVar[str] = ""
    """The size is the function's argument."""

    def __post_init__(self) -> None:
        if isinstance(self.call, torch.nn.Module):
            raise UsageError(
                f"expected an analysis or a function that trains; got a model, {type(self.call).__name__}: "
                "give it to fxmem.analyze(model, inputs), and what that returns here"
            )

    @property
    def name(self) -> str:
        """What the function is called."""
        return getattr(self.call, "__qualname__", type(self.call).__name__)

    def at_size(self, size: int, target: Target) -> ProgramFunction:
        """The function with a size, on another target."""
        return dataclasses.replace(self, call=functools.partial(self.call, size), target=target)

    def run(self, edits: ProgramEdits = AS_IT_IS) -> Report:
        """Record it with edits.

        Raises:
            AnalysisError: it raised, or nothing ran on the target.
        """
        further = {"out_of_memory": "continue", "prepare": edits.prepare, "steps": STEPS, **self.options}
        try:
            with edits.apply(), record(self.target, **further) as recorded:
                self.call()
        except FxmemError:
            raise
        except Exception as error:
            raise AnalysisError(f"the program raised {one_line(error)}") from error
        return recorded.report()


def program_step(call: Callable[..., Any], *, target: str | Target = "h100", **options: Any) -> ProgramStep:
    """A function, with options of `fxmem.record`, as a step. Raises UsageError for a model."""
    card = catalogue.target(target) if isinstance(target, str) else target
    return ProgramStep(ProgramFunction(call, card, options))


class ProgramStep(ReportedStep):
    """A program, which is run where its profile is asked for, and again with something changed."""

    is_fixed = False

    def __init__(self, program: ProgramCommand | ProgramFunction, edits: ProgramEdits = AS_IT_IS) -> None:
        self.program, self.edits = program, edits

    @functools.cached_property
    def profile(self) -> Report:  # type: ignore[override]
        """The report of a run."""
        return self.program.run(self.edits)

    def vary(self, edits: ProgramEdits | None = None, **changes: Any) -> ProgramStep:
        """The program with other edits, or other fields: on another target."""
        return ProgramStep(dataclasses.replace(self.program, **changes), self.edits if edits is None else edits)
