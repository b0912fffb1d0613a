"""Where boxes, frames and lines go: rows in the order of the run, broken into columns so that all of it fits a screen.

The boxes and frames inside a frame stand in rows. What reads another stands below it, and what does not stands beside
it. A frame that is too high for the screen goes on in a second column to the right, as text does in a newspaper; how
high is too high is chosen so that the whole is as large as possible on the screen. Lines between neighbouring rows are
direct, all others run in lanes between the columns. Nothing overlaps, and the time grows with boxes and lines alone.

`fxmem/show/html/graph.js` does the same in the page, where boxes are folded and opened; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from fxmem.records.units import group
from fxmem.show.graph.labels import NOTE_SIZE, TITLE, TITLE_SIZE, FrameWords, Words
from fxmem.show.graph.picture import Picture
from fxmem.show.svg import text_width

Point = tuple[float, float]

HEADING = TITLE + 8.0
"""Height of a frame's heading, in pixels."""
SCREEN = (960.0, 850.0)
"""Width and height that a graph is to fit, in pixels."""

_PAD = 10.0
_BESIDE = 14.0
_BELOW = 16.0
_GUTTER = 30.0
"""Between columns."""
_LANE = 9.0
_MOST_BESIDE = 3
"""Siblings in a row."""
_TRIES, _MANY = 8, 400
"""Heights for what is inside a cell that are tried for each height of the cell; two, where there are many boxes."""
_CORNER = 4.0
_LEAVE = 8.0
"""How far below the upper edge of a box a line from the side arrives, and how far above the lower one it leaves."""
_COLUMNS = (1, 1.15, 1.3, 1.5, 1.75, 2, 2.3, 2.6, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
"""Parts of the height of one column that are tried as the most that columns may have."""


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


@dataclass(eq=False)
class _Cell:
    """A box or a frame on its way to a place."""

    index: int = -1
    is_frame: bool = False
    parent: _Cell | None = None
    cells: list[_Cell] = field(default_factory=list)
    least: float = 0.0
    """Width of a frame's heading."""
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0
    rank: int = 0
    row: int = 0
    column: int = 0
    rows: list[list[_Cell]] = field(default_factory=list)
    edges: list[tuple[int, _Cell, _Cell]] = field(default_factory=list)
    """Lines between two of its cells, by their index."""
    columns: list[_Column] = field(default_factory=list)
    options: list[tuple[float, float, int]] = field(default_factory=list)
    """For each height that it may have: its width, its height, and the number of the height for the cells in it."""

    @property
    def top(self) -> float:
        """Height of what stands above its cells."""
        return HEADING if self.is_frame else 0.0

    @property
    def pad(self) -> float:
        """Margin around its cells."""
        return _PAD if self.is_frame else 0.0


@dataclass
class _Column:
    rows: list[list[_Cell]]
    width: float
    height: float
    lanes: dict[int, int]
    """The lane to the right of the column that a line runs in."""
    x: float = 0.0

    @property
    def right(self) -> float:
        """Where its lanes begin."""
        return self.x + self.width


def heading_width(words: FrameWords) -> float:
    """Width that a frame's heading needs, in pixels."""
    return text_width(words.title, TITLE_SIZE, bold=True) + 10.0 + text_width(words.note, NOTE_SIZE) + 2 * _PAD


def arrange(
    drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords], screen: Point = SCREEN
) -> GraphLayout:
    """Place boxes, frames and lines, as large as a screen of this size allows."""
    root, boxes, frames = _cells(drawing, words, headings)
    _rank(root)
    whole = _height(root)
    caps = [whole / number + 1.0 for number in _COLUMNS]
    _search(root, caps, _TRIES if len(boxes) < _MANY else 2)
    scales = [min(screen[0] / max(width, 1.0), screen[1] / max(height, 1.0), 1.0) for width, height, _ in root.options]
    _settle(root, caps, max(range(len(caps)), key=lambda number: scales[number]))
    _place(root, 0.0, 0.0)
    lines: list[EdgeLine | None] = [None] * len(drawing.edges)
    for around in (root, *frames):
        for index, tail, head in around.edges:
            edge = drawing.edges[index]
            if edge.kind != "hidden":
                lines[index] = _line(around, index, tail, head, boxes[edge.tail], boxes[edge.head])
    return GraphLayout(root.width, root.height, _areas(boxes), _areas(frames), tuple(lines))


def _height(around: _Cell) -> float:
    """Height of a cell whose rows all stand in one column."""
    if not around.cells:
        return around.height
    heights = [max(map(_height, row)) for row in around.rows]
    return around.top + sum(heights) + _BELOW * max(len(heights) - 1, 0) + around.pad


