"""What a snapshot says, by its history and the state that it ends with.

What is alive when the history begins is what follows from its end, read backwards. A block whose allocation the history
does not have is *older*: its size is known, and its stack only if it is still there at the end.

Growth is counted between marks: the ends of the optimizer's steps where the file has them, else quarters of the
history. A line grows if it has more alive at each mark than at the one before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from fxmem.memory.shortage import find_cause
from fxmem.memory.snapshots.reader import (
    ALLOC,
    FREE,
    FREED,
    GROW,
    HELD,
    REFUSED,
    SHRINK,
    WAITING,
    Dump,
    DumpedSegment,
    describe_frames,
    find_place,
)
from fxmem.records.shortage import (
    GrownLine,
    Holder,
    InTheWay,
    Level,
    OutOfMemoryMessage,
    Piece,
    PieceState,
    SegmentMap,
    SnapshotReport,
)

_MOST: Final = 40
"""Stacks, lines in the way and segments that are kept."""
_LINES: Final = 200
_LEVELS: Final = 1000
_PIECES: Final = 200
_SHORTAGES: Final = 20
_STATES: Final[tuple[PieceState, ...]] = ("free", "used", "waiting")


def report_dump(dump: Dump) -> SnapshotReport:
    """Explain a snapshot; without a history, what it ends with."""
    actions, sizes = dump.actions, dump.sizes
    signed = np.where(actions == ALLOC, sizes, np.where(actions == FREE, -sizes, 0))
    segment = np.where(actions == GROW, sizes, np.where(actions == SHRINK, -sizes, 0))
    waiting = np.where(actions == FREE, sizes, np.where(actions == FREED, -sizes, 0))
    blocks = [block for each in dump.segments for block in each.blocks]
    alive_at_end = sum(block.requested_bytes for block in blocks if block.state == HELD)
    reserved_at_end = sum(each.nbytes for each in dump.segments)
    live = _levels(signed, alive_at_end)
    reserved = np.maximum(_levels(segment, reserved_at_end), live)
    pending = _levels(waiting, sum(block.requested_bytes for block in blocks if block.state == WAITING))
    peak = int(np.argmax(live))
    marks = _find_marks(dump)
    walk = _walk(dump, sorted({peak, *marks}))
    held = walk[peak]
    known = sum(nbytes for nbytes, _ in held.values())
    older = _find_older(dump, peak, int(live[peak]) - known)
    place = cache(lambda stack: find_place(dump.frames[stack]))
    counts = Counter(block.nbytes for block in blocks if block.state == HELD)
    return SnapshotReport(
        device=dump.device,
        others=dump.others,
        allocator_settings=dump.allocator_settings,
        events=len(actions) if sizes.any() else 0,
        peak_bytes=int(live[peak]),
        peak_event=peak,
        reserved_peak_bytes=int(reserved.max()),
        reserved_at_peak_bytes=int(reserved[peak]),
        older_bytes=max(int(live[peak]) - known, 0),
        waiting_bytes=int(pending[(actions == ALLOC) | (actions == GROW)].max(initial=0)),
        lines=tuple(_hold_by_line(dump, held, older, place)[:_LINES]),
        stacks=tuple(_hold_by_stack(dump, held, older, place)[:_MOST]),
        marks=tuple(marks),
        steps=len(dump.step_ends),
        grown=tuple(_find_growth([walk[mark] for mark in marks], place)),
        reserved_bytes=reserved_at_end,
        allocated_bytes=sum(block.nbytes for block in blocks if block.state == HELD),
        cached_bytes=max(reserved_at_end - sum(block.nbytes for block in blocks if block.state), 0),
        releasable_bytes=sum(each.nbytes for each in dump.segments if not any(block.state for block in each.blocks)),
        largest_free_bytes=max(
            (piece.nbytes for each in dump.segments for piece in _pieces(each) if piece.state == "free"), default=0
        ),
        sizes=tuple(sorted(counts.items(), key=lambda each: -each[0] * each[1])[:_MOST]),
        in_the_way=tuple(_find_in_the_way(dump, place))[:_MOST],
        segments=tuple(
            SegmentMap(nbytes=each.nbytes, pieces=tuple(_pieces(each))[:_PIECES])
            for each in sorted(dump.segments, key=lambda each: -each.nbytes)[:_MOST]
        ),
        levels=tuple(_sample(live, reserved)),
        shortages=tuple(_shortages(dump, live, reserved))[:_SHORTAGES],
    )


def _levels(changes: npt.NDArray[np.int64], at_end: int) -> npt.NDArray[np.int64]:
    """The sum after each event, that after the last being known; what would be negative contradicts itself: 0."""
    sums = np.cumsum(changes)
    return np.asarray(np.maximum(sums - sums[-1] + at_end, 0), np.int64)


_Place = Callable[[int], str]
"""Of the number of a stack, where in the program it is."""
Held = dict[int, tuple[int, int]]
"""By address, a block's requested bytes and its stack."""


def _walk(dump: Dump, stops: Sequence[int]) -> dict[int, Held]:
    """The blocks of the history that are alive after each of these events."""
    held: Held = {}
    found, begin = {}, 0
    for stop in stops:
        part = slice(begin, stop + 1)
        columns = (dump.actions[part], dump.addresses[part], dump.sizes[part], dump.stacks[part])
        for action, address, size, stack in zip(*(each.tolist() for each in columns), strict=True):
            if action == ALLOC:
                held[address] = size, stack
            elif action == FREE:
                held.pop(address, None)
        found[stop], begin = dict(held), stop + 1
    return found


