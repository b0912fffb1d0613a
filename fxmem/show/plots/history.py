"""What a memory snapshot looks like: bytes over its history, and its segments with what lies in them."""

from __future__ import annotations

from fxmem.records.shortage import SnapshotReport
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.plots.xy_plot import EDGE, LEFT, NARROWEST, ROW, STYLE, PlotArea, XYDot, XYLine, round_step, xy_plot
from fxmem.show.svg import document, group, rect, text

_RIGHT = 84.0
_MOST_STEPS = 5
_HEIGHT, _GAP = 10.0, 3.0
"""Of a segment's bar, and below it, in pixels."""
_WORDS = {"used": "in use", "waiting": "freed, waiting for another stream", "free": "unused"}


def history_svg(report: SnapshotReport, *, width: float = 960.0, height: float = 260.0, name: str = "history") -> str:
    """Plot requested and reserved bytes over the events of a snapshot's history as one self-contained SVG document."""
    width = max(width, NARROWEST)
    highest = max(report.reserved_peak_bytes, report.peak_bytes, 1)
    most = max(report.events, 1)
    area = PlotArea(LEFT, EDGE + ROW, width - LEFT - _RIGHT, height, most, highest * 1.05)
    step = max(round(round_step(most, _MOST_STEPS)), 1)
    peak = f"peak {format_bytes(report.peak_bytes)}"
    lines = [
        XYLine([(each.event, each.requested_bytes) for each in report.levels], "after", "requested", is_stairs=True),
        XYLine(
            [(each.event, each.reserved_bytes) for each in report.levels], "held reserved", "reserved", is_stairs=True
        ),
    ]
    dots = [
        XYDot(report.peak_event, report.peak_bytes, peak, is_filled=True, is_chosen=True, label=peak, is_summit=True)
    ]
    dots += [
        XYDot(each.line, each.allocated_bytes or 0, f"{format_bytes(each.requested_bytes)} refused")
        for each in report.shortages
    ]
    parts = xy_plot(
        area,
        steps=[(each, f"{each:,}") for each in range(0, most + 1, step)],
        quantity="allocations, frees and segments, in their order",
        lines=lines,
        dots=dots,
    )
    words = ("Bytes over the history", f"Peak: {exact_bytes(report.peak_bytes)} requested")
    return document(STYLE, (width, area.bottom + 3 * ROW), words, parts, id=name)


def segments_svg(report: SnapshotReport, *, width: float = 960.0, name: str = "segments") -> str:
    """Draw the largest segments as bars, with what is in use in them, as one self-contained SVG document."""
    width = max(width, NARROWEST)
    room = width - LEFT - EDGE
    largest = max((each.nbytes for each in report.segments), default=1)
    parts, y = [], EDGE
    for segment in report.segments:
        x, scale = LEFT, room / max(largest, 1)
        bars = []
        for piece in segment.pieces:
            words = f"{exact_bytes(piece.nbytes)} {_WORDS[piece.state]}"
            bars.append(group(rect(x, y, piece.nbytes * scale, _HEIGHT, f"piece {piece.state}"), tooltip=words))
            x += piece.nbytes * scale
        parts += [text(LEFT - 6.0, y + _HEIGHT - 1.0, format_bytes(segment.nbytes), "end muted"), *bars]
        y += _HEIGHT + _GAP
    for state, words in _WORDS.items():
        y += ROW
        parts += [rect(LEFT, y - _HEIGHT, 16.0, _HEIGHT, f"piece {state}"), text(LEFT + 22.0, y - 1.0, words)]
    summary = f"{format_bytes(report.cached_bytes)} of {format_bytes(report.reserved_bytes)} unused"
    return document(STYLE, (width, y + EDGE), ("The largest segments at the end", summary), parts, id=name)
