"""Bytes alive at every tick: textbook live ranges over the births and deaths of a profile's storages.

Pure functions, record in, record out. What they assume of a profile is what `check` verifies; a profile made by
fxmem satisfies it, one read from a file should be checked first.

A storage is alive over `[birth, death)`, so the live bytes are the running sum of `+nbytes` at births and
`-nbytes` at deaths (live intervals, as in Poletto and Sarkar, "Linear Scan Register Allocation", TOPLAS 1999).
Everything here is linear in storages plus ticks, except for sorting what is alive at one tick.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from fxmem.errors import UsageError
from fxmem.memory.figures import find_place
from fxmem.records.plan import PlannedStep
from fxmem.records.profile import Kind, Op, Peak, Phase, PhaseBytes, Profile, Storage, Timeline

_DEEPEST = 500
"""Levels of modules: a call of `nn.Module` takes two Python frames, of which there may be 1000 by default
(`sys.getrecursionlimit`)."""


def timeline(profile: Profile) -> Timeline:
    """Bytes alive at every tick of a profile, split by kind, and the peak.

    The peak is the first tick with the most bytes. It is charged to the op that is allocating there; between two
    ops, to the one that ran last. Of the peak's byte counts only `requested_bytes` is known here. A profile of no
    ticks has empty arrays and a peak of 0 bytes.
    """
    of_kind: dict[Kind, list[Storage]] = {kind: [] for kind in Kind}
    for storage in profile.storages:
        of_kind[storage.kind].append(storage)
    by_kind = {kind: _live(profile.ticks, storages) for kind, storages in of_kind.items() if storages}
    total = live_bytes(profile)
    tick = total.index(max(total)) if total else 0
    peak = _make_peak(profile, tick, {kind: live[tick] for kind, live in by_kind.items() if total})
    certain = [each for each in profile.storages if not each.is_bounded]
    if len(certain) < len(profile.storages):
        peak = peak.model_copy(update={"least_bytes": max(_live(profile.ticks, certain), default=0)})
    return Timeline(live_bytes=total, by_kind=by_kind, peak=peak, alive=alive_storages(profile, tick))


def live_bytes(profile: Profile) -> tuple[int, ...]:
    """Bytes alive by tick, all kinds together."""
    return _live(profile.ticks, profile.storages)


def peak_in_phase(profile: Profile, phase: Phase) -> Peak | None:
    """The moment of a phase with the most bytes alive; None if the step has no such phase.

    Of equal moments the first; only `requested_bytes` is known of its byte counts.
    """
    live = live_bytes(profile)
    ticks = [tick for span in profile.phases if span.phase is phase for tick in range(span.begin, span.end)]
    if not ticks:
        return None
    tick = max(ticks, key=live.__getitem__)
    by_kind: Counter[Kind] = Counter()
    for index in alive_storages(profile, tick):
        by_kind[profile.storages[index].kind] += profile.storages[index].nbytes
    return _make_peak(profile, tick, by_kind)


def peak_without_scratch_bytes(profile: Profile) -> int:
    """The most bytes alive, without the workspaces that live only during one op."""
    lasting = (each for each in profile.storages if each.kind is not Kind.WORKSPACE or each.op is None)
    return max(_live(profile.ticks, lasting), default=0)


def alive_storages(profile: Profile, tick: int) -> tuple[int, ...]:
    """Indices of the storages alive at a tick, largest first. Equal sizes are in the order of their indices."""
    alive = [index for index, storage in enumerate(profile.storages) if storage.birth <= tick < storage.death]
    alive.sort(key=lambda index: -profile.storages[index].nbytes)
    return tuple(alive)


def node_live_bytes(profile: Profile) -> tuple[PhaseBytes, ...]:
    """For each node, the largest number of bytes alive while its ops run, by phase.

    The bytes alive when an op starts count too, so that an op that allocates nothing (a view, an in-place result) is
    charged with what is there while it runs. What the optimizer runs counts as `forward`. A node without ops has 0
    in `forward`; one without backward ops has None in `backward`.
    """
    live = live_bytes(profile)
    runs = ((op.node, op.phase, max(live[max(op.begin - 1, 0) : op.end], default=0)) for op in profile.ops)
    return _largest_by_phase(len(profile.nodes), runs)


def node_scratch_bytes(profile: Profile) -> tuple[PhaseBytes, ...]:
    """For each node, the peak of what lives only inside it, by phase.

    Inside means: allocated by one of the node's ops and gone before the next op of another node, or of another
    phase, starts. Workspaces are storages like any other. Phases as in `node_live_bytes`.
    """
    runs = _runs(profile)
    ends = [run.end for run in runs for _ in range(run.first_op, run.last_op)]
    scratch = (each for each in profile.storages if each.op is not None and each.death < ends[each.op])
    inside = _live(profile.ticks, scratch)
    most = ((run.node, run.phase, max(inside[run.begin : run.end], default=0)) for run in runs)
    return _largest_by_phase(len(profile.nodes), most)


def check(profile: Profile) -> None:
    """Refuse a profile that contradicts itself.

    Verified: every index points at something, nodes read from earlier ones, modules lie no deeper than Python can call,
    live ranges do not end before they begin, ops are in order and do not overlap, phases follow one another and cover
    all ops and all ticks (but for tick 0, which may come before the first), every op runs in its phase, and
    `saved_bytes` is the sum over the nodes.

    Raises:
        UsageError: with the first contradiction found, in one line.
    """
    for complaint in _contradictions(profile):
        raise UsageError(f"the profile contradicts itself: {complaint}; write it anew with `fxmem analyze --json`")


def _live(ticks: int, storages: Iterable[Storage]) -> tuple[int, ...]:
    change = [0] * (ticks + 1)
    for storage in storages:
        change[storage.birth] += storage.nbytes
        change[storage.death] -= storage.nbytes
    return tuple(accumulate(change[:ticks]))


def _make_peak(profile: Profile, tick: int, by_kind: Mapping[Kind, int]) -> Peak:
    op = _find_op(profile.ops, tick)
    return Peak(
        requested_bytes=sum(by_kind.values()),
        phase=next((span.phase for span in profile.phases if span.begin <= tick < span.end), Phase.FORWARD),
        tick=tick,
        op=op,
        node=None if op is None else profile.nodes[profile.ops[op].node].name,
        by_kind={kind: by_kind[kind] for kind in Kind if by_kind.get(kind)},
    )


def _find_op(ops: Sequence[Op], tick: int) -> int | None:
    latest = bisect_right(ops, tick, key=lambda op: op.begin) - 1
    holder = latest
    # Ops that allocate nothing may begin at the same tick as, or inside the wake of, the one that contains it.
    while holder >= 0 and ops[holder].begin == ops[holder].end:
        holder -= 1
    if holder >= 0 and tick < ops[holder].end:
        return holder
    return latest if latest >= 0 else None


def _largest_by_phase(count: int, runs: Iterable[tuple[int, Phase, int]]) -> tuple[PhaseBytes, ...]:
    forward: list[int] = [0] * count
    backward: list[int | None] = [None] * count
    for node, phase, nbytes in runs:
        if phase is Phase.BACKWARD:
            backward[node] = max(nbytes, backward[node] or 0)
        else:
            forward[node] = max(nbytes, forward[node])
    pairs = list(zip(forward, backward, strict=True))
    made = {(f, b): PhaseBytes(forward=f, backward=b) for f, b in set(pairs)}  # most nodes are like another
    return tuple(made[pair] for pair in pairs)


@dataclass(frozen=True)
class _Run:
    """Consecutive ops of one node in one phase, and their ticks until the next op."""

    node: int
    phase: Phase
    first_op: int
    last_op: int
    begin: int
    end: int


def _runs(profile: Profile) -> list[_Run]:
    ops = profile.ops
    starts = [i for i, op in enumerate(ops) if i == 0 or (op.node, op.phase) != (ops[i - 1].node, ops[i - 1].phase)]
    return [
        _Run(ops[i].node, ops[i].phase, i, j, ops[i].begin, ops[j].begin if j < len(ops) else profile.ticks)
        for i, j in pairwise([*starts, len(ops)])
    ]


def _contradictions(profile: Profile) -> Iterator[str]:
    for name in {*profile.modules, *(node.module for node in profile.nodes), *(call.module for call in profile.calls)}:
        if name.count(".") >= _DEEPEST:
            levels = f"{name.count('.') + 1} levels deep, but Python calls no more than {_DEEPEST} within each other"
            yield f"module {name[:40]!r}... is {levels}"
    yield from _bad_indices(profile)
    for i, storage in enumerate(profile.storages):
        if storage.birth > storage.death:
            yield f"storages[{i}] is born at tick {storage.birth} and dies at tick {storage.death}, before that"
        elif storage.death > profile.ticks:
            yield f"storages[{i}] dies at tick {storage.death}, but there are {profile.ticks} ticks"
    yield from _bad_ops(profile)
    yield from _bad_phases(profile)
    saved = sum(node.saved_bytes for node in profile.nodes)
    if saved != profile.saved_bytes:
        yield f"saved_bytes is {profile.saved_bytes}, the sum over its nodes is {saved}"


def _bad_indices(profile: Profile) -> Iterator[str]:
    nodes, ops, storages = len(profile.nodes), len(profile.ops), len(profile.storages)

    def outside(where: str, index: int | None, count: int, what: str) -> Iterator[str]:
        if index is not None and not 0 <= index < count:
            yield f"{where} is {index}, but there are {count} {what}"

    for i, node in enumerate(profile.nodes):
        yield from outside(f"nodes[{i}].view_of", node.view_of, nodes, "nodes")
        for index in node.inputs:
            yield from outside(f"nodes[{i}].inputs", index, nodes, "nodes")
        if max((*node.inputs, -1 if node.view_of is None else node.view_of), default=-1) >= i:
            yield f"nodes[{i}] reads or is a view of a node that does not come before it"
        for index in node.saved:
            yield from outside(f"nodes[{i}].saved", index, storages, "storages")
        for output in node.outputs:
            yield from outside(f"nodes[{i}].outputs.storage", output.storage, storages, "storages")
    for what in ("calls", "recomputed"):
        for i, span in enumerate(getattr(profile, what)):
            if not 0 <= span.first_node <= span.last_node <= nodes:
                yield f"{what}[{i}] covers nodes [{span.first_node}, {span.last_node}), but there are {nodes} nodes"
    for i, op in enumerate(profile.ops):
        yield from outside(f"ops[{i}].node", op.node, nodes, "nodes")
    for i, storage in enumerate(profile.storages):
        yield from outside(f"storages[{i}].op", storage.op, ops, "ops")
        yield from outside(f"storages[{i}].node", storage.node, nodes, "nodes")


def _bad_ops(profile: Profile) -> Iterator[str]:
    reached = 0
    for i, op in enumerate(profile.ops):
        if op.begin > op.end:
            yield f"ops[{i}] begins at tick {op.begin} and ends at tick {op.end}, before that"
        elif op.begin < reached:
            yield f"ops[{i}] begins at tick {op.begin}, before ops[{i - 1}] has ended at tick {reached}"
        elif op.end > profile.ticks:
            yield f"ops[{i}] ends at tick {op.end}, but there are {profile.ticks} ticks"
        reached = op.end


def _bad_phases(profile: Profile) -> Iterator[str]:
    tick, op = 0, 0
    for index, span in enumerate(profile.phases):
        # Tick 0 may belong to no phase: it is what was there before the step.
        follows = span.begin == tick or (index == 0 and span.begin == 1)
        if not follows or span.first_op != op:
            begins = f"begins at tick {span.begin} and op {span.first_op}"
            yield f"phase {span.phase} {begins}, expected tick {tick} and op {op}"
        if span.end < span.begin or span.last_op < span.first_op:
            yield f"phase {span.phase} ends at tick {span.end} and op {span.last_op}, before it begins"
        for i in range(span.first_op, min(span.last_op, len(profile.ops))):
            inside = profile.ops[i]
            if inside.phase is not span.phase:
                yield f"ops[{i}] is of phase {inside.phase}, but stands in phase {span.phase}"
            elif inside.begin < span.begin or inside.end > span.end:
                covered = f"[{inside.begin}, {inside.end}), phase {span.phase} only [{span.begin}, {span.end})"
                yield f"ops[{i}] covers ticks {covered}"
        tick, op = span.end, span.last_op
    if (tick, op) != (profile.ticks, len(profile.ops)):
        yield f"its phases cover {tick} of {profile.ticks} ticks and {op} of {len(profile.ops)} ops"


# --- when the results of a forward are used for the last time, and the step in which they are freed then --------------


def find_idle(profile: Profile, *ticks: int) -> dict[int, int]:
    """Results of a forward that are alive at one of these ticks and that nothing needs any more then: by storage, the
    largest of each tick first, the tick at which the last call that reads it has run."""
    ends, storages = _last_use(profile), profile.storages
    found: dict[int, int] = {}
    for tick in ticks:
        idle = [each for each in ends if ends[each] < tick and storages[each].birth <= tick < storages[each].death]
        found.update((each, ends[each]) for each in sorted(idle, key=lambda each: -storages[each].nbytes))
    return found


def _last_use(profile: Profile) -> dict[int, int]:
    """For each storage made in forward that nothing keeps for backward or reads after it: the tick at which the last
    call that reads it has run."""
    ends: dict[int, int] = {}
    for op in profile.ops:
        if op.phase is Phase.FORWARD:
            ends[op.node] = max(op.end, ends.get(op.node, 0))
    saved = {storage for node in profile.nodes for storage in node.saved}
    # What one step's line makes may be read in the next step, as by a metric after the optimizer.
    read = {each.made_at for each in profile.storages if each.is_read and not each.birth and each.made_at}
    made = {
        index: ends[storage.node]
        for index, storage in enumerate(profile.storages)
        if storage.kind in (Kind.TEMPORARY, Kind.OUTPUT) and index not in saved and storage.op is not None
        if not storage.is_read and not (read and find_place(profile, storage.node) in read)
        if profile.ops[storage.op].phase is Phase.FORWARD
        and storage.node is not None
        and profile.nodes[storage.node].op not in ("loss", "optimizer")
    }
    for index, node in enumerate(profile.nodes):
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage in made:
                    made[output.storage] = max(made[output.storage], ends.get(index, 0))
    return made


def free_after_last_use(profile: Profile, names: frozenset[str]) -> Profile:
    """The profile with these nodes' results freed after their last use."""
    if not names:
        return profile
    ends = _last_use(profile)

    def free_early(index: int, storage: Storage) -> Storage:
        node = storage.node
        if index not in ends or node is None or profile.nodes[node].name not in names:
            return storage
        return storage.model_copy(update={"death": min(storage.death, max(ends[index], storage.birth + 1))})

    return profile.model_copy(
        update={"storages": tuple(free_early(index, storage) for index, storage in enumerate(profile.storages))}
    )


