"""A user's program, which can be run again with something changed.

Each run is in a process of its own, so that none finds what another has left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch

from fxmem import checkpointing
from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.hardware import catalogue
from fxmem.planning import estimate
from fxmem.records.plan import Region
from fxmem.records.profile import Report, Target
from fxmem.records.units import STEPS, Application
from fxmem.simulation.code.profiled_step import ProfiledStep, ReportedStep
from fxmem.simulation.program import IsolationSettings, Launch, RunSettings, check_program, launch_apart, record
from fxmem.whatif.source_edits import SourceEdit, apply_edits

# --- what is different when a program runs again ----------------------------------------------------------------------
# Its source stays as it is.


@dataclasses.dataclass(frozen=True)
class ProgramEdits:
    """Changes to a program's models, its optimizers and what its forward runs under."""

    regions: tuple[Region, ...] = ()
    """Checkpointed, in one of its models; with the paths that the program's profile has."""
    in_place: tuple[str, ...] = ()
    """Activation modules that overwrite their input, by those paths."""
    autocast: bool = False
    """From a model's call in training to the next backward, bfloat16 where the program has no autocast of its own."""
    optimizer_form: Literal["", "fused", "forloop"] = ""
    """Of optimizers for which the program chooses none."""
    releases_gradients: bool = False
    """Whether its optimizers step within backward."""
    source_edits: tuple[SourceEdit, ...] = ()
    """Of files of the program's."""

    def prepare(self, name: str, module: torch.nn.Module) -> None:
        """Change a model of the program before its first call, as `record` asks for it."""
        if name == estimate.find_root(self.regions):
            checkpointing.apply(module, estimate.strip_root(self.regions), Application.MODULES)
        for path in self.in_place:
            root, _, inner = path.partition(".")
            if root == name:
                vars(module.get_submodule(inner))["inplace"] = True
        if self.autocast:
            module.register_forward_pre_hook(_begin_autocast)

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """What the program runs inside; torch is as before afterwards."""
        before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
        with contextlib.ExitStack() as stack:
            if self.source_edits:
                stack.enter_context(torch_common.patch(io, "open_code", self._open_code))
                stack.enter_context(torch_common.patch(SourceFileLoader, "get_code", self._get_code))
            if self.optimizer_form or self.releases_gradients:
                stack.enter_context(torch_common.patch(torch.optim.Optimizer, "__init__", self._make_optimizer))
            if self.autocast:
                stack.enter_context(torch_common.patch(torch.autograd, "backward", _after_autocast))
            try:
                yield
            finally:
                for kind, enabled, dtype in before:
                    torch.set_autocast_enabled(kind, enabled)
                    torch.set_autocast_dtype(kind, dtype)

    def _make_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        chosen = {"fused": {"fused": True}, "forloop": {"foreach": False}, "": {}}[self.optimizer_form]

        def init(optimizer: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            is_open = all(defaults.get(form) is None for form in ("foreach", "fused"))
            fits = is_open and chosen.keys() <= defaults.keys()
            original(optimizer, params, {**defaults, **chosen} if fits else defaults)
            if self.releases_gradients:
                checkpointing.release_gradients(optimizer)

        return init

    def _open_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        sources = apply_edits(self.source_edits)

        def open_code(path: str) -> Any:
            source = sources.get(os.path.realpath(path))
            return original(path) if source is None else io.BytesIO(source.encode())

        return open_code

    def _get_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        sources = apply_edits(self.source_edits)

        def get_code(loader: SourceFileLoader, name: str) -> Any:
            path = loader.get_filename(name)
            source = sources.get(os.path.realpath(path))
            return original(loader, name) if source is None else compile(source, path, "exec")

        return get_code


AS_IT_IS: Final = ProgramEdits()
"""No edits."""
_KINDS = ("cuda", "cpu")


def _begin_autocast(module: torch.nn.Module, _: Any) -> None:
    device = next((parameter.device.type for parameter in module.parameters()), "")
    if device in _KINDS and module.training and torch.is_grad_enabled() and not torch.is_autocast_enabled(device):
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.set_autocast_enabled(device, True)


def _after_autocast(original: Callable[..., None]) -> Callable[..., None]:
    def backward(*args: Any, **kwargs: Any) -> None:
        for kind in _KINDS:
            torch.set_autocast_enabled(kind, False)
        torch.clear_autocast_cache()
        original(*args, **kwargs)

    return backward


# --- a user's program, which can be run again with something changed --------------------------------------------------


def fill_place(argument: str, size: int | None) -> str:
    """An argument with a size in its place; where it has none, the size after it."""
    return _PLACES.sub(str(size), argument) if _PLACES.search(argument) else f"{argument} {size}"


PLACE: Final = "{}"
"""Stands in a program's arguments for the size that varies."""
_PLACES: Final = re.compile(r"\{(\w*)(?:=(\d+))?\}")
"""The same, and one with a name and perhaps the size that is tried first: `{height=512}`. One name is one size."""
_NAMED_START: Final = 256
"""Size with a name that is tried first unless another is said: networks for images and films run at it."""
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
    given: tuple[str, ...] = ()
    """Options of the command line that it is of, before `--run`."""

    def __post_init__(self) -> None:
        check_program(self.launch)
        if self.steps < 1:
            raise UsageError(f"expected steps of at least 1, got {self.steps}")

    @property
    def name(self) -> str:
        """How it is called on the command line."""
        return self.launch.command

    @property
    def starts(self) -> dict[str, int | None]:
        """By name of each size that varies, the one that is tried first; of one without a name, none is known. Raises
        UsageError where there is none, or more than two."""
        found: dict[str, int | None] = {}
        for name, start in _PLACES.findall(" ".join(self.launch.arguments)):
            found[name] = int(start) if start else found.get(name, _NAMED_START if name else None)
        found = {"": None} if "" in found else found  # the braces of the others are the program's own
        if not found:
            raise UsageError(
                f"expected {PLACE} among the program's arguments, in the place of the size that varies: --run "
                f"{self.launch.command} --batch-size {PLACE}"
            )
        if len(found) > 2:
            raise UsageError(f"expected one or two sizes that vary, got {', '.join(found)}")
        return found

    @property
    def varied(self) -> tuple[str, ...]:
        """The arguments that vary, each with its option before it, by size. Raises UsageError as `starts`."""
        arguments, found = self.launch.arguments, list[str]()
        for name in self.starts:
            at = next(n for n, word in enumerate(arguments) if name in (each for each, _ in _PLACES.findall(word)))
            has_option = at > 0 and _PLACES.fullmatch(arguments[at]) and arguments[at - 1].startswith("-")
            found.append(" ".join(arguments[at - bool(has_option) : at + 1]))
        return tuple(found)

    def at_sizes(self, sizes: Sequence[int], target: Target) -> ProgramCommand:
        """The same program with sizes in their places, on another target."""
        by_name = dict(zip(self.starts, map(str, sizes), strict=True))

        def fill(text: str) -> str:
            return _PLACES.sub(lambda place: by_name.get(place[1], place[0]), text)

        launch = dataclasses.replace(
            self.launch, arguments=tuple(map(fill, self.launch.arguments)), typed=fill(self.launch.typed)
        )
        return dataclasses.replace(self, launch=launch, target=target)

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
        if edits == AS_IT_IS:
            linecache.checkcache()  # edits are of the lines that run now
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
    varied: ClassVar[tuple[str, ...]] = ()
    """The size is the function's argument."""
    starts: ClassVar[Mapping[str, int | None]] = {"": None}

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

    def at_sizes(self, sizes: Sequence[int], target: Target) -> ProgramFunction:
        """The function with a size, on another target."""
        return dataclasses.replace(self, call=functools.partial(self.call, *sizes), target=target)

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
    return ProgramStep(ProgramFunction(call, catalogue.target(target) if isinstance(target, str) else target, options))


def take_step(step: Any, tell: Callable[[str], object], options: Mapping[str, Any]) -> ProfiledStep:
    """A step as it is, or a function with these options. Raises UsageError: options of what has its settings."""
    if not isinstance(step, ProfiledStep):
        tell("running the program as it is")
        return program_step(step, **options)
    if options:
        raise UsageError(f"expected no {', '.join(options)}: the analysis has its settings")
    return step


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
