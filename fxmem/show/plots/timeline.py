"""Bytes alive over a step, stacked by kind.

Parameters lie at the bottom and what comes and goes on top, so that a band's edge is level where nothing happens to it.
The x axis is the step's ticks: a prediction knows the order of events, not the seconds between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor

from fxmem.memory import facts as findings
from fxmem.memory.allocator import Levels
from fxmem.records.profile import Kind, Profile, Timeline
from fxmem.records.units import exact_bytes, format_bytes, percent, to_words
from fxmem.show.plots.sampling import Sample, samples
from fxmem.show.plots.svg import SIZE, document, heading, kind_class, n, rect, safe, spread, step_title, steps, text
from fxmem.show.text_width import fit, text_width

__all__ = ["timeline_svg"]

_LEFT, _RIGHT, _EDGE = 62.0, 64.0, 12.0
_ROW = 16.0
_HEADROOM = 1.05
_IN_SCALE = 1.6
"""A limit of up to this many times the largest number drawn is drawn to scale; a higher one would flatten the plot, and
is named above it."""
_TRIED = 48
"""Places at which a band's name is tried."""
_ROOMY = 40.0
"""Height of a band above which more of it is no better a place for its name."""

Limit = tuple[str, int]
"""A word and the bytes it stands for."""


@dataclass(frozen=True)
class _Panel:
    """One step in one rectangle."""

    profile: Profile | None
    """None: its phases are not known."""
    timeline: Timeline
    name: str
    taken: tuple[Sample, ...]
    top: float
    left: float
    width: float
    height: float
    scale: float
    """Bytes at the upper edge."""
    held: Levels | None
    """None: the allocator's bytes are known at their peaks alone, or not at all."""

    def x(self, tick: float) -> float:
        return self.left + self.width * tick / max(len(self.timeline.live_bytes), 1)

    def y(self, nbytes: float) -> float:
        return self.top + self.height * (1.0 - nbytes / self.scale)

    @property
    def bottom(self) -> float:
        return self.top + self.height


def timeline_svg(
    profile: Profile,
    timeline: Timeline,
    *,
    budget_bytes: int | None = None,
    after: Timeline | None = None,
    after_profile: Profile | None = None,
    held: Levels | None = None,
    held_after: Levels | None = None,
    width: float = 960.0,
    height: float = 300.0,
    name: str = "fxmem-timeline",
    titled: bool = True,
) -> str:
    """Bytes alive by kind over the step, as one self-contained SVG document.

    The peak, what the allocator hands out and holds, the budget and the target's memory are lines. Above two samples a
    pixel column only its lowest and its highest tick are drawn, so the document stays small and the peak true.

    Args:
        profile: what was predicted. timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's
        byte counts as well. budget_bytes: what the peak has to stay within, if anything. after: the timeline of the
        same step under a plan, drawn below on the same scale of bytes. after_profile: the profile it is of, for its
        phases. held: the allocator's bytes over the step, of `fxmem.memory.allocator.levels_of`. None: level lines at
        their peaks, where the timeline has those. held_after: the same under the plan. width: of the document, in
        pixels, at least 280. height: of one plot. name: the root's id, and the start of every other. titled: whether to
        write the title into the picture.
    """
    width = max(width, 280.0)
    scale, limits = _scale(profile, timeline, budget_bytes, after)
    y = _EDGE
    parts: list[str] = []
    title = step_title(profile)
    if titled:
        parts, y = heading(title, _EDGE, y, width - 2 * _EDGE)
        y += 6.0
    steps_shown: list[tuple[str, Profile | None, Timeline]] = [
        ("Before" if after is not None else "", profile, timeline)
    ]
    steps_shown += [] if after is None else [("After, with the plan", after_profile, after)]
    for index, (label, own, line_of) in enumerate(steps_shown):
        if label:
            y += _ROW
            parts.append(text(_EDGE, y, label, "strong"))
        taken = tuple(samples(line_of.live_bytes, max(int(width - _LEFT - _RIGHT), 1)))
        rows = _ROW * 2 + (_ROW if own is not None else 0.0)
        levels = held_after if index else held
        panel = _Panel(
            own,
            line_of,
            f"{name}-{'after' if index else 'step'}",
            taken,
            y + rows,
            _LEFT,
            width - _LEFT - _RIGHT,
            height,
            scale,
            levels,
        )
        parts += _panel(panel, limits)
        y = panel.bottom + 2 * _ROW + 4.0
    legend, y = _legend(timeline, after, limits, scale, y, width)
    description = f"Peak: {exact_bytes(timeline.peak.requested_bytes)}, in {timeline.peak.phase}. " + "; ".join(
        f"{share.name} {format_bytes(share.nbytes)}" for share in findings.split(timeline.peak)
    )
    return document(name, width, y + _EDGE, f"{title}: bytes alive, by kind", description, [*parts, *legend])


