"""Where a predicted and a measured log of the allocator part ways: whose blocks only one of the two has, and which live longer.

Both logs are signed sizes in order: a block comes (+) or goes (-). The logs of one phase are aligned by a shortest edit script
(E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1, 1986, the greedy algorithm of section 4; not
its linear-space refinement), so every event is either on both sides or on one. Then, phase by phase:

- a block that comes on one side only is one the other side does not have;
- a free of one size that both sides have, but at other places, is a block that lives longer on one of them;
- what lives longer than the log is left out: frees at a log's very end move no peak, and a program's last line frees as it likes.

A measured log names nothing, so a block that only it has is placed by its neighbour: the last predicted allocation before it
that both sides have. Sizes are requested bytes on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxmem.records import Phase, Profile
from fxmem.validation_records import Difference, Side

__all__ = ["Event", "first_differences", "predicted_events"]

_MAX_EDITS = 1500
"""Edits after which a phase is given up: the search takes time and memory in their square."""


@dataclass(frozen=True, slots=True)
class Event:
    """One allocation or free of a predicted log."""

    nbytes: int
    """Positive for an allocation, negative for a free."""
    phase: Phase
    op: str = ""
    """Operator that allocated the block; empty for what was there before the step."""
    node: str = ""


def predicted_events(profile: Profile) -> tuple[Event, ...]:
    """The log of a profile: blocks that come or go during the step, in order. Empty blocks are none: an allocator is not asked for them."""
    found = []
    for index, storage in enumerate(profile.storages):
        if not storage.nbytes:
            continue
        op = profile.ops[storage.op] if storage.op is not None else None
        node = op.node if op is not None else storage.node
        names = (op.name if op is not None else "", profile.nodes[node].name if node is not None else "")
        # At one tick comes before goes: an op allocates before its inputs are freed.
        if storage.birth > 0:
            found.append((storage.birth, False, index, storage.nbytes, names))
        if storage.death < profile.ticks:
            found.append((storage.death, True, index, -storage.nbytes, names))
    return tuple(Event(nbytes, _phase_at(profile, tick), *names) for tick, _, _, nbytes, names in sorted(found))


def _phase_at(profile: Profile, tick: int) -> Phase:
    return next((span.phase for span in reversed(profile.phases) if tick >= span.begin), Phase.FORWARD)


def first_differences(
    predicted: Sequence[Event], measured: Sequence[int], measured_by_phase: dict[Phase, int] | None = None, *, limit: int = 20
) -> tuple[Difference, ...]:
    """The first blocks, in the order of the step, on which two logs disagree.

    Args:
        predicted: as from `predicted_events`.
        measured: signed requested bytes.
        measured_by_phase: how many events of `measured` fall into each phase, in the order of the phases; their sum is its
            length. Without it the logs are aligned as wholes, and a block that only the measurement has is in its neighbour's phase.
        limit: how many to return at most.

    After 1500 events that only one side has, the rest of a phase is not looked at: what follows that many is no first difference.

    Raises:
        ValueError: `measured_by_phase` does not add up to the events.
    """
    if measured_by_phase is not None and sum(measured_by_phase.values()) != len(measured):
        raise ValueError(f"expected measured_by_phase to add up to the {len(measured)} events, got {sum(measured_by_phase.values())}")
    mine, theirs = predicted[: _without_last_frees([event.nbytes for event in predicted])], measured[: _without_last_frees(measured)]
    found: list[Difference] = []
    for phase, pieces in _pieces(mine, len(theirs), measured_by_phase):
        if len(found) >= limit:
            break
        found += _differences(mine, theirs, pieces, phase)
    return tuple(found[:limit])


def _without_last_frees(sizes: Sequence[int]) -> int:
    return next((at + 1 for at in reversed(range(len(sizes))) if sizes[at] > 0), 0)


_Pieces = tuple[range, range]


def _pieces(predicted: Sequence[Event], measured: int, by_phase: dict[Phase, int] | None) -> list[tuple[Phase | None, _Pieces]]:
    """What to align with what: the two logs' events of each phase, or all of both."""
    if by_phase is None:
        return [(None, (range(len(predicted)), range(measured)))]
    starts: dict[Phase, range] = {}
    for phase in Phase:
        held = [at for at, event in enumerate(predicted) if event.phase is phase]
        starts[phase] = range(held[0], held[-1] + 1) if held else range(0)
    pieces: list[tuple[Phase | None, _Pieces]] = []
    begin = 0
    for phase, count in by_phase.items():
        pieces.append((phase, (starts[phase], range(min(begin, measured), min(begin + count, measured)))))
        begin += count
    return pieces


