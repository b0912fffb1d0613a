"""Bytes alive over a step, stacked by kind.

Parameters lie at the bottom and what comes and goes on top, so that a band's edge is level where nothing happens to it.
The x axis is the step's ticks: a prediction knows the order of events, not the seconds between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, NamedTuple

from fxmem.hardware.context import room_bytes
from fxmem.memory.allocator import Levels
from fxmem.memory.liveness import Sample, samples
from fxmem.memory.module_tree import describe
from fxmem.records.plan import Plan, PlannedStep
from fxmem.records.profile import Kind, Peak, Profile, Timeline
from fxmem.records.units import exact_bytes, format_bytes, percent, to_words
from fxmem.show import facts
from fxmem.show.plots.run import run_plot
from fxmem.show.plots.xy_plot import (
    EDGE,
    IN_SCALE,
    LEFT,
    NARROWEST,
    ROW,
    SIZE,
    STYLE,
    PlotArea,
    byte_grid,
    heading,
    spread,
    step_title,
)
from fxmem.show.svg import circle, document, fit, group, kind_class, path, rect, text, text_width

_CACHE_IN_SCALE = 4
"""Reserved bytes that are more than so many times what is alive are shown as above the plot."""
_RIGHT = 72.0
_HEADROOM = 1.05
_NARROW = 480.0
"""Pixels below which the legend leaves out shares."""
_TRIED = 48
"""Places at which a band's name is tried."""
_ROOMY = 40.0
"""Height of a band above which more of it is no better a place for its name."""

_Limit = tuple[str, int]
"""A word and the bytes it stands for."""


class PlottedStep(NamedTuple):
    """A step to plot."""

    profile: Profile
    timeline: Timeline
    """Its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well."""
    levels: Levels | None = None
    """The allocator's bytes over the step, of `fxmem.memory.allocator.known_levels`. None: level lines at their peaks,
    where the timeline has those."""


class StepAfter(NamedTuple):
    """The same step with a plan, or with another change."""

    planned: PlannedStep
    peak: Peak
    name: str = "with the plan"
    """What it is called."""


def step_after(plan: Plan | None) -> StepAfter | None:
    """The step with a plan; None where there is none, or it was not analysed."""
    return None if plan is None or plan.planned is None else StepAfter(plan.planned, plan.after)


@dataclass(frozen=True)
class _Panel:
    """The step in its rectangle."""

    profile: Profile
    timeline: Timeline
    levels: Levels | None
    name: str
    samples: tuple[Sample, ...]
    area: PlotArea
    after: StepAfter | None


def timeline_svg(
    step: PlottedStep,
    *,
    after: StepAfter | None = None,
    budget_bytes: int | None = None,
    width: float = 960.0,
    height: float = 300.0,
    name: str = "fxmem-timeline",
    titled: bool = True,
) -> str:
    """Plot the bytes alive over the step by kind, as one self-contained SVG document.

    The peak, what the allocator hands out and reserves, the budget and the target's memory are lines. Above two samples
    a pixel column only its lowest and its highest tick are drawn, so the document stays small and the peak true.

    Args:
        step: what to plot.
        after: the same step with a plan, drawn as a line over it, each phase as wide as the same phase without.
        budget_bytes: what the peak has to stay within, if anything.
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id, and the start of every other.
        titled: whether to write the title into the picture, and to draw the whole run of a program below.
    """
    width = max(width, NARROWEST)
    scale, limits = _scale(step, budget_bytes, after)
    title = step_title(step.profile)
    parts, y = heading(title, EDGE, EDGE, width - 2 * EDGE) if titled else ([], EDGE)
    y += 6.0 if titled else 0.0
    profile, line, levels = step
    area = PlotArea(LEFT, y + ROW * 2 + 6.0, width - LEFT - _RIGHT, height, max(len(line.live_bytes), 1), scale)
    taken = tuple(samples(line.live_bytes, max(int(area.width), 1)))
    parts.append(_draw_panel(_Panel(profile, line, levels, f"{name}-step", taken, area, after), limits))
    legend, y = _legend(step.timeline, after, limits, scale, area.bottom + 2 * ROW + 4.0, width)
    peak = step.timeline.peak
    if titled and step.profile.step.program is not None:
        run, y = run_plot(step.profile, step.profile.step.program, y + ROW, width)
        legend += run
    description = f"Peak: {exact_bytes(peak.requested_bytes)}, in {peak.phase}. " + "; ".join(
        f"{share.name} {format_bytes(share.nbytes)}" for share in facts.split(peak)
    )
    words = (f"{title}: bytes alive, by kind", description)
    # Opened alone it is as large as the window, whatever that is.
    size: dict[str, Any] = {"width": None, "height": None} if titled else {}
    return document(STYLE, (width, y + EDGE), words, [*parts, *legend], id=name, **size)


