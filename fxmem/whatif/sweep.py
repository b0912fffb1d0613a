"""A step over a grid of settings: what fits which card, how long it takes, and what it costs."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import nn

from fxmem.errors import UsageError
from fxmem.hardware import catalogue, step_time
from fxmem.memory.figures import find_dtypes
from fxmem.records.fits import AXES, NONE, Fits, Settings, Space
from fxmem.records.plan import Plan
from fxmem.records.profile import Assumption, Kind, Many, Profile, Target
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.ranks import read_mesh
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.fits import Measuring, choose_cards
from fxmem.whatif.plan_search import check_training
from fxmem.whatif.program_step import ProgramStep
from fxmem.whatif.source import BLOCKS, ModelSource, Source, StepSource, take_step

MOST: Final = 10_000
"""Points of a grid."""


def sweep(
    model: ProfiledStep | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
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
        model: as for `fxmem.analyze`; or what it returned, without inputs and options.
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
    grid, plans = grid if isinstance(grid, Space) else Space(**grid), plans or {}
    check_grid(grid, plans)
    target = choose_cards(grid.card)[0] if grid.card else options.pop("target", "h100")
    mode = options.pop("mode", "train")
    step = take_step(model, inputs, mode=mode, target=target, progress=progress, options=options)
    own = step.program.target if isinstance(step, ProgramStep) else step.profile.target
    cards = choose_cards(grid.card) if grid.card else [own]
    if cards[0].memory_bytes is None:
        raise UsageError(f"expected cards whose memory is known, got {cards[0].name!r}")
    if isinstance(step, Analysis):
        asked = _ask_model(step, grid, plans, cards)
    elif isinstance(step, ProgramStep):
        asked = _ask_program(step, grid, cards)
    else:
        raise UsageError("expected a model or a program to sweep, got the record of a step")
    prices = {catalogue.target(name).name: price for name, price in grid.prices.items()}
    work = Measuring(asked.source, grid.model_copy(update={"prices": prices}), cards)
    points, digest = [*_list_points(asked.source, grid, cards)], hashlib.sha256(asked.decides.encode()).hexdigest()
    known, wanted = kept.points if kept is not None and kept.digest == digest else (), set(points)
    found = {each.at: work.price(each) for each in known if each.at in wanted}
    fields: dict[str, Any] = {"digest": digest, "kept": len(found), "assumptions": asked.assumptions}
    fields["dtypes"] = find_dtypes(asked.profile, [Kind.PARAMETER])
    for made in work.measure([at for at in points if at not in found], progress or (lambda _: None)):
        found.update((each.at, each) for each in made)
        keep(work.record(asked.profile, [found[at] for at in points if at in found], **fields))
    return work.record(asked.profile, [found[at] for at in points], **fields)


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


class _Asked(NamedTuple):
    """A step that is swept."""

    source: Source
    profile: Profile
    """Whose heading the answer has."""
    decides: str
    """All that decides a point."""
    assumptions: Many[Assumption] = ()


def _ask_model(step: Analysis, grid: Space, plans: Mapping[str, Plan], cards: Sequence[Target]) -> _Asked:
    source = ModelSource.of(step, plans=plans)
    if any(each != NONE for each in grid.checkpoints):
        check_training(step)
    if grid.mesh and step.request.parallelize is not None:
        raise UsageError("expected meshes in the grid, or of the step itself: one of the two")
    for name, axis in (("batch", "sizes"), ("length", "lengths")):
        if getattr(grid, name):
            getattr(source, axis)  # inputs without it are refused now
    decides = [step.profile.model_dump_json(), *(plans[name].to_json() for name in grid.checkpoints if name in plans)]
    return _Asked(source, step.profile, "\n".join(decides), tuple(_assume(step, grid, cards)))


def _ask_program(step: ProgramStep, grid: Space, cards: Sequence[Target]) -> _Asked:
    if not grid.batch:
        raise UsageError("expected sizes of batch in the grid, for the {} among the program's arguments")
    if len(step.program.starts) > 1:
        raise UsageError("expected one size that varies in a grid; of two, fxmem max-batch finds what fits")
    source = StepSource(step)
    profile = source.run(source.at(cards[0], size=grid.batch[0]), cards[0]).profile
    ops = profile.model_dump_json(include={"ops", "storages", "target", "torch_version"})
    name = step.program.name
    return _Asked(source, profile.model_copy(update={"model": name}), f"{name}\n{ops}")


def _list_points(source: Source, grid: Space, cards: Sequence[Target]) -> Iterator[Settings]:
    """Every point, in the order of the grid."""
    given, names = source.at(cards[0]), ("precision", "checkpoints", "mesh", "length")
    values = (getattr(grid, name) or (getattr(given, name),) for name in names)
    for card, *settings, size in itertools.product([each.name for each in cards], *values, grid.batch or (None,)):
        changed = dict(zip(names, settings, strict=True))
        yield given.model_copy(update={"card": card, **changed, "size": size})


def _assume(step: Analysis, grid: Space, cards: Sequence[Target]) -> Iterator[Assumption]:
    """What is taken for granted beside the assumptions of the step itself."""
    yield from step.profile.missing_loss
    if any(step_time.has_rates(card) for card in cards):
        yield Assumption(topic="time", text=step_time.COMPARED)
    old = [card.name for card in cards if card.capability is not None and card.capability < (8, 0)]
    if old and "bf16" in (grid.precision or (step.request.precision,)):
        text = f"of bfloat16 products on {', '.join(old)} no rate is published: their time is unknown"
        yield Assumption(topic="time", text=text)
    yield Assumption(
        topic="sweep",
        text="where a point was not analysed itself, its operators are those of the analysed ones, whose sizes are "
        "functions of batch and length; kernels' own memory is asked for anew at each size",
    )
    if any(each != NONE for each in grid.mesh):
        yield Assumption(
            topic="ranks", text="a mesh's batch is that of a rank, of which rank 0 is shown; time and cost are "
            "without what ranks send"
        )  # fmt: skip
