"""The peak against the size of an input, and where it stops fitting."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.records.sizes import SizeCurve, SizePoint
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.plots.svg import document, n, safe, spread, steps, text

__all__ = ["sizes_svg"]

_EDGE, _LEFT, _RIGHT = 12.0, 62.0, 74.0
_ROW = 16.0


def sizes_svg(curve: SizeCurve, *, width: float = 720.0, height: float = 300.0, name: str = "fxmem-sizes") -> str:
    """The curve as one self-contained SVG document: a dot per size that was analysed, hollow where it does not fit.

    Args:
        curve: from `fxmem.max_batch`.
        width: of the document, in pixels, at least 280.
        height: of the plot.
        name: the root's id.
    """
    width = max(width, 280.0)
    ran = [point for point in curve.points if point.counted_bytes is not None]
    measure = "allocated" if any(point.allocated_bytes is not None for point in ran) else "requested"
    top, right = _EDGE + 2 * _ROW + 8.0, width - _RIGHT
    bottom = top + height
    highest = max([curve.memory_bytes, *(_highest(point) for point in ran)])
    widest = max((point.size for point in ran), default=1)

    def x(size: int) -> float:
        return _LEFT + (right - _LEFT) * size / (widest * 1.03)

    def y(nbytes: int) -> float:
        return bottom - height * nbytes / (highest * 1.05)

    dim = curve.dim if curve.dim in ("batch", "seq") else "size"
    answer = f"largest {dim}: {curve.largest}" if curve.largest is not None else f"no {dim} fits"
    parts = [
        text(
            _EDGE,
            _EDGE + 12.0,
            f"{curve.model}: {answer} on {curve.target.name}",
            "title",
            room=(width - 2 * _EDGE) / 1.5,
        )
    ]
    parts.append(text(_EDGE, _EDGE + 12.0 + _ROW, _line(curve, measure), "muted", room=width - 2 * _EDGE))
    for nbytes, words in steps(highest):
        parts.append(f'<path class="{"grid" if nbytes else "axis"}" d="M{n(_LEFT)} {n(y(nbytes))}H{n(right)}"/>')
        parts.append(text(_LEFT - 6.0, y(nbytes) + 4.0, words, "end muted"))
    for size in _ticks(widest):
        parts.append(text(x(size), bottom + _ROW, str(size), "middle muted"))
    parts.append(text((_LEFT + right) / 2, bottom + 2 * _ROW, dim, "middle muted"))
    limit = "budget" if curve.is_budget else "memory"
    parts.append(f"<g><title>{safe(f'{limit}: {exact_bytes(curve.memory_bytes)}')}</title>")
    parts.append(f'<path class="limit" d="M{n(_LEFT)} {n(y(curve.memory_bytes))}H{n(right)}"/></g>')
    reserved = [(x(point.size), y(point.reserved_bytes)) for point in ran if point.reserved_bytes is not None]
    counted = [(x(point.size), y(point.counted_bytes or 0)) for point in ran]
    parts += [_joined(reserved, "total reserved"), _joined(counted, "after")]
    ends = [(places[-1][1], words) for places, words in ((reserved, "reserved"), (counted, measure)) if places] + [
        (y(curve.memory_bytes), limit)
    ]
    heights = spread([up for up, _ in ends], [_ROW] * len(ends), top - _ROW, bottom)
    parts += [
        text(right + 6.0, up + 4.0, words, "" if words == limit else "muted")
        for up, (_, words) in zip(heights, ends, strict=True)
    ]
    # The answer is drawn last, so that no neighbour covers it.
    for point in sorted(ran, key=lambda point: point.size == curve.largest):
        across, up, chosen = x(point.size), y(point.counted_bytes or 0), point.size == curve.largest
        parts.append(f"<g><title>{safe(_words(point, dim))}</title>")
        if chosen:
            parts += [
                f'<path class="peak" d="M{n(across)} {n(up)}V{n(bottom)}"/>',
                text(across - 5.0, bottom - 6.0, str(point.size), "end halo strong"),
            ]
        parts.append(
            f'<circle class="{"dot" if point.fits else "hollow"}" cx="{n(across)}" cy="{n(up)}" '
            f'r="{6 if chosen else 4}"/></g>'
        )
    foot = bottom + 3 * _ROW
    parts.append(
        text(
            _EDGE,
            foot + 4.0,
            "Filled: fits. Hollow: does not. Each dot is an analysis.",
            "muted",
            room=width - 2 * _EDGE,
        )
    )
    spoken = "; ".join(_words(point, dim) for point in ran)
    return document(
        name, width, foot + _EDGE + 4.0, f"Peak against {dim}: {answer}", spoken or "no size could run", parts
    )


def _highest(point: SizePoint) -> int:
    return max(point.counted_bytes or 0, point.reserved_bytes or 0)


def _line(curve: SizeCurve, measure: str) -> str:
    if curve.per_sample_bytes is None or curve.constant_bytes is None:
        return f"{measure} bytes"
    sign = "-" if curve.constant_bytes < 0 else "+"
    return (
        f"{measure}: {format_bytes(curve.per_sample_bytes)} each {sign} {format_bytes(abs(curve.constant_bytes))} "
        f"constant, near the largest"
    )


def _words(point: SizePoint, dim: str) -> str:
    reserved = "" if point.reserved_bytes is None else f", {format_bytes(point.reserved_bytes)} reserved"
    return (
        f"{dim} {point.size}: {format_bytes(point.counted_bytes)}{reserved}, {'fits' if point.fits else 'does not fit'}"
    )


def _ticks(widest: int) -> Sequence[int]:
    """Round sizes up to the widest, six at most, and 0."""
    power = next(10**power for power in range(20) if 10**power * 60 >= widest)
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) * 6 >= widest)
    return range(0, widest + 1, step)


def _joined(places: Sequence[tuple[float, float]], classes: str) -> str:
    return (
        f'<path class="{classes}" d="M{"L".join(f"{n(across)} {n(up)}" for across, up in places)}"/>' if places else ""
    )
