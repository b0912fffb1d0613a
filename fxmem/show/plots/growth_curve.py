"""The peaks of a run that keeps more after each step, and how it goes on."""

from __future__ import annotations

from fxmem.memory.forecast import Forecast
from fxmem.records.profile import ProgramRun
from fxmem.records.units import format_bytes
from fxmem.show.plots.axes import EDGE, LEFT, NARROWEST, ROW, STYLE, PlotArea, round_step
from fxmem.show.plots.xy_plot import XYDot, XYLine, xy_plot
from fxmem.show.svg import document, text

_RIGHT = 84.0
_MOST_STEPS = 5
"""Numbers on the axis of steps."""


def growth_svg(
    program: ProgramRun,
    ahead: Forecast,
    memory_bytes: int,
    *,
    width: float = 720.0,
    height: float = 220.0,
    name: str = "fxmem-growth",
) -> str:
    """Plot the peak of each step against its number as one self-contained SVG document: a dot for each that was run.

    Args:
        program: that grows.
        ahead: how it goes on.
        memory_bytes: of the card.
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id.
    """
    width = max(width, NARROWEST)
    ran = [(number, each.allocated_bytes or 0) for number, each in enumerate(program.steps, 1)]
    last, nbytes = ahead.points[-1]
    most = last * 1.15
    area = PlotArea(
        left=LEFT,
        top=EDGE + 2 * ROW + 8.0,
        width=width - LEFT - _RIGHT,
        height=height,
        most=most,
        scale=max(memory_bytes, nbytes) * 1.05,
    )
    end = f"out of memory at about step {last:,}" if ahead.is_full else f"{format_bytes(nbytes)} from step {last:,} on"
    step = max(round(round_step(most, _MOST_STEPS)), 1)
    points = [*ahead.points, *([] if ahead.is_full else [(most, nbytes)])]
    words = [f"step {number:,}: {format_bytes(each)} allocated" for number, each in ran]
    parts = [
        text(EDGE, EDGE + 12.0, end[:1].upper() + end[1:], "strong"),
        text(EDGE, EDGE + 12.0 + ROW, "Most bytes allocated in each step", "muted"),
        *xy_plot(
            area,
            steps=[(each, f"{each:,}") for each in range(0, int(most) + 1, step)],
            quantity="step",
            limit=("memory", memory_bytes),
            lines=[XYLine(ran, "after"), XYLine(points, "total reserved", "if it goes on")],
            dots=[XYDot(*point, said, is_filled=True, is_chosen=False) for point, said in zip(ran, words, strict=True)],
        ),
    ]
    return document(
        STYLE,
        (width, area.bottom + 3 * ROW),
        (f"The peak of each step: {end}", "; ".join([words[0], words[-1]])),
        parts,
        id=name,
    )
