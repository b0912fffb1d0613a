"""Where boxes, frames and lines go: the type, and the layout that needs no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxmem.show.graph.labels import NOTE_SIZE, TITLE, TITLE_SIZE, FrameWords, Words
from fxmem.show.graph.picture import Edge, Picture
from fxmem.show.svg import text_width

Point = tuple[float, float]

HEADING = TITLE + 8.0
"""Height of a frame's heading, in pixels."""

_MARGIN = 8.0
_BETWEEN = 16.0
_PAD = 10.0
_LANE = 9.0
_CLEARANCE = 3


@dataclass(frozen=True)
class Rectangle:
    """Top left corner and size, in pixels; y grows downwards."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class EdgeLine:
    """The way of one edge. `curved`: a chain of cubic Bézier curves, 3 n + 1 points; else straight from point to
    point."""

    points: tuple[Point, ...]
    curved: bool = False


@dataclass(frozen=True)
class GraphLayout:
    """A place for everything in a picture, in its order."""

    width: float
    height: float
    boxes: tuple[Rectangle, ...]
    frames: tuple[Rectangle, ...]
    lines: tuple[EdgeLine | None, ...]
    """None for an edge that is not drawn."""
    engine: str
    """What laid it out, for people to read."""


def heading_width(words: FrameWords) -> float:
    """Width that a frame's heading needs, in pixels."""
    return text_width(words.title, TITLE_SIZE, bold=True) + 10.0 + text_width(words.note, NOTE_SIZE) + 2 * _PAD


def ladder(drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords]) -> GraphLayout:
    """Place all boxes one below the other, in the order they run. Frames are around stretches of them; lines that skip
    boxes have lanes to the right.

    Nothing overlaps, whatever the graph, and the time it takes grows with boxes and lines alone.
    """
    ranges = spans(drawing)
    depths = [_depth(drawing, index) for index in range(len(drawing.frames))]
    pad = _PAD * (max(depths, default=0) + 1)
    inside = max(
        [*(box.width for box in words), *(heading_width(heading) - 2 * _PAD for heading in headings)], default=0.0
    )
    column = inside + 2 * pad
    rows, tops, bottoms, height = _rows(drawing, words, ranges)
    boxes = [
        Rectangle(_MARGIN + (column - box.width) / 2, y, box.width, box.height)
        for box, y in zip(words, rows, strict=True)
    ]
    frames = [
        Rectangle(_MARGIN + _PAD * depth, top, column - 2 * _PAD * depth, bottom - top)
        for depth, top, bottom in zip(depths, tops, bottoms, strict=True)
    ]
    lanes = _lanes(drawing.edges)
    edge_of_column = _MARGIN + column
    lines = [_line(edge, lanes.get(index), boxes, edge_of_column) for index, edge in enumerate(drawing.edges)]
    width = edge_of_column + _LANE * (max(lanes.values(), default=-1) + 1) + _MARGIN
    return GraphLayout(width, height, tuple(boxes), tuple(frames), tuple(lines), "built-in ladder")


def spans(drawing: Picture) -> list[tuple[int, int]]:
    """First and last box in each frame."""
    spans: list[tuple[int, int] | None] = [None] * len(drawing.frames)
    for index, box in enumerate(drawing.boxes):
        frame = box.frame
        while frame is not None:
            before = spans[frame]
            spans[frame] = (index, index) if before is None else (before[0], index)
            frame = drawing.frames[frame].parent
    return [span or (0, -1) for span in spans]


def _depth(drawing: Picture, frame: int) -> int:
    parent = drawing.frames[frame].parent
    return 0 if parent is None else 1 + _depth(drawing, parent)


def _rows(
    drawing: Picture, words: Sequence[Words], spans: Sequence[tuple[int, int]]
) -> tuple[list[float], list[float], list[float], float]:
    """Tops of boxes, tops and bottoms of frames, and the whole height."""
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    for frame, (first, last) in enumerate(spans):
        opens.setdefault(first, []).append(frame)
        closes.setdefault(last, []).append(frame)
    rows, tops, bottoms, y = [], [0.0] * len(spans), [0.0] * len(spans), _MARGIN
    for index, box in enumerate(words):
        for frame in opens.get(index, ()):  # a frame comes after the one around it
            tops[frame] = y
            y += HEADING
        rows.append(y)
        y += box.height
        for frame in reversed(closes.get(index, [])):
            y += _PAD
            bottoms[frame] = y
        y += _BETWEEN
    return rows, tops, bottoms, y - _BETWEEN + _MARGIN


def _lanes(edges: Sequence[Edge]) -> dict[int, int]:
    """A lane for every line that skips boxes. Short lines are nearest to the boxes; no two share a lane where they
    pass each other."""
    taken: list[list[tuple[int, int]]] = []
    lanes: dict[int, int] = {}
    skipping = [
        (edge.head - edge.tail, edge.tail, edge.head, index)
        for index, edge in enumerate(edges)
        if edge.kind != "hidden" and edge.head - edge.tail > 1
    ]
    for _, tail, head, index in sorted(skipping):
        lane = next(
            (lane for lane, others in enumerate(taken) if all(head < first or last < tail for first, last in others)),
            len(taken),
        )
        if lane == len(taken):
            taken.append([])
        taken[lane].append((tail, head))
        lanes[index] = lane
    return lanes


def _line(edge: Edge, lane: int | None, boxes: Sequence[Rectangle], right: float) -> EdgeLine | None:
    if edge.kind == "hidden":
        return None
    tail, head = boxes[edge.tail], boxes[edge.head]
    if lane is None:
        x = head.x + head.width / 2
        return EdgeLine(((x, tail.y + tail.height), (x, head.y)))
    x = right + _LANE * (lane + 0.5)
    # Lines leave low and arrive high, so that those of one box do not run over each other.
    leave = tail.y + tail.height - _CLEARANCE - (lane % 4) * 3
    arrive = head.y + _CLEARANCE + (lane % 4) * 3
    return EdgeLine(
        tuple(_cut_corners((tail.x + tail.width, leave), (x, leave), (x, arrive), (head.x + head.width, arrive)))
    )


def _cut_corners(*points: Point) -> Iterator[Point]:
    """The same way with its corners cut."""
    yield points[0]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        yield _shift(corner, before)
        yield _shift(corner, after)
    yield points[-1]


def _shift(point: Point, other: Point, by: float = 4.0) -> Point:
    length = max(abs(other[0] - point[0]), abs(other[1] - point[1]), 1e-9)
    share = min(by / length, 0.5)
    return point[0] + (other[0] - point[0]) * share, point[1] + (other[1] - point[1]) * share