def _find_older(dump: Dump, event: int, nbytes: int) -> list[tuple[int, int]]:
    """Blocks that are older than the history and alive after an event: those still there at the end have a stack, the
    rest is one of no stack."""
    allocated = {int(each) for each in dump.addresses[: event + 1][dump.actions[: event + 1] == ALLOC]}
    later = {int(each) for each in dump.addresses[event + 1 :][dump.actions[event + 1 :] == ALLOC]}
    known = [
        (block.requested_bytes, block.stack)
        for segment in dump.segments
        for block in segment.blocks
        if block.state == HELD and block.address not in allocated and block.address not in later
    ]
    rest = nbytes - sum(size for size, _ in known)
    return [*known, (rest, -1)] if rest > 0 else known


def _hold_by_stack(dump: Dump, held: Held, older: Sequence[tuple[int, int]], place: _Place) -> list[Holder]:
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for nbytes, stack in (*held.values(), *older):
        sums[stack][0] += nbytes
        sums[stack][1] += 1
    return [
        Holder(place=place(stack), nbytes=nbytes, count=count, frames=describe_frames(dump.frames[stack]))
        for stack, (nbytes, count) in sorted(sums.items(), key=lambda each: (-each[1][0], each[0]))
    ]


def _hold_by_line(dump: Dump, held: Held, older: Sequence[tuple[int, int]], place: _Place) -> list[Holder]:
    lines: dict[str, Holder] = {}
    for each in _hold_by_stack(dump, held, older, place):
        known = lines.get(each.place)
        if known is not None:
            each = known.model_copy(update={"nbytes": known.nbytes + each.nbytes, "count": known.count + each.count})
        lines[each.place] = each
    return sorted(lines.values(), key=lambda each: (-each.nbytes, each.place))


# --- growth -----------------------------------------------------------------------------------------------------------


def _find_marks(dump: Dump) -> list[int]:
    last = len(dump.actions) - 1
    ends = [min(max(each - 1, 0), last) for each in dump.step_ends]
    if len(ends) < 3:
        ends = [last * quarter // 4 for quarter in range(1, 5)]
    return sorted(set(ends))


def _find_growth(held: Sequence[Held], place: _Place) -> list[GrownLine]:
    """Lines with more alive at each mark than at the one before, from the second mark on: the first has the set-up."""
    counts = []
    for each in held:
        lines: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for nbytes, stack in each.values():
            lines[place(stack)][0] += nbytes
            lines[place(stack)][1] += 1
        counts.append(lines)
    if len(counts) < 3:
        return []
    found = []
    for line, (nbytes, count) in counts[-1].items():
        series = [each[line][0] if line in each else 0 for each in counts]
        if all(after > before for before, after in pairwise(series)) and count - counts[0].get(line, (0, 0))[1] >= 3:
            blocks = count - counts[0].get(line, (0, 0))[1]
            found.append(GrownLine(place=line, nbytes=nbytes - series[0], blocks=blocks))
    return sorted(found, key=lambda each: (-each.nbytes, each.place))[:_MOST]


# --- segments ---------------------------------------------------------------------------------------------------------


def _pieces(segment: DumpedSegment) -> Iterator[Piece]:
    for state, blocks in groupby(segment.blocks, key=lambda block: block.state):
        yield Piece(nbytes=sum(block.nbytes for block in blocks), state=_STATES[state])


def _find_in_the_way(dump: Dump, place: _Place) -> list[InTheWay]:
    """By line, blocks in segments of which more than half is unused; most unused bytes first."""
    lines: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for segment in dump.segments:
        used = [block for block in segment.blocks if block.state]
        free = segment.nbytes - sum(block.nbytes for block in used)
        if used and 2 * free > segment.nbytes:
            for line in {place(block.stack) for block in used}:
                lines[line][2] += free
            for block in used:
                lines[place(block.stack)][0] += block.requested_bytes
                lines[place(block.stack)][1] += 1
    found = [InTheWay(place=line, nbytes=n, count=count, free_bytes=free) for line, (n, count, free) in lines.items()]
    return sorted(found, key=lambda each: (-each.free_bytes, each.place))


# --- over time --------------------------------------------------------------------------------------------------------


def _sample(live: npt.NDArray[np.int64], reserved: npt.NDArray[np.int64]) -> Iterator[Level]:
    bounds = np.unique(np.linspace(0, len(live), min(_LEVELS, len(live)) + 1).astype(int))
    for begin, end in pairwise(bounds.tolist()):
        yield Level(
            event=begin, requested_bytes=int(live[begin:end].max()), reserved_bytes=int(reserved[begin:end].max())
        )


def _shortages(
    dump: Dump, live: npt.NDArray[np.int64], reserved: npt.NDArray[np.int64]
) -> Iterator[OutOfMemoryMessage]:
    """The requests that were refused, as messages: what was allocated then is requested bytes, and outside is what was
    free or reserved when another was refused, and is neither now."""
    refused = np.flatnonzero(dump.actions == REFUSED).tolist()
    most = max((dump.free_bytes[event] + int(reserved[event]) for event in refused), default=0)
    for event in refused:
        yield find_cause(
            OutOfMemoryMessage(
                line=event,
                api="CUDA",
                device=dump.device,
                place=find_place(dump.frames[int(dump.stacks[event])]),
                requested_bytes=int(dump.sizes[event]),
                free_bytes=dump.free_bytes[event],
                allocated_bytes=int(live[event]),
                reserved_bytes=int(reserved[event]),
                outside_bytes=most - dump.free_bytes[event] - int(reserved[event]),
            )
        )
