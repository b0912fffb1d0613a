"""Plans compared: what each leaves of the peak, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.plots.svg import document, n, safe, steps, text

__all__ = ["CurveDot", "curve_svg"]

_EDGE, _LEFT, _RIGHT = 12.0, 62.0, 64.0
_ROW = 16.0
_APART = 16.0
"""Pixels between two numbers on the plot at least."""
_MOST_LISTED = 24
_MOST_COSTS = 6
"""Numbers on the axis of extra compute above 0."""


class CurveDot(NamedTuple):
    """One plan."""

    extra: float | None
    """FLOPs run again over the forward's; None where they are not known."""
    peak_bytes: int
    label: str
    chosen: bool = False


def curve_svg(
    points: Sequence[CurveDot | tuple[float | None, int, str, bool]],
    *,
    budget_bytes: int | None = None,
    measure: str = "bytes",
    width: float = 720.0,
    height: float = 280.0,
    name: str = "fxmem-curve",
) -> str:
    """Peak against extra compute, a dot per plan, as one self-contained SVG document.

    The line joins the plans that no other beats in both. Every dot has a number where there is room for it, and the
    list below says what it is. A plan whose cost is not known stands in the list alone.

    Args:
        points: the plans as `CurveDot`s or as tuples of its fields, the unplanned step among them if it is to be shown.
        budget_bytes: what the peak has to stay within, if anything.
        measure: what the bytes are: requested, allocated, ...
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id.
    """
    width = max(width, 280.0)
    dots = sorted(
        (CurveDot(*point) for point in points), key=lambda dot: (dot.extra is None, dot.extra or 0.0, -dot.peak_bytes)
    )
    axes = _Axes(
        right=width - _RIGHT,
        top=_EDGE + _ROW + 8.0,
        height=height,
        scale=max([dot.peak_bytes for dot in dots] + [budget_bytes or 0, 1]) * 1.05,
        most=max((dot.extra for dot in dots if dot.extra is not None), default=0.0) * 1.05 or 0.01,
    )
    parts = [text(_EDGE, axes.top - 12.0, f"Peak of the step, {measure}", "muted"), *_grid(axes)]
    if budget_bytes is not None:
        y = axes.y(budget_bytes)
        line = f'<path class="limit" d="M{n(_LEFT)} {n(y)}H{n(axes.right)}"/>'
        parts.append(
            f"<g><title>{safe(f'budget: {exact_bytes(budget_bytes)}')}</title>{line}"
            f"{text(axes.right + 9.0, y + 4.0, 'budget')}</g>"
        )
    listed, foot = _list(dots, axes.bottom + 3 * _ROW + 6.0, width - 2 * _EDGE)
    spoken = "; ".join(_words(dot) for dot in dots[:_MOST_LISTED])
    return document(
        name,
        width,
        foot + _EDGE,
        "Plans: peak against extra compute",
        spoken or "no plans",
        [*parts, *_plotted(dots, axes), *listed],
    )


@dataclass(frozen=True)
class _Axes:
    """Where a plan's cost and peak are on the plot."""

    right: float
    top: float
    height: float
    scale: float
    """Bytes at the upper edge."""
    most: float
    """Extra compute at the right edge."""

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, extra: float) -> float:
        return _LEFT + (self.right - _LEFT) * extra / self.most

    def y(self, nbytes: float) -> float:
        return self.bottom - self.height * nbytes / self.scale


def _plotted(dots: Sequence[CurveDot], axes: _Axes) -> list[str]:
    known = [(dot, axes.x(dot.extra), axes.y(dot.peak_bytes)) for dot in dots if dot.extra is not None]
    numbered = _numbered([dot for dot, _, _ in known], [x for _, x, _ in known])
    parts = [_front([(x, y) for _, x, y in known])]
    for index, (dot, x, y) in enumerate(known):
        circle = (
            f'<circle class="{"dot" if dot.chosen else "hollow"}" cx="{n(x)}" cy="{n(y)}" '
            f'r="{6 if dot.chosen else 4}"/>'
        )
        # Below the dot there is room: the line comes from above and leaves to the right.
        number = (
            text(x, y + 17.0, str(index + 1), "middle halo strong" if dot.chosen else "middle halo")
            if index in numbered
            else ""
        )
        parts.append(f"<g><title>{safe(f'{index + 1}. {_words(dot)}')}</title>{circle}{number}</g>")
    return parts


def _list(dots: Sequence[CurveDot], y: float, room: float) -> tuple[list[str], float]:
    """What each number is; and where the list ends."""
    parts = [text(_EDGE, y, "Peak, and FLOPs run again", "muted")]
    for index, dot in enumerate(dots[:_MOST_LISTED]):
        y += _ROW
        parts.append(
            text(
                _EDGE,
                y,
                f"{index + 1}. {_words(dot)}",
                "strong" if dot.chosen else "",
                room=room / (1.1 if dot.chosen else 1.0),
            )
        )
    if len(dots) > _MOST_LISTED:
        y += _ROW
        parts.append(text(_EDGE, y, f"and {len(dots) - _MOST_LISTED} more", "muted"))
    return parts, y


def _words(dot: CurveDot) -> str:
    cost = "cost unknown" if dot.extra is None else f"+{100 * dot.extra:.1f} %"
    return f"{dot.label}: {format_bytes(dot.peak_bytes)}, {cost}" + (" (chosen)" if dot.chosen else "")


def _grid(axes: _Axes) -> list[str]:
    """Both axes: bytes from 0 up, extra compute in percent."""
    parts = []
    for nbytes, words in steps(round(axes.scale)):
        y = axes.y(nbytes)
        parts += [
            f'<path class="grid" d="M{n(_LEFT)} {n(y)}H{n(axes.right)}"/>',
            text(_LEFT - 6.0, y + 4.0, words, "end muted"),
        ]
    parts.append(f'<path class="axis" d="M{n(_LEFT)} {n(axes.bottom)}H{n(axes.right)}"/>')
    power = 10.0 ** math.floor(math.log10(axes.most / _MOST_COSTS))
    step = next(factor * power for factor in (1, 2, 5, 10) if axes.most / (factor * power) <= _MOST_COSTS)
    for index in range(math.floor(axes.most / step) + 1):
        parts.append(text(axes.x(step * index), axes.bottom + _ROW, f"{100 * step * index:.6g} %", "middle muted"))
    return [
        *parts,
        text((_LEFT + axes.right) / 2, axes.bottom + 2 * _ROW, "FLOPs run again, of the forward's", "middle muted"),
    ]


def _front(places: Sequence[tuple[float, float]]) -> str:
    """Stairs through the dots that none before them, which cost less, lies below."""
    drawn = ""
    lowest = 0.0
    for x, y in places:
        if not drawn:
            drawn, lowest = f"M{n(x)} {n(y)}", y
        elif y > lowest:
            drawn, lowest = f"{drawn}H{n(x)}V{n(y)}", y
    return f'<path class="after" d="{drawn}"/>' if drawn else ""


def _numbered(dots: Sequence[CurveDot], places: Sequence[float]) -> set[int]:
    """The dots that have room for their number, the chosen first."""
    taken: set[int] = set()
    for index in sorted(range(len(dots)), key=lambda index: not dots[index].chosen):
        if all(abs(places[index] - places[other]) >= _APART for other in taken):
            taken.add(index)
    return taken