def _areas(cells: Sequence[_Cell]) -> tuple[Rectangle, ...]:
    return tuple(Rectangle(cell.x, cell.y, cell.width, cell.height) for cell in cells)


def _cells(
    drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords]
) -> tuple[_Cell, list[_Cell], list[_Cell]]:
    """The root, boxes and frames; lines are at the frame around both ends."""
    root = _Cell()
    frames = [_Cell(index, is_frame=True, least=heading_width(heading)) for index, heading in enumerate(headings)]
    for cell, frame in zip(frames, drawing.frames, strict=True):
        cell.parent = root if frame.parent is None else frames[frame.parent]
    boxes = [_Cell(index, width=each.width, height=each.height) for index, each in enumerate(words)]
    placed: set[int] = set()
    for cell, box in zip(boxes, drawing.boxes, strict=True):
        cell.parent = root if box.frame is None else frames[box.frame]
        inner: _Cell = cell
        around: _Cell | None = cell.parent
        # A frame stands where its first box does.
        while around is not None:
            around.cells.append(inner)
            if around is root or around.index in placed:
                break
            placed.add(around.index)
            inner, around = around, around.parent
    for index, edge in enumerate(drawing.edges):
        tails, heads = list(_chain(boxes[edge.tail])), list(_chain(boxes[edge.head]))
        while tails[-2] is heads[-2]:
            tails.pop()
            heads.pop()
        tails[-1].edges.append((index, tails[-2], heads[-2]))
    return root, boxes, frames


def _chain(cell: _Cell) -> Iterator[_Cell]:
    """A cell and all that are around it, to the root."""
    inner: _Cell | None = cell
    while inner is not None:
        yield inner
        inner = inner.parent


def _rank(around: _Cell) -> None:
    """Rows of cells: each below all that it reads."""
    before = group((id(head), tail) for _, tail, head in around.edges)
    ranked: dict[int, list[_Cell]] = {}
    for cell in around.cells:
        cell.rank = max((tail.rank + 1 for tail in before.get(id(cell), ())), default=0)
        ranked.setdefault(cell.rank, []).append(cell)
        if cell.cells:
            _rank(cell)
    for rank in sorted(ranked):
        cells = ranked[rank]
        around.rows += [cells[at : at + _MOST_BESIDE] for at in range(0, len(cells), _MOST_BESIDE)]
    for number, row in enumerate(around.rows):
        for cell in row:
            cell.row = number


# --- sizes ------------------------------------------------------------------------------------------------------------


def _search(around: _Cell, caps: Sequence[float], tries: int) -> None:
    """Find the narrowest way to break its rows, for each height it may have.

    What is inside may be broken at a lesser height than the cell itself: a few of the next lesser ones are tried.
    """
    for cell in around.cells:
        if cell.cells:
            _search(cell, caps, tries)
    found: dict[int, tuple[float, float]] = {}
    for number, cap in enumerate(caps):
        best = (True, 0.0, 0.0, 0)
        for inner in range(number, min(number + tries, len(caps))):
            width, height = _sized(around, cap, inner)
            too_high = height > cap
            key = (too_high, height if too_high else width, width if too_high else height, inner)
            if inner == number or key < best:
                best, found[number] = key, (width, height)
        around.options.append((*found[number], best[3]))


def _sized(around: _Cell, cap: float, inner: int) -> tuple[float, float]:
    """Width and height, without lanes, of a cell of at most this height."""
    sizes = [
        [cell.options[inner][:2] if cell.cells else (cell.width, cell.height) for cell in row] for row in around.rows
    ]
    heights = [max(height for _, height in row) for row in sizes]
    widths = [sum(width for width, _ in row) + _BESIDE * (len(row) - 1) for row in sizes]
    width, highest, start = 2 * around.pad - _GUTTER, 0.0, 0
    for end in _breaks(heights, cap - around.top - around.pad):
        width += max(widths[start:end]) + _GUTTER
        highest = max(highest, sum(heights[start:end]) + _BELOW * (end - start - 1))
        start = end
    return max(width, around.least), around.top + highest + around.pad


def _breaks(heights: Sequence[float], cap: float) -> Iterator[int]:
    """Ends of the columns when each is filled up to this height."""
    filled = 0.0
    for index, height in enumerate(heights):
        if index and filled + _BELOW + height > cap:
            yield index
            filled = height
        else:
            filled += height + (_BELOW if index else 0.0)
    if heights:
        yield len(heights)