def _differences(predicted: Sequence[Event], measured: Sequence[int], pieces: _Pieces, phase: Phase | None) -> list[Difference]:
    mine, theirs = pieces
    sizes = [predicted[at].nbytes for at in mine], [measured[at] for at in theirs]
    only_mine, only_theirs, ends = _edit_script(*sizes)
    neighbours = _neighbours(predicted, mine, set(only_mine), set(only_theirs), ends)
    found: list[tuple[tuple[int, int], Difference]] = []

    def note(side: Side, at: int, place: tuple[int, int], *, lives_longer: bool = False) -> None:
        event = predicted[mine[at]] if side is Side.PREDICTED else neighbours[at]
        size = sizes[0][at] if side is Side.PREDICTED else sizes[1][at]
        found.append(
            (
                place,
                Difference(
                    side=side,
                    lives_longer=lives_longer,
                    nbytes=abs(size),
                    phase=phase or (event.phase if event is not None else Phase.FORWARD),
                    position=mine[at] if side is Side.PREDICTED else theirs[at],
                    op=event.op if event is not None else "",
                    node=event.node if event is not None else "",
                ),
            )
        )

    both = {Side.PREDICTED: only_mine, Side.MEASURED: only_theirs}
    frees: dict[Side, defaultdict[int, list[tuple[tuple[int, int], int]]]] = {side: defaultdict(list) for side in Side}
    for side, places in both.items():
        for at, place in places.items():
            size = sizes[0 if side is Side.PREDICTED else 1][at]
            if size > 0:
                note(side, at, place)
            else:
                frees[side][size].append((place, at))
    for size, early_and_late in frees[Side.PREDICTED].items():
        for (place, at), (other_place, other) in zip(early_and_late, frees[Side.MEASURED].get(size, []), strict=False):
            late, place_of_late, index = (Side.PREDICTED, place, at) if place > other_place else (Side.MEASURED, other_place, other)
            note(late, index, place_of_late, lives_longer=True)
    return [difference for _, difference in sorted(found, key=lambda placed: placed[0])]


def _neighbours(predicted: Sequence[Event], mine: range, only_mine: set[int], only_theirs: set[int], ends: tuple[int, int]) -> dict[int, Event | None]:
    """By event of the measured piece: the last predicted allocation before it that both sides have."""
    common = iter(at for at in range(ends[0]) if at not in only_mine)
    last: Event | None = None
    found: dict[int, Event | None] = {}
    for at in range(ends[1]):
        if at not in only_theirs:
            event = predicted[mine[next(common)]]
            last = event if event.nbytes > 0 else last
        found[at] = last
    return found


_Places = dict[int, tuple[int, int]]


def _edit_script(a: Sequence[int], b: Sequence[int]) -> tuple[_Places, _Places, tuple[int, int]]:
    """A shortest script from `a` to `b`, as far as `_MAX_EDITS` edits reach.

    Returns the indices only `a` has and those only `b` has, each with the place `(x, y)` in both where it falls, and up to
    where the two were read.
    """
    # V[k] is the furthest x on diagonal k = x - y after d edits; `trace` keeps the V before each d.
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    end = len(a), len(b)
    for edits in range(min(len(a) + len(b), _MAX_EDITS) + 1):
        trace.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            y = x - k
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if (x, y) == end:
                return *_backtrack(trace, end), end
    inside = [(x, x - k) for k, x in furthest.items() if abs(k) <= _MAX_EDITS and (k + _MAX_EDITS) % 2 == 0 and x <= len(a) and 0 <= x - k <= len(b)]
    reached = max(inside, key=sum)
    return *_backtrack(trace, reached), reached


def _backtrack(trace: list[dict[int, int]], end: tuple[int, int]) -> tuple[_Places, _Places]:
    x, y = end
    only_a: _Places = {}
    only_b: _Places = {}
    for edits in reversed(range(1, len(trace))):
        furthest, k = trace[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        before_k = k + 1 if down else k - 1
        before_x = furthest[before_k]
        before_y = before_x - before_k
        if down:
            only_b[before_y] = before_x, before_y
        else:
            only_a[before_x] = before_x, before_y
        x, y = before_x, before_y
    return dict(reversed(only_a.items())), dict(reversed(only_b.items()))
