"""The search for the largest size that fits, over any function that measures a size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from fxmem.records.fits import Point


def search(
    measure: Callable[[int], Point], room: int, *, start: int, limit: int, also: tuple[int, ...] = ()
) -> list[Point]:
    """Measure sizes until one that fits stands beside one that does not; return the points in that order.

    The first is `start`, then come those of `also`, so that there is a line from the beginning.

    Between what fits and what does not, the next size is in the middle of where the line through the two nearest points
    says that reserved bytes (below it, all fits) and allocated bytes (above it, nothing does) reach the room; after a
    step that did not halve what was left, it is in the middle of that. Before anything failed to fit, the line is
    followed upwards; after two steps that did not double the size together, it doubles. Ends with `n` that fits and `n
    + 1` that does not both measured, with `limit` that fits, or with 1 that does not.

    A size at which the model cannot run does not fit; one below every size that ran is taken to be too small for it.
    """
    points = {size: measure(size) for size in (start, *also)}
    below, above = _bracket(points, limit)
    guided, before = True, 0
    while above - below > 1:
        size = _propose_size(points, room, below, above, guided=guided, limit=limit)
        points[size] = measure(size)
        doubled, left, before = 2 * before, above - below, below
        below, above = _bracket(points, limit)
        guided = not guided or (below >= doubled if above > limit else 2 * (above - below) <= left)
    return list(points.values())


def _bracket(points: Mapping[int, Point], limit: int) -> tuple[int, int]:
    """Return the largest size known to fit and the smallest known not to. The first is 0 if there is none, or a size
    too small to run; the second at most `limit + 1`."""
    smallest_run = min(size for size, point in points.items() if point.counted_bytes is not None)
    below = max((size for size, point in points.items() if point.fits or size < smallest_run), default=0)
    above = min((size for size, point in points.items() if size > below and not point.fits), default=limit + 1)
    return below, above


def _propose_size(points: Mapping[int, Point], room: int, below: int, above: int, *, guided: bool, limit: int) -> int:
    """The size to measure next, strictly between `below` and `above`."""
    nothing_failed = above > limit
    middle = 2 * below if nothing_failed else (below + above) // 2
    surely, hardly = _reach(points, room, below, above) if guided else (None, None)
    if surely is None or hardly is None:
        size = middle
    elif nothing_failed:
        # Far away the line is coarse: what fits for certain is the better stepping stone. Near, look for what does not
        # fit.
        size = surely if 4 * surely >= 5 * below else hardly + 1
    else:
        size = (min(max(surely, below), above - 1) + min(max(hardly + 1, below + 1), above)) // 2
    return min(max(size, below + 1), above - 1)


def _reach(points: Mapping[int, Point], room: int, below: int, above: int) -> tuple[int | None, int | None]:
    """Return the sizes at which reserved and allocated bytes reach the room. Each is on the line through the two
    points nearest to the bracket."""
    ran = sorted(size for size, point in points.items() if point.counted_bytes is not None)
    under, over = [size for size in ran if size <= below], [size for size in ran if size >= above]
    pair = sorted({*under[-1:], *over[:1]})
    if len(pair) < 2:
        pair = under[-2:] or over[:2]
    if len(pair) < 2:
        return None, None

    def cross(figure: Callable[[Point], int | None]) -> int | None:
        (one, low), (other, high) = ((size, figure(points[size]) or 0) for size in pair)
        return None if high <= low else one + (room - low) * (other - one) // (high - low)

    reserved = cross(lambda each: each.counted_bytes if each.reserved_bytes is None else each.reserved_bytes)
    return reserved, cross(lambda each: each.counted_bytes)


def fit_line(points: Sequence[Point], largest: int | None) -> tuple[int, int, int] | None:
    """Fit the least-squares line through the counted bytes near the largest size. Returns slope, intercept and largest
    distance, in bytes.

    Near is from half of it to twice of it, or the two nearest points if there are no two there; None if fewer than two
    ran.
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
    return round(slope), round(intercept), round(max(abs(nbytes - intercept - slope * size) for size, nbytes in near))