def _scale(step: PlottedStep, budget: int | None, after: StepAfter | None) -> tuple[float, list[_Limit]]:
    """Bytes at the upper edge, and the limits to draw."""
    peaks = [step.timeline.peak, *([] if after is None else [after.peak])]
    drawn = max(max(peak.requested_bytes, peak.allocated_bytes or 0) for peak in peaks)
    # What a program reserves in its evaluation may be a hundred times its step.
    drawn = max([drawn, *(held for peak in peaks if (held := peak.reserved_bytes or 0) <= _CACHE_IN_SCALE * drawn)])
    known = {"budget": budget, "room": room_bytes(step.profile.target)}
    limits = [(word, nbytes) for word, nbytes in known.items() if nbytes is not None]
    return max([drawn, *(nbytes for _, nbytes in limits if nbytes <= IN_SCALE * drawn), 1]) * _HEADROOM, limits


# --- one step ---------------------------------------------------------------------------------------------------------


def _draw_panel(panel: _Panel, limits: Sequence[_Limit]) -> str:
    area = panel.area
    bands = [*_phases(panel), *byte_grid(area), *_bands(panel)]
    return group(
        *(f"{part}\n" for part in [*bands, *_peak(panel), *_lines(panel, limits), *_axis(panel)]),
        id=panel.name,
        class_="panel",
        data_left=area.left,
        data_width=area.width,
        data_top=area.top,
        data_height=area.height,
        data_ticks=str(len(panel.timeline.live_bytes)),
    )


def _phases(panel: _Panel) -> Iterator[str]:
    area = panel.area
    spans = [span for span in panel.profile.phases if span.end > span.begin]
    for span in spans:
        x = area.x(span.begin)
        shade = rect(x, area.top, area.x(span.end) - x, area.height, f"shade {span.phase}")
        yield group(shade, tooltip=f"{span.phase}: ticks {span.begin:,} to {span.end:,}")
        yield path("grid", "M", x, area.top - 4, "V", area.bottom)
    sizes = [text_width(span.phase, SIZE) + 8.0 for span in spans]
    centres = [(area.x(span.begin) + area.x(span.end)) / 2 for span in spans]
    for span, x in zip(spans, spread(centres, sizes, area.left, area.right + _RIGHT - 4.0), strict=True):
        yield text(x, area.top - ROW - 6.0, span.phase, "middle muted")


def _bands(panel: _Panel) -> Iterator[str]:
    """The bands from the topmost down. Each is drawn to the axis and covered by the next, so that a band is one
    edge."""
    area, by_kind = panel.area, panel.timeline.by_kind
    kinds = [kind for kind in Kind if kind in by_kind and any(by_kind[kind])]
    edges, edge = [], [0] * len(panel.samples)
    for kind in kinds:
        edge = [below + by_kind[kind][sample.tick] for below, sample in zip(edge, panel.samples, strict=True)]
        edges.append(edge)
    for kind, edge in reversed(list(zip(kinds, edges, strict=True))):
        words = f"{to_words(kind)}: {exact_bytes(panel.timeline.peak.by_kind.get(kind, 0))} at the peak"
        yield path(kind_class(kind), *_edge(panel, edge), "V", area.bottom, "H", area.left, "z", tooltip=words)
    if edges:
        yield path("total", *_edge(panel, edges[-1]))
    yield from _after(panel)
    undersides = [[0] * len(panel.samples), *edges[:-1]] if edges else []
    for kind, underside, edge in zip(kinds, undersides, edges, strict=True):
        yield from _band_name(panel, kind, underside, edge)


def _edge(panel: _Panel, heights: Sequence[int]) -> Iterator[str | float]:
    """The path of a line of steps, from the first sample to the last."""
    area = panel.area
    yield from ("M", area.left, area.y(heights[0]))
    for index in range(1, len(heights)):
        if heights[index] != heights[index - 1]:
            yield from ("H", area.x(panel.samples[index].begin), "V", area.y(heights[index]))
    yield from ("H", area.right)