# --- which ticks stand for a step where it has more of them than pixels -----------------------------------------------


_COLUMNS = 256
"""Columns of the plot that a plan keeps of its step."""


@dataclass(frozen=True)
class Sample:
    """A tick, and the half-open range of ticks it is drawn over."""

    tick: int
    begin: float
    end: float


def samples(live: Sequence[int], columns: int) -> list[Sample]:
    """Every tick, or of too many the lowest and the highest of each column.

    So no extreme of the whole is lost, the first of the highest included, and there are never more than two samples a
    column. Linear in the ticks.
    """
    ticks = len(live)
    if ticks <= 2 * columns:
        return [Sample(tick, tick, tick + 1) for tick in range(ticks)]
    found = []
    for column in range(columns):
        begin, end = column * ticks // columns, (column + 1) * ticks // columns
        here = range(begin, end)
        first, second = sorted((min(here, key=live.__getitem__), max(here, key=live.__getitem__)))
        middle = (begin + end) / 2
        found += [Sample(first, begin, middle), Sample(second, middle, end)]
    return found


def shorten_step(profile: Profile, unplanned: Profile) -> PlannedStep:
    """What a plan says of the step that it makes of another.

    Args:
        profile: of the step with the plan.
        unplanned: the step as it was planned for.
    """
    live = live_bytes(profile)
    moments = [(sample.tick, live[sample.tick]) for sample in samples(live, _COLUMNS)]
    changes = [next(same) for _, same in groupby(moments, key=lambda moment: moment[1])]
    is_alike = [node.op for node in profile.nodes] == [node.op for node in unplanned.nodes]
    saved = tuple(node.saved_bytes for node in profile.nodes) if is_alike else ()
    return PlannedStep(ticks=profile.ticks, phases=profile.phases, moments=tuple(changes), saved_bytes=saved)