def _scale(
    profile: Profile, timeline: Timeline, budget: int | None, after: Timeline | None
) -> tuple[float, list[Limit]]:
    """Bytes at the upper edge, and the limits to draw."""
    peaks = [timeline.peak, *([] if after is None else [after.peak])]
    drawn = max(max(peak.requested_bytes, peak.allocated_bytes or 0, peak.reserved_bytes or 0) for peak in peaks)
    limits = [
        (word, nbytes)
        for word, nbytes in (("budget", budget), ("card", profile.target.memory_bytes))
        if nbytes is not None
    ]
    return max([drawn, *(nbytes for _, nbytes in limits if nbytes <= _IN_SCALE * drawn), 1]) * _HEADROOM, limits


# --- one step ---------------------------------------------------------------------------------------------------------


def _panel(panel: _Panel, limits: Sequence[Limit]) -> list[str]:
    ticks = len(panel.timeline.live_bytes)
    data = (
        f'data-left="{n(panel.left)}" data-width="{n(panel.width)}" data-top="{n(panel.top)}" '
        f'data-height="{n(panel.height)}" data-ticks="{ticks}"'
    )
    return [
        f'<g id="{panel.name}" class="panel" {data}>',
        *_phases(panel),
        *_grid(panel),
        *_bands(panel),
        *_peak(panel),
        *_lines(panel, limits),
        *_axis(panel),
        "</g>",
    ]


def _phases(panel: _Panel) -> list[str]:
    if panel.profile is None:
        return []
    spans = [span for span in panel.profile.phases if span.end > span.begin]
    parts = []
    for span in spans:
        x = panel.x(span.begin)
        title = f"<title>{safe(f'{span.phase}: ticks {span.begin:,} to {span.end:,}')}</title>"
        parts.append(f"<g>{title}{rect(x, panel.top, panel.x(span.end) - x, panel.height, f'shade {span.phase}')}</g>")
        parts.append(f'<path class="grid" d="M{n(x)} {n(panel.top - 4)}V{n(panel.bottom)}"/>')
    sizes = [text_width(span.phase, SIZE) + 8.0 for span in spans]
    centres = spread(
        [(panel.x(span.begin) + panel.x(span.end)) / 2 for span in spans],
        sizes,
        panel.left,
        panel.left + panel.width + _RIGHT - 4.0,
    )
    y = panel.top - _ROW - 6.0
    return parts + [text(x, y, span.phase, "middle muted") for span, x in zip(spans, centres, strict=True)]


def _grid(panel: _Panel) -> list[str]:
    parts = []
    for nbytes, words in steps(round(panel.scale), 6 if panel.height >= 200 else 4):
        y = panel.y(nbytes)
        parts.append(f'<path class="grid" d="M{n(panel.left)} {n(y)}h{n(panel.width)}"/>')
        parts.append(text(panel.left - 6.0, y + 4.0, words, "end muted"))
    return parts


def _bands(panel: _Panel) -> list[str]:
    """The bands from the topmost down, each drawn to the axis and covered by the next: one edge a band."""
    kinds = [kind for kind in Kind if kind in panel.timeline.by_kind and any(panel.timeline.by_kind[kind])]
    series = [panel.timeline.by_kind[kind] for kind in kinds]
    edges = list(
        accumulate(
            ([one[sample.tick] for sample in panel.taken] for one in series),
            lambda below, own: [a + b for a, b in zip(below, own, strict=True)],
        )
    )
    parts = []
    for kind, edge in reversed(list(zip(kinds, edges, strict=True))):
        words = f"{to_words(kind)}: {exact_bytes(panel.timeline.peak.by_kind.get(kind, 0))} at the peak"
        parts.append(
            f'<path class="{kind_class(kind)}" '
            f'd="{_edge(panel, edge)}V{n(panel.bottom)}H{n(panel.left)}z"><title>{safe(words)}</title></path>'
        )
    if edges:
        parts.append(f'<path class="total" d="{_edge(panel, edges[-1])}"/>')
    undersides = [[0] * len(panel.taken), *edges[:-1]] if edges else []
    for kind, underside, edge in zip(kinds, undersides, edges, strict=True):
        parts += _band_name(panel, kind, underside, edge)
    return parts


