"""The difference between a predicted and a measured log of the allocator, block by block.

Both logs are signed sizes in order: a block comes (+) or goes (-). Sizes are requested bytes on both sides.

- The allocations of each phase are aligned by a shortest edit script (E. W. Myers, "An O(ND) Difference Algorithm and
  Its Variations", Algorithmica 1, 1986, the greedy algorithm of section 4; not its linear-space refinement). What is on
  one side only is a block the other side does not have.
- A free is placed by how many common allocations lie before it, for nothing that happens between two allocations moves
  a peak. Two frees of one size at one place are the same; of what is left, each side's own blocks take the next free of
  their size; what then remains is paired in order, and such a block lives longer on the side where its free comes
  later.
- Frees at a log's very end count only against an earlier free on the other side: they move no peak, and a program's
  last line frees as it likes.

A measured log names nothing, so a block that only it has is placed by its neighbour: the last predicted allocation
before it that both sides have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fxmem.records.profile import Phase, Profile
from fxmem.records.validation import Difference, LogSide

_MAX_EDITS = 1500
"""Edits after which a phase is given up: the search takes time and memory in their square."""


class LogEvent(NamedTuple):
    """One allocation or free of a predicted log."""

    nbytes: int
    """Positive for an allocation, negative for a free."""
    phase: Phase
    op: str = ""
    """Operator that allocated the block; empty for what was there before the step."""
    node: str = ""
    line: str = ""
    """Where the user's own code makes the node."""


def predicted_events(profile: Profile) -> tuple[LogEvent, ...]:
    """The log of a profile: blocks that come or go during the step, in order. Empty blocks are none: an allocator is
    not asked for them."""
    found = []
    for index, storage in enumerate(profile.storages):
        if not storage.nbytes:
            continue
        op = profile.ops[storage.op] if storage.op is not None else None
        node = op.node if op is not None else storage.node
        made = profile.nodes[node] if node is not None else None
        line = made.source.place if made is not None and made.source is not None else ""
        names = (op.name if op is not None else "", made.name if made is not None else "", line)
        # At one tick comes before goes: an op allocates before its inputs are freed.
        if storage.birth > 0:
            found.append((storage.birth, False, index, storage.nbytes, names))
        if storage.death < profile.ticks:
            found.append((storage.death, True, index, -storage.nbytes, names))
    return tuple(LogEvent(nbytes, _find_phase(profile, tick), *names) for tick, _, _, nbytes, names in sorted(found))


def _find_phase(profile: Profile, tick: int) -> Phase:
    return next((span.phase for span in reversed(profile.phases) if tick >= span.begin), Phase.FORWARD)


def first_differences(
    predicted: Sequence[LogEvent],
    measured: Sequence[int],
    measured_by_phase: Mapping[Phase, int] | None = None,
    *,
    limit: int = 20,
) -> tuple[Difference, ...]:
    """The first blocks, in the order of the step, on which two logs disagree.

    Args:
        predicted: as from `predicted_events`.
        measured: signed requested bytes.
        measured_by_phase: how many events of `measured` fall into each phase, in the order of the phases; their sum is
            its length. Without it the logs are aligned as wholes, and a block that only the measurement has is in its
            neighbour's phase.
        limit: how many to return at most.

    After 1500 allocations that only one side has, the rest of a phase is not looked at: what follows that many is no
    first difference.

    Raises:
        ValueError: `measured_by_phase` does not add up to the events.
    """
    if measured_by_phase is not None and sum(measured_by_phase.values()) != len(measured):
        raise ValueError(
            f"expected measured_by_phase to add up to the {len(measured)} events, got {sum(measured_by_phase.values())}"
        )
    mine = _Log([event.nbytes for event in predicted])
    theirs = _Log(measured)
    found: list[tuple[int, Difference]] = []
    for phase, (ours, others) in _split_logs(predicted, len(measured), measured_by_phase):
        found += _blocks(predicted, mine, ours, theirs, others, phase)
    found += _frees(predicted, mine, theirs, found)
    return tuple(difference for _, _, difference in sorted(_rank(found), key=lambda ranked: ranked[:2])[:limit])


