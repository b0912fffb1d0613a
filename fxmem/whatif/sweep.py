"""A step over a grid of settings: what fits which card, how long it takes, and what it costs.

Points share what they can. Cards of one compute capability share the step. Of each precision, checkpointing, mesh and
capability the step is analysed at a few sizes, and where its sizes are functions of batch and length, those of the
others follow (`fxmem.memory.lengths.ProfileForms`); else each is analysed. These jobs run side by side, in forks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Final, NamedTuple

from torch import nn

from fxmem import checkpointing
from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.hardware import catalogue, step_time
from fxmem.hardware.context import room_bytes
from fxmem.memory.figures import find_dtypes
from fxmem.memory.lengths import POWERS, Features, LengthsUnproved, LoggedStep, ProfileForms
from fxmem.records.fits import AXES, NONE, Fits, Point, Space
from fxmem.records.names import PRECISIONS, Application
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Assumption, Kind, Many, Profile, Record, Target
from fxmem.simulation.code.profiled_step import ProfiledStep, ReallocatedStep
from fxmem.simulation.processes.executor import run_forked
from fxmem.simulation.ranks import Mesh, MeshPlan, find_blocks, read_mesh
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.step.analysis import Analysis, analyze
from fxmem.simulation.step.model.fake_model import shadow_model
from fxmem.whatif.card_fit import choose_cards
from fxmem.whatif.plans.proposals import check_training
from fxmem.whatif.program_step import ProgramStep
from fxmem.whatif.resize import find_resizing
from fxmem.whatif.size_search import judge

MOST: Final = 10_000
"""Points of a grid."""
_LEAST_SIZES: Final = 4
"""Sizes of an axis that prove a form: three give it, a fourth checks it."""
BLOCKS: Final = "blocks"

Key = tuple[str, int | None, int | None, str, str, str]
"""Card, batch, length, precision, checkpoints and mesh of a point."""


def sweep(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    plans: Mapping[str, Plan] | None = None,
    kept: Fits | None = None,
    keep: Callable[[Fits], None] = lambda _: None,
    progress: Callable[[str], None] | None = None,
    grid: Mapping[str, Any] | Space,
    **options: Any,
) -> Fits:
    """Predict a step over a grid of batch, length, precision, checkpoints, mesh and card.

    Args:
        model: as for `fxmem.analyze`.
        inputs: as for `fxmem.analyze`; their batch and their sequences are resized.
        plans: the plans that `grid` names under checkpoints, from `fxmem.plan`.
        kept: an earlier answer, whose points are taken over where the question is the same.
        keep: called with what there is whenever some of it is new.
        progress: called with a few words on what is done.
        grid: by name, the values to try: `batch`, `length`, `precision`, `checkpoints` ("none", "blocks" or a plan's
            name), `mesh`, `card`; and `prices`, of an hour of a card by its name.
        options: further ones of `fxmem.analyze`.

    Raises:
        UsageError: a grid that cannot be understood, or has more than ten thousand points.
        AnalysisError: the model cannot be analysed with the inputs that it was given.
    """
    asked = grid if isinstance(grid, Space) else Space(**grid)
    check_grid(asked, plans or {})
    target = options.pop("target", "h100") if not asked.card else choose_cards(asked.card)[0]
    step = analyze(model, inputs, target=target, progress=progress, **options)
    return measure(step, asked, plans=plans or {}, kept=kept, keep=keep, progress=progress or (lambda _: None))


def check_grid(grid: Space, plans: Mapping[str, Plan], *, is_program: bool = False) -> None:
    """Refuse before the first analysis what cannot be tried. Raises UsageError."""
    for name in AXES:
        values = getattr(grid, name)
        if len(set(values)) < len(values):
            raise UsageError(f"expected each {name} once in the grid, got {', '.join(map(str, values))}")
    count = math.prod(len(getattr(grid, name)) or 1 for name in AXES)
    if count > MOST:
        raise UsageError(f"expected a grid of at most {MOST:,} points, got {count:,}")
    if is_program and (grid.length or grid.precision or grid.checkpoints or grid.mesh):
        raise UsageError("expected a program with a grid of batch and card: it says itself what else it does")
    for name in grid.checkpoints:
        if name not in (NONE, BLOCKS, *plans):
            raise UsageError(f"expected checkpoints none, blocks or a plan that is given, got {name!r}")
    for name in grid.mesh:
        if name != NONE:
            read_mesh(name)
    cards = [card.name for card in choose_cards(grid.card)] if grid.card else []
    for name in grid.prices:
        if cards and catalogue.target(name).name not in cards:
            raise UsageError(f"expected prices of the cards {', '.join(cards)}, got one of {name!r}")


def measure(
    step: ProfiledStep,
    grid: Space,
    *,
    plans: Mapping[str, Plan],
    kept: Fits | None = None,
    keep: Callable[[Fits], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Fits:
    """`sweep` for what is analysed, or a program that takes a size."""
    prices = {catalogue.target(name).name: price for name, price in grid.prices.items()}
    grid = grid.model_copy(update={"prices": prices})
    if isinstance(step, Analysis):
        source: _ModelCases | _ProgramCases = _ModelCases(step, grid, plans)
    elif isinstance(step, ProgramStep):
        source = _ProgramCases(step, grid)
    else:
        raise UsageError("expected a model or a program to sweep, got the record of a step")
    question, keys = source.question(), list(source.list_keys())
    asked = set(keys)
    known = kept.points if kept is not None and kept.digest == question else ()
    found = {_key(each): _with_cost(each, grid.prices) for each in known if _key(each) in asked}
    taken, analyses, notes = len(found), 0, dict[str, None]()

    def record() -> Fits:
        return Fits(
            **source.profile().heading(),
            space=grid,
            digest=question,
            cards=tuple(source.cards),
            dtypes=find_dtypes(source.profile(), [Kind.PARAMETER]),
            points=tuple(found[key] for key in keys if key in found),
            analyses=analyses,
            kept=taken,
            notes=tuple(notes),
            assumptions=tuple(source.assume()),
        )

    jobs = {case.title: case for case in source.cases() if any(key not in found for key in case.list_keys())}
    answers = run_forked(_Answer, {name: partial(_answer, case, found) for name, case in jobs.items()})
    with contextlib.closing(answers):
        for number, (name, made) in enumerate(answers, 1):
            found.update((_key(each), each) for each in made.points)
            analyses += made.analyses
            notes.update(dict.fromkeys(filter(None, [made.note])))
            keep(record())
            fitting = sum(each.fits is True for each in made.points)
            progress(f"{number} of {len(jobs)}, {name}: {fitting} of {len(made.points)} fit")
    return record()


class _Answer(Record):
    """What a job answers."""

    points: Many[Point]
    analyses: int
    note: str


def _key(point: Point) -> Key:
    return point.card, point.size, point.length, point.precision, point.checkpoints, point.mesh


def _with_cost(point: Point, prices: Mapping[str, float]) -> Point:
    price, ranks = prices.get(point.card), 1 if point.mesh == NONE else read_mesh(point.mesh).size
    cost = None if price is None or point.time is None else point.time.seconds / 3600 * price * ranks
    return point.model_copy(update={"cost": cost})


def _answer(case: _Case, found: Mapping[Key, Point]) -> _Answer:
    points = tuple(case.measure(found))
    return _Answer(points=points, analyses=case.analyses, note=case.note)


class _Sized(NamedTuple):
    """A step of one size."""

    step: ProfiledStep
    is_analysed: bool


@dataclass
class _Case:
    """The sizes and cards that share a precision, checkpoints, a mesh and a compute capability."""

    title: str
    cards: Sequence[Target]
    settings: tuple[str, str, str]
    """Precision, checkpoints and mesh."""
    sizes: Sequence[tuple[int | None, int | None]]
    """Batch and length of each."""
    prices: Mapping[str, float]
    samples: Callable[[int | None], int | None]
    run: Callable[[int | None, int | None], ProfiledStep]
    taped: bool = False
    analyses: int = 0
    note: str = ""

    def list_keys(self) -> Iterator[Key]:
        """The points of the case."""
        return ((card.name, batch, length, *self.settings) for batch, length in self.sizes for card in self.cards)

    def measure(self, found: Mapping[Key, Point]) -> Iterator[Point]:
        """The points that are not known yet."""
        sizes = [
            each for each in self.sizes if any((card.name, *each, *self.settings) not in found for card in self.cards)
        ]
        steps = self._step_all(sizes)
        for batch, length in sizes:
            try:
                sized: _Sized | FxmemError = steps(batch, length)
            except (AnalysisError, UsageError) as error:
                sized = error
            yield from (self._judge(sized, card, batch, length) for card in self.cards)

    def _judge(self, sized: _Sized | FxmemError, card: Target, batch: int | None, length: int | None) -> Point:
        precision, checkpoints, mesh = self.settings
        fields: dict[str, Any] = {
            "card": card.name, "size": batch, "length": length, "precision": precision, "checkpoints": checkpoints,
            "mesh": mesh, "room_bytes": room_bytes(card) or 0,
        }  # fmt: skip
        if isinstance(sized, FxmemError):
            return Point(**fields, is_analysed=True, fits=False, obstacle=f"It cannot run: {one_line(sized)}")
        step = sized.step
        profile = step.profile.model_copy(update={"target": card})
        point = Point(
            **fields,
            is_analysed=sized.is_analysed,
            **judge(step, step.within(fields["room_bytes"], card).peak, card),
            time=None if step.profile.step.program else step_time.estimate(profile, taped=self.taped),
            samples=self.samples(batch),
        )
        return _with_cost(point, self.prices)

    def _step_all(self, sizes: Sequence[tuple[int | None, int | None]]) -> Callable[..., _Sized]:
        """The step at any of these sizes: by forms where they are proved, else analysed."""
        known: dict[tuple[int | None, int | None], ProfiledStep] = {}

        def analyse(batch: int | None, length: int | None) -> _Sized:
            if (batch, length) not in known:
                known[batch, length] = self.run(batch, length)
                self.analyses += 1
            return _Sized(known[batch, length], is_analysed=True)

        axes = [n for n in range(2) if len({size[n] for size in sizes}) >= _LEAST_SIZES]
        groups: dict[Any, list[tuple[int | None, int | None]]] = {}
        for size in sizes:  # an axis of few values has forms of its own for each
            groups.setdefault(tuple(None if n in axes else size[n] for n in range(2)), []).append(size)
        found: dict[tuple[int | None, int | None], tuple[ProfileForms, Features]] = {}
        for group in groups.values() if axes else ():
            whole = {tuple(size[n] or 0 for n in axes): size for size in group}
            samples = choose_samples([*whole])
            if samples is None:
                continue
            try:
                forms = ProfileForms([(at, _read_logged(analyse(*whole[at]).step)) for at in samples.points])
            except (AnalysisError, UsageError) as error:
                self.note = f"{self.title}: each size analysed, as {error}"
                break
            found |= {size: (forms, at) for at, size in whole.items() if samples.covers(at)}

        def follow(batch: int | None, length: int | None) -> _Sized:
            forms, at = found.get((batch, length), (None, ()))
            if (batch, length) in known or forms is None:
                return analyse(batch, length)
            return _Sized(ReallocatedStep(forms.at(at), os.environ), is_analysed=False)

        return follow


def _read_logged(step: ProfiledStep) -> LoggedStep:
    if not isinstance(step, Analysis):
        raise LengthsUnproved("a program is run at each size")
    return step.logged()


class Samples(NamedTuple):
    """The sizes that prove forms for others."""

    points: Sequence[Features]
    steps: Sequence[int]
    """Of each length, what all samples are multiples of: what rounds lengths up is not seen at others."""

    def covers(self, at: Features) -> bool:
        """Whether forms of these samples may be asked for such sizes."""
        return all(length > 1 and length % step == 0 for length, step in zip(at, self.steps, strict=True))


def choose_samples(sizes: Sequence[Features]) -> Samples | None:
    """Choose the sizes to analyse, that all products of `POWERS` be determined and checked; None where all are few.

    They are at both ends, so that what changes in between does not go unseen. A length of 1 is none: torch squeezes it.
    """
    axes = [sorted(set(values) - {1}) for values in zip(*sizes, strict=True)]
    if any(len(axis) < _LEAST_SIZES for axis in axes):
        return None
    low, high, middle = [each[0] for each in axes], [each[-1] for each in axes], [each[len(each) // 2] for each in axes]
    rest = [next(x for x in axis if x not in used) for axis, *used in zip(axes, low, high, middle, strict=True)]
    if len(axes) == 1:
        points: list[Features] = [(low[0],), (high[0],), (middle[0],), (rest[0],)]
    else:
        (b, s), (most, longest), (half, mid), check = low, high, middle, (rest[0], rest[1])
        points = [(b, s), (most, s), (b, longest), (most, longest), (half, s), (b, mid), (most, mid), check]
    if len(points) >= len(sizes) or not set(points) <= set(sizes):
        return None
    assert len(points) > len(POWERS[len(axes)])
    return Samples(points, [math.gcd(*each) for each in zip(*points, strict=True)])


# --- what varies ------------------------------------------------------------------------------------------------------


class _ModelCases:
    """A model's step with each of the settings."""

    def __init__(self, base: Analysis, grid: Space, plans: Mapping[str, Plan]) -> None:
        self._base, self._grid, self._plans = base, grid, plans
        arguments = named_arguments(base.model, base.request.args, base.request.kwargs)
        self._batches = find_resizing(arguments, "batch") if grid.batch or grid.mesh else None
        self._lengths = find_resizing(arguments, "seq") if grid.length else None
        self.cards = choose_cards(grid.card) if grid.card else [base.profile.target]
        if any(each != NONE for each in grid.checkpoints):
            check_training(base)
        if grid.mesh and base.request.parallelize is not None:
            raise UsageError("expected meshes in the grid, or of the step itself: one of the two")
        if not grid.card and base.profile.target.memory_bytes is None:
            raise UsageError(f"expected cards whose memory is known, got {base.profile.target.name!r}")

    def profile(self) -> Profile:
        """Whose heading the answer has."""
        return self._base.profile

    def question(self) -> str:
        """A digest of all that decides a point."""
        plans = [self._plans[name].to_json() for name in self._grid.checkpoints if name in self._plans]
        return hashlib.sha256("\n".join([self._base.profile.model_dump_json(), *plans]).encode()).hexdigest()

    @cached_property
    def _settings(self) -> list[tuple[str, str, str]]:
        grid, request = self._grid, self._base.request
        mesh = str(request.parallelize.mesh) if isinstance(request.parallelize, MeshPlan) else NONE
        return list(
            itertools.product(
                grid.precision or (request.precision or NONE,), grid.checkpoints or (NONE,), grid.mesh or (mesh,)
            )
        )

    @cached_property
    def _sizes(self) -> list[tuple[int | None, int | None]]:
        return [(batch, length) for length in self._grid.length or (None,) for batch in self._grid.batch or (None,)]

    def list_keys(self) -> Iterator[Key]:
        """Every point, in the order of the grid."""
        for card in self.cards:
            for settings in self._settings:
                yield from ((card.name, *size, *settings) for size in self._sizes)

    def cases(self) -> Iterator[_Case]:
        """Every case."""
        alike: dict[tuple[Any, str], list[Target]] = {}
        for card in self.cards:
            alike.setdefault((card.capability, card.torch), []).append(card)
        for cards, settings in itertools.product(alike.values(), self._settings):
            _, checkpoints, mesh = settings
            words = [", ".join(card.name for card in cards)]
            named = zip(settings, ("precision", "checkpoints", "mesh"), strict=True)
            words += [f"{axis} {word}" for word, axis in named if getattr(self._grid, axis)]
            plan = self._plans.get(checkpoints)
            yield _Case(
                title=", ".join(words), cards=cards, settings=settings, sizes=self._sizes, prices=self._grid.prices,
                samples=partial(self._count_samples, mesh), run=partial(self._run, cards[0], settings),
                taped=plan is not None and plan.is_taped,
            )  # fmt: skip

    def _count_samples(self, mesh: str, batch: int | None) -> int | None:
        size = batch if batch is not None else None if self._batches is None else self._batches.size
        if size is None:
            size = _first_dimension(self._base)
        if size is None:
            return None
        parsed = Mesh() if mesh == NONE else read_mesh(mesh)
        return size * self._base.request.accumulate * (parsed.size // parsed.tp)

    def _run(self, card: Target, settings: tuple[str, str, str], batch: int | None, length: int | None) -> Analysis:
        """The step of these settings and sizes."""
        precision, checkpoints, mesh = settings
        request = self._base.request
        args, kwargs = request.args, request.kwargs
        for sizes, varied in ((batch, self._batches), (length, self._lengths)):
            if sizes is not None and varied is not None:
                args, kwargs = varied.resize(args, kwargs, sizes)
        changes: dict[str, Any] = {"args": args, "kwargs": kwargs, "target": card}
        if self._grid.precision:
            changes["precision"] = None if precision == NONE else PRECISIONS[precision]
        if self._grid.mesh and mesh != NONE:
            plan = MeshPlan(read_mesh(mesh))
            changes |= {"parallelize": plan, "ranks": plan.mesh.size, "rank": 0}
        return self._base.vary(self._prepare(checkpoints), **changes)

    @cache  # noqa: B019 - the cases live no longer than their models
    def _prepare(self, checkpoints: str) -> nn.Module:
        """The model with these checkpoints."""
        if checkpoints == NONE:
            return self._base.model
        if checkpoints in self._plans:
            plan = self._plans[checkpoints]
            return checkpointing.apply(shadow_model(self._base.model), plan.regions, plan.application)
        blocks = {id(block) for block in find_blocks(self._base.model)}
        paths = [path for path, module in self._base.model.named_modules() if id(module) in blocks]
        if not paths:
            raise UsageError("expected a model with repeated blocks, got none; name a plan of `fxmem plan`")
        regions = [Region(first_node=0, last_node=1, modules=(path,)) for path in paths]
        return checkpointing.apply(shadow_model(self._base.model), regions, Application.MODULES)

    def assume(self) -> Iterator[Assumption]:
        """What is taken for granted beside the assumptions of the step itself."""
        yield from self._base.profile.missing_loss
        if any(step_time.has_rates(card) for card in self.cards):
            yield Assumption(topic="time", text=step_time.COMPARED)
        old = [card.name for card in self.cards if card.capability is not None and card.capability < (8, 0)]
        if old and any(precision == "bf16" for precision, *_ in self._settings):
            text = f"of bfloat16 products on {', '.join(old)} no rate is published: their time is unknown"
            yield Assumption(topic="time", text=text)
        yield Assumption(
            topic="sweep",
            text="where a point was not analysed itself, its operators are those of the analysed ones, whose sizes are "
            "functions of batch and length; kernels' own memory is asked for anew at each size",
        )
        if any(each != NONE for each in self._grid.mesh):
            yield Assumption(
                topic="ranks", text="a mesh's batch is that of a rank, of which rank 0 is shown; time and cost are "
                "without what ranks send"
            )  # fmt: skip


def _first_dimension(step: ProfiledStep) -> int | None:
    shape = step.profile.inputs[0].shape if step.profile.inputs else ()
    return shape[0] if shape else None


class _ProgramCases:
    """A program with each size and card; it runs for each."""

    def __init__(self, step: ProgramStep, grid: Space) -> None:
        self._step, self._grid = step, grid
        self.cards = choose_cards(grid.card) if grid.card else [step.program.target]
        if not grid.batch:
            raise UsageError("expected sizes of batch in the grid, for the {} among the program's arguments")
        _ = step.program.varied

    @cached_property
    def _first(self) -> Profile:
        return self._run(self.cards[0])(self._grid.batch[0], None).profile

    def profile(self) -> Profile:
        """Whose heading the answer has."""
        return self._first.model_copy(update={"model": self._step.program.name})

    def question(self) -> str:
        """A digest of the first size's steps."""
        ops = self._first.model_dump_json(include={"ops", "storages", "target", "torch_version"})
        return hashlib.sha256(f"{self._step.program.name}\n{ops}".encode()).hexdigest()

    def list_keys(self) -> Iterator[Key]:
        """Every point, in the order of the grid."""
        return ((card.name, batch, None, NONE, NONE, NONE) for card in self.cards for batch in self._grid.batch)

    def cases(self) -> Iterator[_Case]:
        """Every case."""
        for card, batch in itertools.product(self.cards, self._grid.batch):
            yield _Case(
                title=f"{card.name}, {self._step.program.varied.replace('{}', str(batch))}", cards=[card],
                settings=(NONE, NONE, NONE), sizes=[(batch, None)], prices=self._grid.prices,
                samples=lambda _: None, run=self._run(card),
            )  # fmt: skip

    def _run(self, card: Target) -> Callable[[int | None, int | None], ProfiledStep]:
        return lambda batch, _: ProgramStep(self._step.program.at_size(batch or 0, card))

    def assume(self) -> Iterable[Assumption]:
        """What is taken for granted beside the assumptions of a run."""
        return ()