def _edge(panel: _Panel, heights: Sequence[int]) -> str:
    """A line of steps from the first sample to the end of the last."""
    drawn = [f"M{n(panel.left)} {n(panel.y(heights[0]))}"]
    for index in range(1, len(heights)):
        if heights[index] != heights[index - 1]:
            drawn.append(f"H{n(panel.x(panel.taken[index].begin))}V{n(panel.y(heights[index]))}")
    return "".join([*drawn, f"H{n(panel.left + panel.width)}"])


def _band_name(panel: _Panel, kind: Kind, underside: Sequence[int], edge: Sequence[int]) -> list[str]:
    """The band's name where there is most room for it, if there is any."""
    words = to_words(kind)
    half = text_width(words, SIZE) / 2 + 4.0
    starts = [panel.x(sample.begin) for sample in panel.taken]
    middle = panel.left + panel.width / 2
    found = []
    for turn in range(_TRIED):
        at = panel.left + half + (panel.width - 2 * half) * turn / (_TRIED - 1)
        # The sample that begins left of the name reaches under it.
        under = slice(max(bisect_right(starts, at - half) - 1, 0), bisect_right(starts, at + half))
        low, high = panel.y(max(underside[under])), panel.y(min(edge[under]))
        found.append((min(low - high, _ROOMY), -abs(at - middle), at, (low + high) / 2))
    room, _, x, y = max(found)
    return [text(x, y + 4.0, words, "middle halo")] if room >= SIZE + 3.0 else []


def _peak(panel: _Panel) -> list[str]:
    peak = panel.timeline.peak
    if not panel.taken:
        return [
            text(
                panel.left + panel.width / 2,
                panel.top + panel.height / 2,
                "no memory events: nothing to draw",
                "middle",
            )
        ]
    x, y = panel.x(peak.tick + 0.5), panel.y(peak.requested_bytes)
    where = peak.node or ""
    if panel.profile is not None and peak.op is not None:
        where = findings.describe(panel.profile.nodes[panel.profile.ops[peak.op].node])
    words = f"peak {format_bytes(peak.requested_bytes)} in {peak.phase}" + (f": {where}" if where else "")
    room = panel.width + _RIGHT - 4.0
    shown = fit(words, SIZE, room, bold=True)
    half = text_width(shown, SIZE, bold=True) / 2
    at = min(max(x, panel.left + half), panel.left + room - half)
    return [
        f'<path class="peak" d="M{n(x)} {n(panel.top - 5)}V{n(panel.bottom)}"/>',
        f'<circle class="dot" cx="{n(x)}" cy="{n(y)}" r="4"><title>{safe(words)}</title></circle>',
        text(at, panel.top - 8.0, shown, "middle strong"),
    ]


def _lines(panel: _Panel, limits: Sequence[Limit]) -> list[str]:
    """The allocator's lines, the level ones, and right of the plot what each is; what is above the scale is named at
    its edge."""
    drawn = [*_held(panel), *((word, nbytes, nbytes, "limit", "", None) for word, nbytes in limits)]
    if not drawn:
        return []
    right = panel.left + panel.width
    heights = [panel.y(at_end) if at_end <= panel.scale else panel.top for _, _, at_end, _, _, _ in drawn]
    places = spread(heights, [13.0] * len(drawn), panel.top - 4.0, panel.bottom)
    parts = []
    for (word, nbytes, _, classes, what, path), height, place in zip(drawn, heights, places, strict=True):
        above = nbytes > panel.scale
        words = (
            f"{word}: {exact_bytes(nbytes)}" + (f", {what}" if what else "") + (", above the scale" if above else "")
        )
        line = (
            "" if above else f'<path class="{classes}" d="{path or f"M{n(panel.left)} {n(height)}h{n(panel.width)}"}"/>'
        )
        join = f'<path class="join axis" d="M{n(right)} {n(height)}L{n(right + 7)} {n(place)}"/>'
        label = text(right + 9.0, place + 4.0, f"↑ {word}" if above else word, "halo")
        parts.append(f"<g><title>{safe(words)}</title>{line}{join}{label}</g>")
    return parts