def _band_name(panel: _Panel, kind: Kind, underside: Sequence[int], edge: Sequence[int]) -> Iterator[str]:
    """The band's name where there is most room for it, if there is any."""
    area = panel.area
    words = to_words(kind)
    half = text_width(words, SIZE) / 2 + 4.0
    starts = [area.x(sample.begin) for sample in panel.samples]
    middle = area.left + area.width / 2
    found = []
    for turn in range(_TRIED):
        at = area.left + half + (area.width - 2 * half) * turn / (_TRIED - 1)
        # The sample that begins left of the name reaches under it.
        under = slice(max(bisect_right(starts, at - half) - 1, 0), bisect_right(starts, at + half))
        low, high = area.y(max(underside[under])), area.y(min(edge[under]))
        found.append((min(low - high, _ROOMY), -abs(at - middle), at, (low + high) / 2))
    room, _, x, y = max(found)
    if room >= SIZE + 3.0:
        yield text(x, y + 4.0, words, "middle halo")


def _after(panel: _Panel) -> Iterator[str]:
    """The line of the step with the plan. Where the phases are the same, each is drawn over the same one."""
    if panel.after is None:
        return
    area, (planned, peak, name) = panel.area, panel.after
    ours, theirs = panel.profile.phases, planned.phases
    if [span.phase for span in ours] != [span.phase for span in theirs]:
        ours = theirs = ()
    borders = [0, *(span.end for span in theirs[:-1]), planned.ticks]
    places = [0, *(span.end for span in ours[:-1]), len(panel.timeline.live_bytes)]

    def x(tick: int) -> float:
        part = min(bisect_right(borders, tick), len(borders) - 1)
        (low, high), (left, right) = borders[part - 1 : part + 1], places[part - 1 : part + 1]
        return area.x(left + (right - left) * (tick - low) / max(high - low, 1))

    way: list[str | float] = ["M", area.left, area.bottom]
    for tick, nbytes in planned.moments:
        way += ["H", x(tick), "V", area.y(nbytes)]
    words = f"{name}: peak {format_bytes(peak.requested_bytes)} in {peak.phase}"
    yield group(path("around", *way, "H", area.right), path("after", *way, "H", area.right), tooltip=words)
    tick, nbytes = max(planned.moments, key=lambda moment: moment[1], default=(0, 0))
    shown = fit(words, SIZE, area.width - 8.0, bold=True)
    half = text_width(shown, SIZE, bold=True) / 2 + 4.0
    at = min(max(x(tick), area.left + half), area.right - half)
    yield text(at, area.y(nbytes) - 6.0, shown, "middle halo strong")


def _peak(panel: _Panel) -> Iterator[str]:
    area, peak = panel.area, panel.timeline.peak
    if not panel.samples:
        words = "no memory events: nothing to draw"
        yield text(area.left + area.width / 2, area.top + area.height / 2, words, "middle")
        return
    x, y = area.x(peak.tick + 0.5), area.y(peak.requested_bytes)
    where = peak.node or ""
    if peak.op is not None:
        where = describe(panel.profile.nodes[panel.profile.ops[peak.op].node])
    words = f"peak {format_bytes(peak.requested_bytes)} in {peak.phase}" + (f": {where}" if where else "")
    room = area.width + _RIGHT - 4.0
    shown = fit(words, SIZE, room, bold=True)
    half = text_width(shown, SIZE, bold=True) / 2
    at = min(max(x, area.left + half), area.left + room - half)
    yield path("peak", "M", x, area.top - 5, "V", area.bottom)
    yield circle(x, y, 4, "dot", tooltip=words)
    yield text(at, area.top - 8.0, shown, "middle strong")


class _Level(NamedTuple):
    """A line of the allocator's, or a limit."""

    word: str
    nbytes: int
    """At its highest."""
    end_bytes: int
    """At its right end."""
    classes: str
    meaning: str = ""
    heights: Sequence[int] = ()
    """Its bytes at every sample; empty where it is level."""


def _lines(panel: _Panel, limits: Sequence[_Limit]) -> Iterator[str]:
    """The allocator's lines and the limits, labelled at the right. What is above the scale is named at its edge."""
    area = panel.area
    lines = [*_allocator_levels(panel), *(_Level(word, nbytes, nbytes, "limit") for word, nbytes in limits)]
    heights = [area.y(line.end_bytes) if line.end_bytes <= area.scale else area.top for line in lines]
    places = spread(heights, [13.0] * len(lines), area.top - 4.0, area.bottom)
    for line, height, place in zip(lines, heights, places, strict=True):
        is_above = line.nbytes > area.scale
        words = ", ".join(filter(None, (exact_bytes(line.nbytes), line.meaning, "above the scale" if is_above else "")))
        way = _edge(panel, line.heights) if line.heights else ("M", area.left, height, "h", area.width)
        yield group(
            "" if is_above else path(line.classes, *way),
            path("join axis", "M", area.right, height, "L", area.right + 7, place),
            text(area.right + 9.0, place + 4.0, f"↑ {line.word}" if is_above else line.word, "halo"),
            tooltip=f"{line.word}: {words}",
        )