def count_by_phase(predicted: Sequence[LogEvent], measured: Sequence[int]) -> dict[Phase, int]:
    """How many events of a log without phases fall into each.

    A phase begins at the first of its blocks that both logs have.

    Args:
        predicted: as for `first_differences`.
        measured: as for `first_differences`.
    """
    mine, theirs = _Log([event.nbytes for event in predicted]), _Log(measured)
    _align(mine, range(len(predicted)), theirs, range(len(measured)))
    begins: dict[Phase, int] = {}
    for at, other in zip(mine.common, theirs.common, strict=True):
        begins.setdefault(predicted[at].phase, other)
    borders = [*list(begins.values())[1:], len(measured)]
    counts, before = {}, 0
    for phase, border in zip(begins or [Phase.FORWARD], borders, strict=True):
        counts[phase], before = border - before, border
    return counts


def _rank(found: Sequence[tuple[int, Difference]]) -> Iterator[tuple[int, int, Difference]]:
    """Rank the differences at one place so that neither side hides the other."""
    ranks: Counter[tuple[int, LogSide]] = Counter()
    for place, difference in found:
        yield place, ranks[place, difference.side], difference
        ranks[place, difference.side] += 1


class _Log:
    """A log as far as it has been aligned."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.common: list[int] = []
        """Indices of the allocations both sides have."""
        self.read: list[range] = []
        """What has been aligned."""

    def place(self, at: int) -> int:
        """How many common allocations lie before an event."""
        return bisect_left(self.common, at)

    def frees(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Frees in the aligned part by size: their indices, those at the end apart."""
        end = next((at + 1 for at in reversed(range(len(self.sizes))) if self.sizes[at] > 0), 0)
        found: dict[int, list[int]] = defaultdict(list)
        last: dict[int, list[int]] = defaultdict(list)
        for piece in self.read:
            for at in piece:
                if self.sizes[at] < 0:
                    (found if at < end else last)[-self.sizes[at]].append(at)
        return found, last


def _split_logs(
    predicted: Sequence[LogEvent], measured: int, by_phase: Mapping[Phase, int] | None
) -> list[tuple[Phase | None, tuple[range, range]]]:
    """What to align with what: the two logs' events of each phase, or all of both."""
    if by_phase is None:
        return [(None, (range(len(predicted)), range(measured)))]
    pieces: list[tuple[Phase | None, tuple[range, range]]] = []
    begin = 0
    for phase in Phase:
        held = [at for at, event in enumerate(predicted) if event.phase is phase]
        count = by_phase.get(phase, 0)
        pieces.append((phase, (range(held[0], held[-1] + 1) if held else range(0), range(begin, begin + count))))
        begin += count
    return pieces


def _align(mine: _Log, ours: range, theirs: _Log, others: range) -> tuple[list[int], list[int]]:
    """Align the allocations of one piece; return those that only one side has."""
    a, b = ([at for at in piece if log.sizes[at] > 0] for log, piece in ((mine, ours), (theirs, others)))
    only_a, only_b, ends = _edit_script([mine.sizes[at] for at in a], [theirs.sizes[at] for at in b])
    sides = zip((mine, theirs), (ours, others), (a, b), (set(only_a), set(only_b)), ends, strict=True)
    for log, piece, allocations, only, end in sides:
        log.common += [at for i, at in enumerate(allocations[:end]) if i not in only]
        log.read.append(range(piece.start, allocations[end]) if end < len(allocations) else piece)
    return [a[i] for i in only_a], [b[i] for i in only_b]


def _difference(side: LogSide, position: int, event: LogEvent, *, lives_longer: bool = False) -> Difference:
    return Difference(
        side=side, lives_longer=lives_longer, nbytes=abs(event.nbytes), phase=event.phase, position=position,
        op=event.op, node=event.node, line=event.line,
    )  # fmt: skip


def _blocks(
    predicted: Sequence[LogEvent], mine: _Log, ours: range, theirs: _Log, others: range, phase: Phase | None
) -> list[tuple[int, Difference]]:
    """The blocks of one piece that one side lacks, each with its place."""
    only_mine, only_theirs = _align(mine, ours, theirs, others)
    found = [(mine.place(at), _difference(LogSide.PREDICTED, at, predicted[at])) for at in only_mine]
    for at in only_theirs:
        place = theirs.place(at)
        near = predicted[mine.common[place - 1]] if place else LogEvent(0, Phase.FORWARD)
        event = near._replace(nbytes=theirs.sizes[at], phase=phase or near.phase)
        found.append((place, _difference(LogSide.MEASURED, at, event)))
    return found