def _held(panel: _Panel) -> list[tuple[str, int, int, str, str, str | None]]:
    """Of each of the allocator's lines its word, its highest bytes, its last, its classes, what the bytes are, and its
    path where it is not level."""
    peak, held = panel.timeline.peak, panel.held
    lines = (
        ("allocated", peak.allocated_bytes, held and held.allocated_bytes),
        ("reserved", peak.reserved_bytes, held and held.reserved_bytes),
    )
    drawn: list[tuple[str, int, int, str, str, str | None]] = []
    for word, nbytes, series in lines:
        if nbytes is None:
            continue
        if not series:
            drawn.append((word, nbytes, nbytes, f"held {word}", "peak of the step", None))
            continue
        heights = [max(series[floor(sample.begin) : ceil(sample.end)]) for sample in panel.taken]
        drawn.append((word, nbytes, heights[-1], f"held {word}", "peak of the step", _edge(panel, heights)))
    return drawn


def _axis(panel: _Panel) -> list[str]:
    ticks = len(panel.timeline.live_bytes)
    right, y = panel.left + panel.width, panel.bottom
    middle = "order of allocations and frees (ticks; not seconds)"
    ends = ("0", f"{ticks:,}")
    room = panel.width - 2 * max(text_width(end, SIZE) for end in ends) - 16.0
    return [
        f'<path class="axis" d="M{n(panel.left)} {n(panel.top)}V{n(y)}H{n(right)}"/>',
        text(panel.left, y + _ROW, ends[0], "muted"),
        text(right, y + _ROW, ends[1], "muted end"),
        text(
            (panel.left + right) / 2,
            y + _ROW,
            middle if text_width(middle, SIZE) <= room else "ticks, not seconds",
            "muted middle",
            room=room,
        ),
    ]


# --- legend -----------------------------------------------------------------------------------------------------------


def _legend(
    timeline: Timeline, after: Timeline | None, limits: Sequence[Limit], scale: float, y: float, width: float
) -> tuple[list[str], float]:
    """Every colour and line with its name and number, in as many columns as there is room for; and where it ends."""
    entries = _entries(timeline, after, limits, scale)
    column = max(text_width(words, SIZE) for _, _, words in entries) + 40.0 if entries else width
    columns = max(min(int((width - _EDGE) // column), len(entries)), 1)
    rows = -(-len(entries) // columns)
    note = "At the peak" if after is None else "At the peak, before → after"
    parts = [text(_EDGE, y + _ROW, note, "muted")]
    for index, (classes, is_area, words) in enumerate(entries):
        x, at = _EDGE + column * (index // rows), y + _ROW * (index % rows + 2)
        if is_area:
            parts.append(rect(x, at - 9.0, 16.0, 10.0, f"swatch {classes}"))
        else:
            parts.append(f'<path class="{classes}" d="M{n(x)} {n(at - 4)}h16"/>')
        parts.append(text(x + 22.0, at, words, room=width - x - 24.0))
    return parts, y + _ROW * (rows + 1)


def _entries(
    timeline: Timeline, after: Timeline | None, limits: Sequence[Limit], scale: float
) -> list[tuple[str, bool, str]]:
    """Class, whether it colours an area, and words."""
    peak = timeline.peak

    def both(before: int | None, later: int | None) -> str:
        return format_bytes(before) if after is None else f"{format_bytes(before)} → {format_bytes(later)}"

    def later(kind: Kind) -> int | None:
        return None if after is None else after.peak.by_kind.get(kind, 0)

    shown = [
        kind
        for kind in reversed(Kind)
        if any(timeline.by_kind.get(kind, ())) or (after is not None and any(after.by_kind.get(kind, ())))
    ]
    entries: list[tuple[str, bool, str]] = []
    for kind in shown:
        now = peak.by_kind.get(kind, 0)
        share = f", {percent(now, peak.requested_bytes)}" if after is None else ""
        entries.append((kind_class(kind), True, f"{to_words(kind)} {both(now, later(kind))}{share}"))
    for word, nbytes, other in (
        ("allocated", peak.allocated_bytes, None if after is None else after.peak.allocated_bytes),
        ("reserved", peak.reserved_bytes, None if after is None else after.peak.reserved_bytes),
    ):
        if nbytes is not None:
            entries.append((f"held {word}", False, f"{word}, its highest {both(nbytes, other)}"))
    return entries + [
        ("limit", False, f"{word} {format_bytes(nbytes)}{', above the scale' if nbytes > scale else ''}")
        for word, nbytes in limits
    ]
