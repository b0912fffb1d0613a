"""Points of a space of settings, measured: the ground of `cards`, `max_batch`, `shard` and `sweep`.

Points share what they can. Cards of one compute capability share the step. Where its sizes are functions of batch and
length, those of a few analysed ones give the others (`fxmem.memory.lengths.ProfileForms`); else each is analysed. These
jobs run side by side, in forks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.hardware import catalogue
from fxmem.hardware.catalogue import CATALOGUE
from fxmem.hardware.context import room_bytes
from fxmem.memory.lengths import POWERS, Features, LengthsUnproved, ProfileForms
from fxmem.records.fits import NONE, Fits, Point, Settings, Space
from fxmem.records.profile import Headed, Many, Peak, Record, Target
from fxmem.simulation.code.profiled_step import ProfiledStep, ReallocatedStep
from fxmem.simulation.processes.executor import run_forked
from fxmem.simulation.ranks import read_mesh
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.source import ModelSource, Source

OPEN: Final = "Sizes depend on data, and are counted at the largest they can be. "
"""Before what a step lacks of which it is not known whether it fits."""
_LEAST_SIZES: Final = 4
"""Sizes of an axis that prove a form: three give it, a fourth checks it."""

_SizeOf = tuple[int | None, int | None]
"""Size and length of settings."""


def choose_cards(names: Iterable[str] | None) -> list[Target]:
    """The cards of these names, each once; all of the catalogue for None. Raises UsageError where one has no memory."""
    wanted = (
        [card.target for card in CATALOGUE.values() if card.target.device == "cuda"]
        if names is None
        else [catalogue.target(name) for name in names]
    )
    for card in wanted:
        if card.memory_bytes is None or card.device != "cuda":
            raise UsageError(f"expected cards whose memory is known, got {card.name!r}")
    if not wanted:
        raise UsageError("expected at least one card, got none; leave them out for the whole catalogue")
    return list({card.name: card for card in wanted}.values())


def judge(step: ProfiledStep, peak: Peak, card: Target | None = None) -> dict[str, Any]:
    """The fields of a point that say whether a step fits, with its peak in that memory; of another card if given."""
    is_own = card is None or card.name == step.profile.target.name
    if is_own and step.profile.step.program and not peak.shortage:
        peak = peak.model_copy(update={"shortage": step.peak.shortage})  # its own allocator's
    is_open = peak.may_be_within(peak.room_bytes)
    return {
        "requested_bytes": peak.requested_bytes,
        "allocated_bytes": peak.allocated_bytes,
        "reserved_bytes": peak.reserved_bytes,
        "phase": peak.phase,
        "fits": (None if is_open else False) if peak.shortage else True,
        "obstacle": f"{OPEN if is_open else ''}{peak.shortage}" if peak.shortage else "",
    }


class _Answer(Record):
    """The points of a job."""

    points: Many[Point]
    analyses: int
    note: str


@dataclasses.dataclass
class Measuring:
    """Measures points of a source, and counts the analyses."""

    source: Source
    space: Space
    cards: Sequence[Target]
    room: int | None = None
    """Bytes in the place of what each card has."""
    analyses: int = 0
    notes: dict[str, None] = dataclasses.field(default_factory=dict)
    steps: list[tuple[ProfiledStep, list[Point]]] = dataclasses.field(default_factory=list)
    """Each step with its points, where plans are to be made of them."""

    def __post_init__(self) -> None:
        self._by_name = {card.name: card for card in self.cards}

    def record(self, about: Headed, points: Iterable[Point], **fields: Any) -> Fits:
        """The answer; `about` has its heading."""
        own = {"space": self.space, "cards": tuple(self.cards), "analyses": self.analyses, "notes": tuple(self.notes)}
        return Fits(**about.heading(), points=tuple(points), **{**own, **fields})

    def measure_one(self, at: Settings, step: ProfiledStep | None = None) -> Point:
        """A point, of a step that is known or of its own. Where it cannot run it does not fit."""
        self.analyses += 1
        try:
            return self.judge(at, self.source.run(at, self._by_name[at.card]) if step is None else step)
        except (AnalysisError, UsageError) as error:
            return self._refuse(at, error)

    def measure(
        self, points: Iterable[Settings], tell: Callable[[str], None] = lambda _: None
    ) -> Iterator[Many[Point]]:
        """All these points, those that share a step or its forms together, as they come."""
        points, is_model = list(points), isinstance(self.source, ModelSource)
        axes = _list_axes((at.size, at.length) for at in points) if is_model else []
        shared: dict[Any, dict[_SizeOf, list[Settings]]] = {}
        for at in points:
            card, size = self._by_name[at.card], (at.size, at.length)
            alike = (card.capability, card.torch, at.precision, at.checkpoints, at.mesh, at.accumulate)
            own = (not axes and size, at.size is not None and not is_model and at.card)
            shared.setdefault((*alike, *own), {}).setdefault(size, []).append(at)
        groups = list(shared.values())
        titles = [self._describe(sizes) for sizes in groups]
        jobs = {str(n): partial(self._answer, *each) for n, each in enumerate(zip(titles, groups, strict=True))}
        # Plans are made on the steps themselves, which do not leave a fork.
        planned = ((name, job()) for name, job in jobs.items())
        with contextlib.closing(planned if self.space.planned else run_forked(_Answer, jobs)) as answers:
            for number, (name, made) in enumerate(answers, 1):
                self.analyses += made.analyses
                self.notes.update(dict.fromkeys(filter(None, [made.note])))
                fitting = sum(each.fits is True for each in made.points)
                tell(f"{number} of {len(jobs)}, {titles[int(name)]}: {fitting} of {len(made.points)} fit")
                yield made.points

    def _describe(self, sizes: Mapping[_SizeOf, Sequence[Settings]]) -> str:
        first, *others = (at for group in sizes.values() for at in group)
        words = dict.fromkeys(at.card for at in (first, *others))
        words |= {f"batch {first.size}": None} if self.space.batch and len(sizes) == 1 else {}
        varied = (name for name in ("precision", "checkpoints", "mesh") if getattr(self.space, name))
        return ", ".join([*words, *(f"{name} {getattr(first, name)}" for name in varied)])

    def _answer(self, title: str, sizes: Mapping[_SizeOf, Sequence[Settings]]) -> _Answer:
        """The points of these sizes: by forms where they are proved, else analysed."""
        every = [at for group in sizes.values() for at in group]
        # On the largest card, where nothing that is cached has to be given back.
        first = max(every, key=lambda at: self._by_name[at.card].memory_bytes or 0)
        known: dict[_SizeOf, ProfiledStep] = {}

        def analyse(size: _SizeOf) -> ProfiledStep:
            if size not in known:
                at = first.model_copy(update={"size": size[0], "length": size[1]})
                known[size] = self.source.run(at, self._by_name[first.card])
            return known[size]

        formed: dict[_SizeOf, tuple[ProfileForms, Features]] = {}
        points, note = list[Point](), ""
        try:
            formed.update(_find_forms(list(sizes), analyse))
        except (AnalysisError, UsageError) as error:
            note = f"{title}: each size analysed, as {error}"
        for size, alike in sizes.items():
            is_analysed = size in known or size not in formed
            try:
                step = analyse(size) if is_analysed else _follow(*formed[size])
                made = [self.judge(at, step, is_analysed=is_analysed) for at in alike]
            except (AnalysisError, UsageError) as error:
                if self.space.question == "cards":  # whose table has no place for the reason
                    raise
                made = [self._refuse(at, error) for at in alike]
            else:
                self.steps += [(step, made)] if self.space.planned else []
            points += made
        return _Answer(points=tuple(points), analyses=len(known), note=note)

    def _find_room(self, at: Settings, ranks: int) -> int:
        return self.room if self.room is not None else room_bytes(self._by_name[at.card].among(ranks)) or 0

    def _refuse(self, at: Settings, error: FxmemError) -> Point:
        obstacle = f"It cannot run: {one_line(error)}"
        return Point(**dict(at), room_bytes=self._find_room(at, _count_ranks(at)), fits=False, obstacle=obstacle)

    def judge(self, at: Settings, step: ProfiledStep, *, is_analysed: bool = True) -> Point:
        """The point of a step."""
        card, plan = self._by_name[at.card], self.source.plans.get(at.checkpoints)
        room = self._find_room(at, step.profile.target.ranks)
        peak, retries = step.within(room, card)
        is_timed = self.space.question == "cards" or not (step.profile.step.program or step.profile.step.generation)
        point = Point(
            **dict(at),
            room_bytes=room,
            is_analysed=is_analysed,
            time=step.estimate_time(card, taped=plan is not None and plan.is_taped) if is_timed else None,
            alloc_retries=retries,
            samples=self.source.count_samples(at) if self.space.question == "grid" else None,
            **judge(step, peak, card),
        )
        return self.price(point)

    def price(self, point: Point) -> Point:
        """The point with its cost."""
        price = self.space.prices.get(point.card)
        each = None if price is None or point.time is None else point.time.seconds / 3600 * price
        return point.model_copy(update={"cost": None if each is None else each * max(_count_ranks(point), 1)})


def _count_ranks(at: Settings) -> int:
    return 0 if at.mesh == NONE else read_mesh(at.mesh).size


# --- sizes that follow from others ------------------------------------------------------------------------------------


def _list_axes(sizes: Iterable[_SizeOf]) -> list[int]:
    """Which of size and length have enough values for forms."""
    return [n for n, values in enumerate(zip(*sizes, strict=True)) if len(set(values)) >= _LEAST_SIZES]


def _find_forms(
    sizes: Sequence[_SizeOf], analyse: Callable[[_SizeOf], ProfiledStep]
) -> Iterator[tuple[_SizeOf, tuple[ProfileForms, Features]]]:
    """The forms of sizes that follow from those of a few. Raises LengthsUnproved, or the error of an analysis."""
    axes = _list_axes(sizes)
    groups: dict[Any, list[_SizeOf]] = {}
    for size in sizes:  # an axis of few values has forms of its own for each
        groups.setdefault(tuple(None if n in axes else size[n] for n in range(2)), []).append(size)
    for group in groups.values() if axes else ():
        whole = {tuple(size[n] or 0 for n in axes): size for size in group}
        samples = choose_samples([*whole])
        if samples is None:
            continue
        steps = [(at, analyse(whole[at])) for at in samples.points]
        if not all(isinstance(step, Analysis) for _, step in steps):
            raise LengthsUnproved("tokens are made at each size")
        forms = ProfileForms([(at, step.logged()) for at, step in steps if isinstance(step, Analysis)])
        yield from ((size, (forms, at)) for at, size in whole.items() if samples.covers(at))


def _follow(forms: ProfileForms, at: Features) -> ProfiledStep:
    return ReallocatedStep(forms.at(at), os.environ)


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
