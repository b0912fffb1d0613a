"""A whole run of a program on one axis: set-up, steps, evaluation, and what the host has meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxmem.hardware.context import room_bytes
from fxmem.memory.forecast import Forecast, forecast
from fxmem.records.profile import PartOfRound, Phase, Profile, ProgramRun, Round
from fxmem.records.units import format_bytes, printable
from fxmem.show.plots.xy_plot import (
    EDGE,
    IN_SCALE,
    LEFT,
    NARROWEST,
    ROW,
    SIZE,
    STYLE,
    PlotArea,
    XYDot,
    XYLine,
    round_step,
    xy_plot,
)
from fxmem.show.run_facts import describe_counts, describe_host
from fxmem.show.svg import document, fit, path, text, text_width

_RIGHT = 84.0
_AHEAD = 0.12
"""Part of the axis for what is to come, which is not to scale."""
_MOST_DOTS = 60
"""Beyond, steps have no dot of their own."""
_APART = 46.0
"""Pixels between two numbers on the axis of steps, at least."""


class _Stretch(NamedTuple):
    """A part of the run, with the most bytes in it."""

    begin: float
    end: float
    requested: int
    reserved: int | None
    words: str


def run_svg(profile: Profile, program: ProgramRun, *, width: float = 720.0, name: str = "fxmem-run") -> str:
    """Draw `run_plot` as one self-contained SVG document. Its root has this id."""
    width = max(width, NARROWEST)
    parts, end = run_plot(profile, program, 0.0, width)
    title = printable(f"{profile.model}: the whole run")
    about = f"{len(program.steps)} steps; {program.ending}"
    return document(STYLE, (width, end + EDGE), (title, printable(about)), parts, id=name)


def run_plot(
    profile: Profile, program: ProgramRun, top: float, width: float, height: float = 170.0
) -> tuple[list[str], float]:
    """The plot of a run, and where it ends: steps to the right, bytes upwards.

    What is requested and reserved at most in each step, what is kept when it is over, and what the host has then.
    """
    stretches, names = _list_stretches(program)
    ahead, memory, first = forecast(profile), room_bytes(profile.target), _first(program)
    last = stretches[-1].end if stretches else first + 1.0
    most = first + (last - first) / (1 - _AHEAD) if ahead is not None else last
    requested = _stairs([(each.begin, each.requested) for each in stretches], last)
    reserved = _stairs([(each.begin, each.reserved or each.requested) for each in stretches], last)
    kept = [(number + 1.0, each.retained_bytes) for number, each in _number(program) if each.retained_bytes is not None]
    by_round = () if program.host is None else program.host.by_round
    on_host = [(number + 1.0, nbytes) for number, nbytes in enumerate(by_round, first)]
    dots = [*_dots(stretches), *_host_dot(program)]
    drawn = max([1, *(nbytes for _, nbytes in (*reserved, *on_host)), *(dot.nbytes for dot in dots)])
    limit = None if memory is None or memory > IN_SCALE * drawn else ("room", memory)
    scale = max(drawn, 0 if limit is None else limit[1]) * 1.05
    area = PlotArea(LEFT, top + 2 * ROW + 8.0, width - LEFT - _RIGHT, height, most, scale, least=first)
    lines = [
        XYLine(reserved, "held reserved", "reserved", is_stairs=True),
        XYLine(requested, "after", "requested", is_stairs=True),
        XYLine(kept, "held allocated", "kept"),
        XYLine(on_host, "total", "host"),
    ]
    end, quantity = "", "step"
    if ahead is not None and requested:
        end, quantity = _describe_end(ahead), "step (on the right, not to scale: if it goes on)"
        lines.append(XYLine([(kept or requested)[-1], (most, min(ahead.points[-1][1], round(scale)))], "limit"))
    parts = [
        text(EDGE, top + ROW, fit("The whole run: most bytes in each step", SIZE, width - 2 * EDGE), "strong"),
        text(EDGE, top + 2 * ROW, fit(end, SIZE, width - 2 * EDGE), "muted"),
        *_area(area, requested),
        *xy_plot(
            area,
            steps=list(_labels(names, area)),
            quantity=fit(quantity, SIZE, area.width),
            limit=limit,
            lines=lines,
            dots=dots,
        ),
    ]
    return parts, area.bottom + 2 * ROW


def _stairs(points: Sequence[tuple[float, int]], last: float) -> list[tuple[float, int]]:
    """The points, and the end of the last of them."""
    return [*points, (last, points[-1][1])] if points else []


def _first(program: ProgramRun) -> int:
    """The number of what comes first: 0 for set-up."""
    return 0 if program.setup is not None else 1


def _number(program: ProgramRun) -> Iterator[tuple[int, Round]]:
    """Set-up and the steps, with their numbers."""
    yield from enumerate([*([] if program.setup is None else [program.setup]), *program.rounds], _first(program))


def _list_stretches(program: ProgramRun) -> tuple[list[_Stretch], list[tuple[float, str]]]:
    """The parts of the run, and the words on the axis with their places."""
    found: list[_Stretch] = []
    names: list[tuple[float, str]] = []
    for number, each in _number(program):
        name = "set-up" if not number else "after" if not each.is_whole and number > 1 else f"{number:,}"
        names.append((number + 0.5, name))
        title = name if name in ("set-up", "after") else f"step {name}"
        place = f", peak at {each.place}" if each.place else ""
        shown = "; plotted above" if number == program.shown else ""
        counts: list[tuple[str, Round | PartOfRound]] = [(f"{title}, {part.title}", part) for part in each.parts]
        if all(part.phase is Phase.SAVE for part in each.parts):  # beside what a plain step does
            counts.append((title, each))
        for at, (what, part) in enumerate(counts):
            begin, end = (number + (at + more) / len(counts) for more in (0, 1))
            words = f"{what}: {describe_counts(part)}{place if part is each else ''}{shown}"
            found.append(_Stretch(begin, end, part.requested_bytes, part.reserved_bytes, words))
    begin = found[-1].end if found else 0.0
    for evaluation in program.evaluations:
        most = evaluation.requested_bytes if evaluation.end_bytes is None else evaluation.end_bytes
        of = "" if evaluation.batches is None else f", all {evaluation.batches:,} {evaluation.of}es"
        words = f"{evaluation.title}{of}: {format_bytes(most)} requested"
        names.append((begin + 0.5, evaluation.title.partition(" ")[0]))
        found.append(_Stretch(begin, begin + 1, most, evaluation.reserved_bytes, words))
        begin += 1
    return found, names


def _labels(names: Sequence[tuple[float, str]], area: PlotArea) -> Iterator[tuple[float, str]]:
    """The words on the axis for which there is room: those that are no number, and of the numbers round ones."""
    every = max(round(round_step(area.most, max(int(area.width / _APART), 1))), 1)
    taken: list[tuple[float, float]] = []
    for at, name in sorted(names, key=lambda each: each[1][:1].isdigit()):
        half = text_width(name, SIZE) / 2 + 4.0
        low, high = area.x(at) - half, area.x(at) + half
        is_round = not name[:1].isdigit() or name == "1" or int(name.replace(",", "")) % every == 0
        if is_round and all(high <= other or low >= end for other, end in taken):
            taken.append((low, high))
            yield at, name


def _area(area: PlotArea, stairs: Sequence[tuple[float, int]]) -> Iterator[str]:
    """What is below a line of stairs."""
    if stairs:
        way = [each for at, nbytes in stairs for each in ("H", area.x(at), "V", area.y(nbytes))]
        yield path("below", "M", area.x(stairs[0][0]), area.bottom, *way[2:], "V", area.bottom, "z")


def _dots(stretches: Sequence[_Stretch]) -> Iterator[XYDot]:
    for each in stretches if len(stretches) <= _MOST_DOTS else ():
        yield XYDot((each.begin + each.end) / 2, each.requested, printable(each.words), is_filled=True)


def _host_dot(program: ProgramRun) -> Iterator[XYDot]:
    """The host's peak, in the step in which it came."""
    host = program.host
    if host is not None and host.peak_bytes is not None and host.peak_round is not None:
        words = printable(f"the host's peak: {describe_host(host)}")
        at = max(host.peak_round, _first(program)) + 0.5
        yield XYDot(at, host.peak_bytes, words)


def _describe_end(ahead: Forecast) -> str:
    """How a run that grows goes on."""
    step, nbytes = ahead.points[-1]
    return f"Out of memory at about step {step:,}" if ahead.is_full else f"{format_bytes(nbytes)} from step {step:,} on"
