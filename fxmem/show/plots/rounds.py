"""The whole run of a program: set-up and its steps, a bar for the peak of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fxmem.records.profile import ProgramRun, Round
from fxmem.records.units import format_bytes
from fxmem.show.plots.axes import EDGE, ROW, SIZE
from fxmem.show.run_facts import EqualRounds, equal_rounds
from fxmem.show.svg import fit, group, rect, text, text_width

_BAR = 12.0
"""Height of a bar, in pixels."""
_PITCH = 2 * ROW + 6.0
"""From one bar to the next, the words above it between them."""


def rounds_strip(program: ProgramRun, top: float, width: float) -> tuple[list[str], float]:
    """The bars, and where they end.

    A bar is what was requested at once; the hollow one behind it is what the allocator had reserved by then.
    """
    rows = equal_rounds(program)
    if program.setup is not None:
        rows.insert(0, EqualRounds("Set-up", program.setup, program.shown == 0))
    most = max((_reserved(each.round) for each in rows), default=0) or 1
    parts = [text(EDGE, top + ROW, "The whole run: most bytes at once, and reserved by then", "muted")]
    y = top + ROW - 8.0
    for each in rows:
        y += _PITCH
        parts.extend(_draw_row(each, y, (width - 2 * EDGE) / most, width))
    return parts, y + _BAR


def _draw_row(row: EqualRounds, y: float, scale: float, width: float) -> Iterator[str]:
    label, about = row.label, row.round
    words = f"{format_bytes(about.requested_bytes)}, reserved {format_bytes(_reserved(about))}"
    if about.reserved_bytes is None:
        words = format_bytes(about.requested_bytes)
    words = words if row.are_equal else f"at most {words}"
    steps = ", ".join(name for name, _ in groupby(about.phases)) if label != "Set-up" else "before the first step"
    mark = "; plotted above" if row.is_shown else ""
    heading = f"{label}{mark}"
    start = EDGE + text_width(heading, SIZE, bold=True) + 8.0
    yield text(EDGE, y - 5.0, heading, "strong")
    yield text(start, y - 5.0, fit(f"{words}; {steps}", SIZE, width - start - EDGE), "muted")
    bars = ((_reserved(about), "hollow"), (about.requested_bytes, "muted"))
    drawn = (rect(EDGE, y, max(nbytes * scale, 1.0), _BAR, classes) for nbytes, classes in bars)
    yield group(*drawn, tooltip=f"{label}: {words}; {steps}{f'; peak at {about.place}' if about.place else ''}")


def _reserved(about: Round) -> int:
    return max(about.reserved_bytes or 0, about.requested_bytes)
