"""How large an input may be, found by analysing the step at each size.

No formula decides. A line through the sizes analysed so far only proposes the next one, so that few are needed; the
size returned was analysed and fits, the next one was analysed and does not. A larger size that was not tried may fit as
well: library workspaces do not always grow with the input, and which pieces an allocator has left depends on every
size before (ResNet-18 on a T4 fits with a batch of 685 and of 687, and not of 686).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch

from fxmem.errors import UsageError
from fxmem.hardware import catalogue, step_time
from fxmem.hardware.context import give_room, room_bytes
from fxmem.memory.budget import BudgetLike, parse_bytes
from fxmem.records.fits import FITS_WORDS, Fits, Point, Space, find_enough
from fxmem.records.profile import Assumption, Profile, Step, Target
from fxmem.records.units import AnyMode, format_bytes
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.generation import AnyAnalysis, Generation
from fxmem.whatif.fits import Measuring
from fxmem.whatif.program_step import ProgramStep, fill_place, program_step
from fxmem.whatif.source import Change, ModelSource, Resizing, Source, StepSource, open_source, take_step

# --- the search for the largest size that fits, over any function that measures a size --------------------------------


def search(
    measure: Callable[[int], Point],
    room: int,
    *,
    start: int,
    limit: int,
    also: tuple[int, ...] = (),
    unit: int = 1,
    grain: int = 1,
) -> list[Point]:
    """Measure sizes until one that fits stands beside one that does not; return the points in that order.

    The first is `start`, then come those of `also`, so that there is a line from the beginning.

    Between what fits and what does not, the next size is in the middle of where the line through the two nearest points
    says that reserved bytes (below it, all fits) and allocated bytes (above it, nothing does) reach the room; after a
    step that did not halve what was left, it is in the middle of that. Before anything failed to fit, the line is
    followed upwards; after two steps that did not double the size together, it doubles. Ends with `n` that fits and `n
    + 1` that does not both measured, with `limit` that fits, or with 1 that does not.

    A size at which the model cannot run does not fit; one below every size that ran is taken to be too small for it.

    With a `unit` above 1 a size may be the side of an image: multiples of it come first, the line is in the power of
    the size that three points are nearest to, and before there are three, a size is at most eight times what fits. With
    a `grain` it ends with neighbours that are so far apart.

    What is interrupted says between which sizes it was, in a note of the exception.
    """
    points: dict[int, Point] = {}
    try:
        for size in (start, *also):
            points[size] = measure(size)
        _narrow(points, measure, room, limit, unit, grain)
    except BaseException as error:
        if points:
            below, above = _bracket(points, limit)
            error.add_note(f"so far {below or 'none'} fits" + (f", {above} does not" if above <= limit else ""))
        raise
    return list(points.values())


def _narrow(
    points: dict[int, Point], measure: Callable[[int], Point], room: int, limit: int, unit: int, grain: int
) -> None:
    """Measure on until one that fits stands beside one that does not."""
    below, above = _bracket(points, limit)
    guided, before = True, 0
    while above - below > grain:
        size = _propose_size(points, room, below, above, guided=guided, limit=limit, unit=unit)
        points[size] = measure(size)
        doubled, left, before = 2 * before, above - below, below
        below, above = _bracket(points, limit)
        guided = not guided or (below >= doubled if above > limit else 2 * (above - below) <= left)


def _bracket(points: Mapping[int, Point], limit: int) -> tuple[int, int]:
    """Return the largest size known to fit and the smallest known not to. The first is 0 if there is none, or a size
    too small to run; the second at most `limit + 1`."""
    smallest_run = min((size for size, point in points.items() if point.counted_bytes is not None), default=0)
    below = max((size for size, point in points.items() if point.fits or size < smallest_run), default=0)
    return below, min((size for size, point in points.items() if size > below and not point.fits), default=limit + 1)


def _propose_size(
    points: Mapping[int, Point], room: int, below: int, above: int, *, guided: bool, limit: int, unit: int
) -> int:
    """The size to measure next, strictly between `below` and `above`."""
    nothing_failed = above > limit
    surely, hardly = _reach(points, room, below, above, unit) if guided else (None, None)
    if surely is None or hardly is None:
        size = 2 * below if nothing_failed else (below + above) // 2
    elif nothing_failed:
        # Far away the line is coarse: what fits for certain is the better stepping stone. Near, look for what does not
        # fit.
        size = surely if 4 * surely >= 5 * below else hardly + 1
    else:
        size = (min(max(surely, below), above - 1) + min(max(hardly + 1, below + 1), above)) // 2
    if unit > 1 and nothing_failed and len(points) < 3:
        size = min(size, 8 * below)
    size = min(max(size, below + 1), above - 1)
    whole = -(-size // unit) * unit
    return next((each for each in (whole, whole - unit) if below < each < above), size)


def _reach(points: Mapping[int, Point], room: int, below: int, above: int, unit: int) -> tuple[int | None, int | None]:
    """Return the sizes at which reserved and allocated bytes reach the room. Each is on the line through the two
    points nearest to the bracket."""
    ran = sorted(size for size, point in points.items() if point.counted_bytes is not None)
    under, over = [size for size in ran if size <= below], [size for size in ran if size >= above]
    pair = sorted({*under[-1:], *over[:1]})
    if len(pair) < 2:
        pair = under[-2:] or over[:2]
    if len(pair) < 2:
        return None, None

    near = sorted({*under[-2:], *over[:1]}) if over else under[-3:]
    power = 1 if unit == 1 or len(near) < 3 else _find_power([(size, points[size].counted_bytes or 0) for size in near])

    def cross(figure: Callable[[Point], int | None]) -> int | None:
        (one, low), (other, high) = ((size, figure(points[size]) or 0) for size in pair)
        if high <= low:
            return None
        reached = one**power + (room - low) * (other**power - one**power) // (high - low)
        return reached if power == 1 else int(max(reached, 0) ** (1 / power))

    reserved = cross(lambda each: each.counted_bytes if each.reserved_bytes is None else each.reserved_bytes)
    return reserved, cross(lambda each: each.counted_bytes)


def _find_power(points: Sequence[tuple[int, int]]) -> int:
    """The power of the size (1 to 3) whose line through the outer of three points is nearest to the one between."""
    (least, low), (middle, between), (most, high) = points

    def miss(power: int) -> Fraction:
        way = Fraction(middle**power - least**power, most**power - least**power)
        return abs(between - low - (high - low) * way)

    return min((1, 2, 3), key=miss)


def fit_line(points: Sequence[Point], largest: int | None) -> tuple[int, int, int] | None:
    """Fit the least-squares line through the counted bytes near the largest size. Returns slope, intercept and largest
    distance, in bytes.

    Near is from half of it to twice of it, or the two nearest points if there are no two there; None if fewer than two
    ran, or if it is off by more than a tenth of the most bytes.
    """
    ran = [(point.size or 0, point.counted_bytes) for point in points if point.counted_bytes is not None]
    if len(ran) < 2:
        return None
    anchor = ran[0][0] if largest is None else largest
    near = [(size, nbytes) for size, nbytes in ran if anchor <= 2 * size <= 4 * anchor]
    if len(near) < 2:
        near = sorted(ran, key=lambda point: abs(point[0] - anchor))[:2]
    mean_size = Fraction(sum(size for size, _ in near), len(near))
    mean_bytes = Fraction(sum(nbytes for _, nbytes in near), len(near))
    slope = sum((size - mean_size) * nbytes for size, nbytes in near) / sum((size - mean_size) ** 2 for size, _ in near)
    intercept = mean_bytes - slope * mean_size
    off = round(max(abs(nbytes - intercept - slope * size) for size, nbytes in near))
    return None if 10 * off > max(nbytes for _, nbytes in ran) else (round(slope), round(intercept), off)


# --- how large an input may be, found by analysing the step at each size ----------------------------------------------


LIMIT = 65536
"""Largest size that is tried unless another is asked for."""
START = 8
"""Size of a program that is tried first unless another is asked for."""

Goal = Literal["memory", "throughput"]
"""What is looked for: the largest size that fits, or also the smallest that is as fast, sample for sample."""

_POSITION_TABLES = ("wpe", "position_embeddings", "embed_positions")
"""Endings of what transformers calls a table of positions."""
_UNIT = 32
"""What a program's size is a multiple of where that is open: networks halve an image's side up to five times."""
_SHARES = tuple(map(Fraction, ("1/4", "1/2", "2", "4")))
"""Of the second of two sizes where both grow together: at each, the largest first one is looked for, too."""
_CURVE_QUARTERS = (1, 2, 3)
"""Quarters of the largest size that are analysed beside what the search tried, so that the curve is known where people
read it."""


def max_batch(  # noqa: PLR0913 - the settings of the public API, by keyword
    model: ProfiledStep | torch.nn.Module | Callable[..., Any],
    inputs: Any = None,
    *,
    mode: AnyMode = "train",
    target: str | Target = "h100",
    budget: BudgetLike | None = None,
    dim: str | int = "batch",
    limit: int = LIMIT,
    goal: Goal = "memory",
    change: Change | None = None,
    start: int = START,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fits:
    """Find the largest fitting size of an input's dimension, and peak and time by size.

    Takes about ten analyses: three or four to get near, one or two for each halving of what the allocator's cache
    leaves uncertain, three for the curve below.

    Args:
        model: as for `fxmem.analyze`; or what it returned, without options. Else without `inputs`, a function of the
            size that trains as a script does, `train(batch_size)`: it runs inside `fxmem.record`.
        inputs: as for `fxmem.analyze`; the search begins with the size they have. Tensors that change size lose their
            values.
        mode: as for `fxmem.analyze`; or "generate" for `fxmem.generate`. A generation fits where the first of a process
            runs to its last token, even if the allocator has to give its cache back and ask again.
        target: as for `fxmem.analyze`; the step has to fit what a CUDA context leaves of its memory.
        budget: bytes or "16GiB" that the allocator may have instead; a CUDA context comes on top.
        dim: "batch" for dimension 0 of the first tensor, or the number of another of its dimensions, and the same
            dimension of all tensors that have the same size there; "seq" for dimension 1 of the 2-d integer tensors,
            and of other 2-d tensors of their shape; or "NAME:AXIS[,NAME:AXIS]...", where NAME is what the forward
            calls it. Not for a function. Of a generation also "context": prompt and new tokens together, as the prompt
            varies.
        limit: no larger size is tried.
        goal: "throughput" also finds the smallest size that reaches 95 % of the best estimated throughput, within a
            tenth (`Fits.enough`). Not for a function.
        change: is applied to the step at every size, the given one included. Not for a function.
        start: the size of a function that is tried first.
        progress: called with a few words on each size.
        options: further ones of `fxmem.analyze` or `fxmem.generate`; of `fxmem.record` for a function, whose `steps`
            are 3 unless given.

    Raises:
        UsageError: a budget, dimension or option that cannot be understood; a target whose memory is not known, and no
            budget.
        AnalysisError: the model cannot be analysed at the size it was given (or at `limit`, if that is less). Where it
            raises at another size, that size does not fit.
    """
    if limit < 1:
        raise UsageError(f"expected a limit of at least 1, got {limit}")
    if not isinstance(model, ProfiledStep):  # a wrong budget is found before the work is done
        target = catalogue.target(target) if isinstance(target, str) else target
        _find_room(target, budget)
        _check_goal(goal, target)
    if inputs is not None or isinstance(model, ProfiledStep):
        step = take_step(model, inputs, mode=mode, target=target, progress=progress, options=options)
    elif isinstance(model, torch.nn.Module):
        raise UsageError("expected the inputs of a module; without them, a function of the size that trains")
    elif mode != "train":
        raise UsageError(f"expected the inputs of a model for mode {mode!r}; a function of the size trains")
    else:
        step = program_step(model, target=target, **options)
    own = step.program.target if isinstance(step, ProgramStep) else step.profile.target
    room = _find_room(own, budget)
    _check_step(step, goal, change)
    source, card, resized = open_source(step, dim=dim, change=change), own, tuple[str, ...]()
    other, starts = "", [start]
    if isinstance(source, ModelSource):
        starts, resized = [source.new_tokens + source.sizes.size], source.sizes.names
    elif isinstance(step, ProgramStep):  # with a budget, it finds itself on a card that leaves it so much
        starts = [each or start for each in step.program.starts.values()]
        (dim, *others), card = step.program.varied or ("size",), give_room(own, room)
        other = "".join(others)
    is_budget = budget is not None
    space = Space(question="largest", dim=str(dim), other=other, resized=resized, limit=limit, is_budget=is_budget)
    work = Measuring(source, space, [card], room)
    first = {name: min(start, limit) for name, start in zip(("size", "length"), starts, strict=False)}
    at_first = source.run(source.at(card, **first), card)  # a step that raises here ends the search
    if isinstance(step, ProgramStep):
        record = at_first.profile.step.model_copy(update={"program": None})
        fields = {"model": step.program.name, "target": own, "step": record}
        about: Profile = at_first.profile.model_copy(update=fields)
    else:
        about = step.profile
    tell = progress or (lambda _: None)
    if other:
        points, largest = _measure_border(work, first, at_first, limit, tell)
    else:
        points = _measure_sizes(work, {first["size"]: at_first}, limit=limit, goal=goal, tell=tell)
        largest = _find_largest(points)
    slope, constant, error = (None if other else fit_line(points, largest)) or (None, None, None)
    counted = [point.counted_bytes for point in points if point.counted_bytes is not None]
    table, positions = _find_positions(source)
    notes = (*_note_positions(source, table, positions, largest), *_note_standstill(source, points))
    return work.record(
        about,
        points,
        cards=(own,),
        largest=largest,
        positions=positions if table else None,
        per_sample_bytes=slope,
        constant_bytes=constant,
        line_error_bytes=error,
        monotone=counted == sorted(counted) if len(counted) > 1 and not other else None,
        assumptions=(*notes, *about.missing_loss),
    )


def find_smaller(analysis: AnyAnalysis, step: ProfiledStep, varied: Resizing, room: int, change: Change) -> int | None:
    """The largest size up to an analysed step's that fits so many bytes; None if none does. No curve is measured.

    Args:
        analysis: of the step as it is.
        step: the same, changed.
        varied: the dimension, which has the step's size.
        room: bytes that the allocator may have.
        change: what is done to the step of another size.
    """
    source, card = ModelSource.of(analysis, change=change), analysis.profile.target
    work = Measuring(source, Space(question="largest"), [card], room)

    def measure(size: int) -> Point:
        return work.measure_one(source.at(card, size=size), step if size == varied.size else None)

    return _find_largest(search(measure, room, start=varied.size, also=(1,), limit=varied.size))


def _measure_sizes(
    work: Measuring, known: Mapping[int, ProfiledStep], *, limit: int, goal: Goal, tell: Callable[[str], None]
) -> list[Point]:
    """Every point of the curve, the smallest first; the step of the first size is known."""
    (card,), (first,), room = work.cards, known, work.room or 0

    def measure(size: int) -> Point:
        point = work.measure_one(work.source.at(card, size=size), known.get(size))
        tell(_describe_point(work.space, point))
        return point

    unit = _UNIT if isinstance(work.source, StepSource) else 1
    points = search(measure, room, start=first, limit=limit, unit=unit)
    largest, tried = _find_largest(points), {_size(point) for point in points}
    quarters = {(largest or 0) * quarter // 4 for quarter in _CURVE_QUARTERS}
    quarters = {each // unit * unit if each > unit else each for each in quarters} - {0} - tried
    for made in work.measure(work.source.at(card, size=size) for size in sorted(quarters)):
        points += made
        tell(_describe_point(work.space, made[0]))
    points.sort(key=_size)
    while goal == "throughput" and (between := _propose_enough(points)) is not None:
        points = sorted([*points, measure(between)], key=_size)
    return points


def _measure_border(
    work: Measuring, first: Mapping[str, int], at_first: ProfiledStep, limit: int, tell: Callable[[str], None]
) -> tuple[list[Point], int | None]:
    """Where two sizes vary: both grown together from the first, as far as they fit; then at shares of that second size
    the largest first one. All points, and that first size of both together.

    Sizes are multiples of the powers of two that the first ones are, up to `_UNIT`: others may be no sizes at all.
    """
    (card,), room = work.cards, work.room or 0
    (one, other), made = first.values(), dict[tuple[int, int], Point]()
    grain, grain_of_other = (math.gcd(each, _UNIT) for each in (one, other))

    def measure(size: int, beside: int) -> Point:
        if (size, beside) not in made:
            at = work.source.at(card, size=size, length=beside)
            made[size, beside] = point = work.measure_one(at, at_first if (size, beside) == (one, other) else None)
            tell(_describe_point(work.space, point))
        return made[size, beside]

    def round_other(size: Fraction) -> int:
        return max(round(size / grain_of_other), 1) * grain_of_other

    def measure_both(size: int) -> Point:
        return measure(size, round_other(Fraction(other * size, one)))

    largest = _find_largest(search(measure_both, room, start=one, limit=limit, unit=grain, grain=grain))
    for share, both in ((share, largest) for share in _SHARES if largest is not None):
        beside = round_other(Fraction(other * both, one) * share)
        guess = min(max(round(both / share / grain), 1) * grain, limit // grain * grain)
        search(partial(measure, beside=beside), room, start=guess, limit=limit, unit=grain, grain=grain)
    return sorted(made.values(), key=lambda each: (each.length or 0, _size(each))), largest


def _propose_enough(points: Sequence[Point]) -> int | None:
    """The size to measure next, to find the smallest that is near the best throughput; None when it is found."""
    enough = find_enough(points)
    if enough is None:
        return None
    below = max((_size(point) for point in points if _size(point) < enough), default=0)
    if enough - below <= 1 or 10 * enough <= 11 * below:
        return None
    return min(max(math.isqrt(below * enough), below + 1), enough - 1)


def _find_largest(points: Iterable[Point]) -> int | None:
    return max((point.size or 0 for point in points if point.fits), default=None)


def _size(point: Point) -> int:
    return point.size or 0


# --- one size ---------------------------------------------------------------------------------------------------------


def _find_room(target: Target, budget: BudgetLike | None) -> int:
    """The bytes that the allocator may have."""
    if budget is None:
        if (room := room_bytes(target)) is None:
            raise UsageError(
                f"expected a budget such as 16GiB, because the memory of target {target.name!r} is not known"
            )
        return room
    return parse_bytes(budget).nbytes


def _check_step(step: ProfiledStep, goal: Goal, change: Change | None) -> None:
    if isinstance(step, (Analysis, Generation)):
        _check_goal(goal, step.profile.target, step.profile.step)
    elif not isinstance(step, ProgramStep):
        raise UsageError("expected a model or a program to vary the size of, got the record of a step")
    elif goal != "memory":
        what = "a program" if step.program.varied else "a function"
        raise UsageError(f"expected goal='memory' for {what}: which part of its time the size changes is not known")
    elif change is not None:
        raise UsageError("expected no change of a program: it makes its checkpoints itself")


def _check_goal(goal: Goal, target: Target, step: Step | None = None) -> None:
    if goal not in ("memory", "throughput"):
        raise UsageError(f"expected the goal memory or throughput, got {goal!r}")
    if goal == "throughput" and step is not None and step.generation is not None:
        raise UsageError("expected goal memory for a generation: its time is not estimated at every size")
    if goal == "throughput" and not step_time.has_rates(target):
        raise UsageError(f"expected goal throughput on a card whose rates are known, got {target.name!r}")


def _find_positions(source: Source) -> tuple[str, int | None]:
    """The table of positions of a model of transformers whose sequences vary, if any, and how many it has."""
    if not isinstance(source, ModelSource):
        return "", None
    positions = getattr(getattr(source.model, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or "input_ids:1" not in source.sizes.names:
        return "", None
    return next((name for name, _ in source.model.named_modules() if name.endswith(_POSITION_TABLES)), ""), positions


def _note_positions(source: Source, table: str, positions: int | None, largest: int | None) -> Iterator[Assumption]:
    """What an analysis without data cannot see of a size."""
    if not isinstance(source, ModelSource) or positions is None or largest is None or largest <= positions:
        return
    field = getattr(source.model.config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    limit = f"the model's configuration has {positions} positions; if they are looked up in a table, a"
    if table:
        limit = f"{table} is a table of {positions} positions: a"
    text = f"{limit} real run fails beyond them, and no analysis sees it; --set {field}={largest} has more of them"
    yield Assumption(topic="size", text=text)


def _note_standstill(source: Source, points: Sequence[Point]) -> Iterator[Assumption]:
    """A program may not use what it is given: too little data, or another argument."""
    ran = [point for point in points if point.counted_bytes is not None]
    same = [_size(point) for point in ran if point.counted_bytes == ran[-1].counted_bytes]
    # Less may be the allocator's rounding.
    if isinstance(source, StepSource) and points[0].length is None and same and 4 * same[-1] >= 5 * same[0]:
        text = f"the peak does not grow from {same[0]} on: the program has no more data, or does not use the size"
        yield Assumption(topic="size", text=text)


def _describe_point(space: Space, point: Point) -> str:
    what = fill_place(space.dim, point.size) + (f" {fill_place(space.other, point.length)}" if space.other else "")
    if point.counted_bytes is None:
        return f"{what}: cannot run"
    return f"{what}: {format_bytes(point.counted_bytes)}, {FITS_WORDS[point.fits]} {format_bytes(point.room_bytes)}"