def _allocator_levels(panel: _Panel) -> Iterator[_Level]:
    peak, levels = panel.timeline.peak, panel.levels
    for word in ("allocated", "reserved"):
        nbytes: int | None = getattr(peak, f"{word}_bytes")
        series: Sequence[int] = () if levels is None else getattr(levels, f"{word}_bytes")
        if nbytes is not None:
            heights = [max(series[floor(s.begin) : ceil(s.end)]) for s in panel.samples] if series else []
            yield _Level(word, nbytes, heights[-1] if heights else nbytes, f"held {word}", "peak of the step", heights)


def _axis(panel: _Panel) -> Iterator[str]:
    area = panel.area
    middle = "order of allocations and frees (ticks; not seconds)"
    ends = ("0", f"{len(panel.timeline.live_bytes):,}")
    room = area.width - 2 * max(text_width(end, SIZE) for end in ends) - 16.0
    words = middle if text_width(middle, SIZE) <= room else fit("ticks, not seconds", SIZE, room)
    y = area.bottom + ROW
    yield path("axis", "M", area.left, area.top, "V", area.bottom, "H", area.right)
    yield text(area.left, y, ends[0], "muted")
    yield text(area.right, y, ends[1], "muted end")
    yield text((area.left + area.right) / 2, y, words, "muted middle")


# --- legend -----------------------------------------------------------------------------------------------------------


def _legend(
    timeline: Timeline, after: StepAfter | None, limits: Sequence[_Limit], scale: float, y: float, width: float
) -> tuple[list[str], float]:
    """Every colour and line with its name and number; and where the legend ends."""
    entries = _entries(timeline, after, limits, scale, is_narrow=width < _NARROW)
    column = max((text_width(words, SIZE) for _, _, words in entries), default=width) + 40.0
    column = min(column, (width - EDGE) / 2)
    columns = max(min(int((width - EDGE) // column), len(entries)), 1)
    rows = -(-len(entries) // columns)
    parts = [text(EDGE, y + ROW, "At the peak" if after is None else "At the peak, before → after", "muted")]
    for index, (classes, is_area, words) in enumerate(entries):
        x, at = EDGE + column * (index // rows), y + ROW * (index % rows + 2)
        area, line = rect(x, at - 9.0, 16.0, 10.0, f"swatch {classes}"), path(classes, "M", x, at - 4, "h", 16)
        parts += [area if is_area else line, text(x + 22.0, at, fit(words, SIZE, min(width - x, column) - 24.0))]
    return parts, y + ROW * (rows + 1)


def _entries(
    timeline: Timeline, after: StepAfter | None, limits: Sequence[_Limit], scale: float, *, is_narrow: bool
) -> list[tuple[str, bool, str]]:
    """Class, whether it colours an area, and words."""
    peaks = [timeline.peak, *([] if after is None else [after.peak])]
    entries: list[tuple[str, bool, str]] = []
    if after is not None:
        both = " → ".join(format_bytes(peak.requested_bytes) for peak in peaks)
        entries.append(("after", False, f"{after.name} {both}"))
    for kind in reversed(Kind):
        if any(timeline.by_kind.get(kind, ())) or peaks[-1].by_kind.get(kind):
            sizes = [peak.by_kind.get(kind, 0) for peak in peaks]
            share = f", {percent(sizes[0], peaks[0].requested_bytes)}" if after is None and not is_narrow else ""
            entries.append((kind_class(kind), True, f"{to_words(kind)} {' → '.join(map(format_bytes, sizes))}{share}"))
    for word in ("allocated", "reserved"):
        counts: list[int | None] = [getattr(peak, f"{word}_bytes") for peak in peaks]
        if counts[0] is not None:
            above = ", above the scale" if max(each or 0 for each in counts) > scale else ""
            entries.append((f"held {word}", False, f"{word} {' → '.join(map(format_bytes, counts))}{above}"))
    for word, nbytes in limits:
        above = ", above the scale" if nbytes > scale else ""
        entries.append(("limit", False, f"{word} {format_bytes(nbytes)}{above}"))
    return entries