def _settle(around: _Cell, caps: Sequence[float], number: int) -> None:
    """Break a cell and those in it into columns as found; sizes from inside out."""
    inner = around.options[number][2]
    for cell in around.cells:
        if cell.cells:
            _settle(cell, caps, inner)
    heights = [max(cell.height for cell in row) for row in around.rows]
    start = 0
    for end in _breaks(heights, caps[number] - around.top - around.pad):
        rows = around.rows[start:end]
        for row in rows:
            for cell in row:
                cell.column = len(around.columns)
        width = max(sum(cell.width for cell in row) + _BESIDE * (len(row) - 1) for row in rows)
        around.columns.append(_Column(rows, width, sum(heights[start:end]) + _BELOW * (end - start - 1), {}))
        start = end
    _assign_lanes(around)
    x = around.pad
    for column in around.columns:
        column.x = x
        x += column.width + _lane_room(column) + _GUTTER
    around.width = max(x - _GUTTER + around.pad, around.least)
    around.height = around.top + max((column.height for column in around.columns), default=0.0) + around.pad


def _lane_room(column: _Column) -> float:
    return _LANE * (max(column.lanes.values(), default=-1) + 1)


def _assign_lanes(around: _Cell) -> None:
    """Give each line that skips rows a lane beside its column. Short ones are nearest, and no two meet in a lane."""
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    skipping = [
        (head.row - tail.row, tail.row, head.row, index, tail.column)
        for index, tail, head in around.edges
        if tail.column == head.column and head.row - tail.row > 1
    ]
    for _, first, last, index, column in sorted(skipping):
        lanes = (taken.setdefault((column, lane), []) for lane in count())
        lane, others = next(each for each in enumerate(lanes) if all(last < a or b < first for a, b in each[1]))
        others.append((first, last))
        around.columns[column].lanes[index] = lane


def _place(around: _Cell, x: float, y: float) -> None:
    """Turn sizes into places, from outside in."""
    around.x, around.y = x, y
    for column in around.columns:
        column.x += x
        below = y + around.top
        for row in column.rows:
            height = max(cell.height for cell in row)
            width = sum(cell.width for cell in row) + _BESIDE * (len(row) - 1)
            left = column.x + (column.width - width) / 2
            for cell in row:
                _place(cell, left, below)
                left += cell.width + _BESIDE
            below += height + _BELOW


# --- lines ------------------------------------------------------------------------------------------------------------


def _line(around: _Cell, index: int, tail: _Cell, head: _Cell, source: _Cell, reader: _Cell) -> EdgeLine:
    """The way from one box to another, by the cells they are in."""
    if tail.column == head.column and head.row - tail.row == 1:
        start = (source.x + source.width / 2, source.y + source.height)
        end = (reader.x + reader.width / 2, reader.y)
        if abs(start[0] - end[0]) < 0.5:
            return EdgeLine((start, end))
        # Across between the rows, then straight down: a heading lies on what crosses it.
        knee = (end[0], min(start[1] + _BELOW, end[1]))
        middle = (start[1] + knee[1]) / 2
        return EdgeLine((start, (start[0], middle), (end[0], middle), knee, knee, end, end), curved=True)
    leave, arrive = source.y + source.height - _LEAVE, reader.y + _LEAVE
    right, left = source.x + source.width, reader.x
    column = around.columns[tail.column]
    if tail.column == head.column:
        lane = column.right + _LANE * (column.lanes[index] + 0.5)
        points = [(right, leave), (lane, leave), (lane, arrive), (reader.x + reader.width, arrive)]
        return EdgeLine(tuple(_cut_corners(points)))
    shift = (index % 4 - 1.5) * 4.0
    before = around.columns[head.column].x - _GUTTER / 2 + shift
    if head.column - tail.column == 1:
        points = [(right, leave), (before, leave), (before, arrive), (left, arrive)]
    else:
        after = column.right + _lane_room(column) + _GUTTER / 2 + shift
        above = around.y + around.top - 5.0
        points = [(right, leave), (after, leave), (after, above), (before, above), (before, arrive), (left, arrive)]
    return EdgeLine(tuple(_cut_corners(points)))


def _cut_corners(points: Sequence[Point]) -> Iterator[Point]:
    """The same way with its corners cut."""
    yield points[0]
    for (before, corner), (_, after) in pairwise(pairwise(points)):
        yield _shift(corner, before)
        yield _shift(corner, after)
    yield points[-1]


def _shift(point: Point, other: Point) -> Point:
    length = max(abs(other[0] - point[0]), abs(other[1] - point[1]), 1e-9)
    share = min(_CORNER / length, 0.5)
    return point[0] + (other[0] - point[0]) * share, point[1] + (other[1] - point[1]) * share