def _frees(
    predicted: Sequence[LogEvent], mine: _Log, theirs: _Log, blocks: Sequence[tuple[int, Difference]]
) -> list[tuple[int, Difference]]:
    """The blocks that live longer on one side, with the place of their later free."""
    found = []
    (frees_of_mine, last_of_mine), (frees_of_theirs, last_of_theirs) = mine.frees(), theirs.frees()
    for size in sorted(frees_of_mine.keys() | frees_of_theirs.keys()):
        early, late = _find_unmatched(mine, frees_of_mine[size], theirs, frees_of_theirs[size])
        for side, left, log in ((LogSide.PREDICTED, early, mine), (LogSide.MEASURED, late, theirs)):
            for place, block in blocks:
                if block.side is side and block.nbytes == size:
                    own = next((at for at in left if log.place(at) >= place and at > (block.position or 0)), None)
                    if own is not None:
                        left.remove(own)
        lacking = len(late) - len(early)
        early += last_of_mine[size][len(last_of_theirs[size]) :][: max(lacking, 0)]
        late += last_of_theirs[size][len(last_of_mine[size]) :][: max(-lacking, 0)]
        for at, other in zip(early, late, strict=False):
            place, other_place = mine.place(at), theirs.place(other)
            if place != other_place:
                side, position = (LogSide.PREDICTED, at) if place > other_place else (LogSide.MEASURED, other)
                block = _difference(side, position, predicted[at], lives_longer=True)
                found.append((max(place, other_place), block))
    return found


def _find_unmatched(mine: _Log, frees: list[int], theirs: _Log, other_frees: list[int]) -> tuple[list[int], list[int]]:
    """Frees of one size that the other side does not have at the same place."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for at in reversed(other_frees):
        waiting[theirs.place(at)].append(at)
    left = [at for at in frees if not (waiting[mine.place(at)] and waiting[mine.place(at)].pop())]
    return left, sorted(at for same in waiting.values() for at in same)


def _edit_script(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int], tuple[int, int]]:
    """A shortest script from `a` to `b`, as far as `_MAX_EDITS` edits reach.

    `difflib.SequenceMatcher` needs time in the square of the logs, where sizes come again and again: for 10,000
    allocations of a model's blocks 5.3 s, this 0.03 s.

    Returns the indices only `a` has, those only `b` has, and how far the two were read.
    """
    # furthest[k] is the furthest x on diagonal k = x - y; k may be negative, which is why the list counts from its end
    # there. trace[edits] is what of it the step to so many edits reads: diagonals -edits - 1 to edits + 1.
    most = min(len(a) + len(b), _MAX_EDITS)
    furthest = [0] * (2 * most + 3)
    trace: list[list[int]] = []
    end = len(a), len(b)
    for edits in range(most + 1):
        trace.append([furthest[k] for k in range(-edits - 1, edits + 2)])
        for k in range(-edits, edits + 1, 2):
            x = furthest[k + 1] if _is_down(furthest[k - 1], furthest[k + 1], edits, k) else furthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            furthest[k] = x
            if (x, x - k) == end:
                return *_backtrack(trace, end), end
    ends = ((furthest[k], furthest[k] - k) for k in range(-most, most + 1, 2))
    reached = max(((x, y) for x, y in ends if x <= len(a) and 0 <= y <= len(b)), key=sum)
    return *_backtrack(trace, reached), reached


def _is_down(left: int, right: int, edits: int, k: int) -> bool:
    """Whether diagonal `k` is reached by an event of `b` rather than one of `a`; the neighbouring diagonals' furthest x
    decide."""
    return k == -edits or (k != edits and left < right)


def _backtrack(trace: Sequence[Sequence[int]], end: tuple[int, int]) -> tuple[list[int], list[int]]:
    x, y = end
    only_a: list[int] = []
    only_b: list[int] = []
    for edits in reversed(range(1, len(trace))):
        k = x - y
        left, right = trace[edits][k + edits], trace[edits][k + edits + 2]
        if _is_down(left, right, edits, k):
            x, y = right, right - k - 1
            only_b.append(y)
        else:
            x, y = left, left - k + 1
            only_a.append(x)
    return only_a[::-1], only_b[::-1]
