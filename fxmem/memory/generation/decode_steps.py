"""The decode steps of a recorded generation, and the same generation with those that the recording leaves out.

A recording may jump: its loop goes on as if further steps like the last ones had run (`Jump`). Those are made by
arithmetic. What was recorded before a jump and right after it is compared with the steps that others are made like,
event by event: the same operators, the same storages at the same places, and each storage's size has grown by the same
number of bytes from step to step. Where sizes go by a period (a mask's rows are padded), a step is so many steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fxmem.errors import AnalysisError
from fxmem.memory import liveness
from fxmem.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from fxmem.memory.allocator.training_loop import PLACING_ORDER
from fxmem.records.parts import TokenBytes
from fxmem.records.profile import Op, Phase, PhaseSpan, Profile, Storage

# --- a generation's requests in a fresh process, replayed by the caching allocator token by token ---------------------


@dataclass(frozen=True)
class TokenReplay:
    """What the allocator makes of a generation, the first of its process."""

    tokens: tuple[TokenBytes, ...]
    """Of each token that was computed to its end."""
    alloc_retries: int
    is_whole: bool
    """Whether no request was refused."""


def requested_by_token(events: Events) -> list[int]:
    """The most bytes requested while each token is computed. What comes before the first forward is the first's."""
    births, deaths, nbytes = _columns(events)
    live = np.zeros(events.ticks + 1, np.int64)
    np.add.at(live, births, nbytes)
    np.subtract.at(live, deaths, nbytes)
    np.cumsum(live, out=live)
    borders = [0, *events.begins[1:], max(events.ticks, 1)]
    return [int(live[begin:end].max(initial=0)) for begin, end in pairwise(borders)]


def replay_tokens(
    profile: Profile, events: Events, settings: AllocatorSettings, capacity_bytes: int | None = None
) -> TokenReplay:
    """Replay a generation, its model having been moved to the card before.

    Args:
        profile: the recorded generation.
        events: its storages, or those of a longer one.
        settings: the allocator's.
        capacity_bytes: what the driver refuses to exceed; None for no limit.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=profile.target.memory_bytes)
    most = requested_by_token(events)
    storages, nbytes, sources = profile.storages, events.nbytes, events.sources
    streams = [each.stream for each in storages]
    addresses = array("q", bytes(8 * len(nbytes)))
    tokens: list[TokenBytes] = []
    malloc, free = allocator.malloc, allocator.free
    is_whole = True
    try:
        for index in _residents(profile, events):
            addresses[index] = malloc(nbytes[index], streams[sources[index]])
        for number, (requested, moments) in enumerate(zip(most, _order(profile, events), strict=True), 1):
            for index in moments:
                if index < 0:
                    free(addresses[~index])
                else:
                    addresses[index] = malloc(nbytes[index], streams[sources[index]])
            _, held, _, got, *_ = allocator.stats()
            peaks = {"requested_bytes": requested, "allocated_bytes": held.peak, "reserved_bytes": got.peak}
            tokens.append(TokenBytes(token=number, **peaks))
            allocator.reset_peak_stats()
    except OutOfMemory:
        is_whole = False
    return TokenReplay(tuple(tokens), allocator.stats().alloc_retries, is_whole)


def _residents(profile: Profile, events: Events) -> list[int]:
    """What is there when the generation begins, in the order of its allocation."""
    storages = profile.storages
    there = [
        i
        for i, (birth, death) in enumerate(zip(events.births, events.deaths, strict=True))
        if birth == 0 and (storages[i].op is None or death < events.ticks)
    ]
    return sorted(there, key=lambda i: (events.deaths[i] < events.ticks, PLACING_ORDER.get(storages[i].kind, 3), i))


def _order(profile: Profile, events: Events) -> Iterator[list[int]]:
    """The births and deaths of each token by tick, births first. A storage that dies is `~index`.

    A library's workspace takes what is free when its first operator runs.
    """
    births, deaths, _ = _columns(events)
    first_uses = births.copy()
    for index in np.flatnonzero((births == 0) & (deaths >= events.ticks)).tolist():
        if (op := profile.storages[index].op) is not None:
            first_uses[index] = profile.ops[op].end
    born, dying = np.flatnonzero(first_uses), np.flatnonzero(deaths < events.ticks)
    width = max(len(births), 1).bit_length()
    keys = np.empty(len(born) + len(dying), np.int64)
    early, late = keys[: len(born)], keys[len(born) :]
    np.left_shift(first_uses[born], 1 + width, out=early)
    np.left_shift(deaths[dying], 1 + width, out=late)
    early |= born
    late |= dying
    late |= 1 << width
    del first_uses, born, dying  # megabytes each
    keys.sort()
    cuts = np.searchsorted(keys, np.array([*events.begins[1:], events.ticks + 1], np.int64) << 1 + width).tolist()
    for begin, end in pairwise([0, *cuts]):
        part = keys[begin:end]
        indices = part & (1 << width) - 1
        yield np.where(part >> width & 1, ~indices, indices).tolist()


def _columns(events: Events) -> tuple[np.ndarray[Any, Any], ...]:
    """Births, deaths and bytes, not copied."""
    return tuple(np.frombuffer(each, np.int64) for each in (events.births, events.deaths, events.nbytes))


# --- prefill and decode, the phases of a generation -------------------------------------------------------------------


def name_phases(profile: Profile, begins: Sequence[int]) -> Profile:
    """The profile of a generation in two phases, prefill and decode; its nodes have their bytes.

    Args:
        profile: a generation.
        begins: the tick at which each token's forward begins.
    """
    border = begins[1] if len(begins) > 1 else profile.ticks
    op = next((i for i, each in enumerate(profile.ops) if each.begin >= border), len(profile.ops))
    first = profile.phases[0].begin if profile.phases else 0
    spans = [PhaseSpan(phase=Phase.PREFILL, begin=first, end=border, first_op=0, last_op=op)]
    if len(begins) > 1:
        last = {"end": profile.ticks, "last_op": len(profile.ops)}
        spans.append(PhaseSpan(phase=Phase.DECODE, begin=border, first_op=op, **last))
    ops = tuple(
        each.model_copy(update={"phase": Phase.PREFILL if index < op else Phase.DECODE})
        for index, each in enumerate(profile.ops)
    )
    named = profile.model_copy(update={"phases": tuple(spans), "ops": ops})
    live, scratch = liveness.node_live_bytes(named), liveness.node_scratch_bytes(named)
    nodes = tuple(
        node.model_copy(update={"live_bytes": live[i], "scratch_bytes": scratch[i]})
        for i, node in enumerate(named.nodes)
    )
    return named.model_copy(update={"nodes": nodes})


# --- the steps that a recording leaves out ----------------------------------------------------------------------------


PERIOD = 16
"""Steps after which sizes that do not grow evenly may: attention pads rows of a mask to a multiple of 16 bytes."""


class Jump(NamedTuple):
    """Where a recording leaves out steps."""

    first_op: int
    """The operator with which the last period before begins, which those left out are like."""
    end_op: int
    """The first operator after them."""
    period: int
    """Steps after which sizes have grown evenly."""
    copies: int
    """How many periods are left out."""
    grown: Mapping[int, int]
    """By storage that is there then and that later steps replace, what the jump has made it larger by."""


@dataclass(frozen=True)
class DecodeSteps:
    """Where the steps of a recorded generation begin."""

    profile: Profile
    begins: tuple[int, ...]
    """The tick at which each forward of the decoder begins, the prefill first."""


@dataclass(frozen=True)
class Events:
    """Storages of a generation as columns: it may have a million of them."""

    births: array[int]
    deaths: array[int]
    nbytes: array[int]
    sources: array[int]
    """The recorded storage that each is like."""
    copies: array[int]
    """How many periods later it comes than that one; 0 for a recorded storage."""
    ticks: int
    begins: list[int]
    """The tick at which each token's forward begins."""


def find_steps(profile: Profile, module: str, prefills: int = 1) -> DecodeSteps:
    """Find the calls of the decoder in a profile of its generation.

    Args:
        profile: a recorded generation.
        module: path of the decoder, whose every call is a step.
        prefills: how many calls the prompt takes, which are one step.

    Raises:
        AnalysisError: it was not called.
    """
    nodes = sorted(call.first_node for call in profile.calls if call.module == module)
    if not nodes:
        raise AnalysisError(f"expected a generation that calls {module or 'the model'}; it is not called once")
    del nodes[1:prefills]
    first_op_of: dict[int, int] = {}
    for index, op in enumerate(profile.ops):
        first_op_of.setdefault(op.node, index)
    known = sorted(first_op_of)
    ops = [first_op_of[known[bisect_left(known, node)]] for node in nodes]
    return DecodeSteps(profile, tuple(profile.ops[op].begin for op in ops))


def recorded_events(steps: DecodeSteps) -> Events:
    """The storages of a generation as they were recorded."""
    storages = steps.profile.storages
    return Events(
        births=array("q", (s.birth for s in storages)),
        deaths=array("q", (s.death for s in storages)),
        nbytes=array("q", (s.nbytes for s in storages)),
        sources=array("q", range(len(storages))),
        copies=array("q", bytes(8 * len(storages))),
        ticks=steps.profile.ticks,
        begins=list(steps.begins),
    )


@dataclass(frozen=True)
class Insertion:
    """The steps that a jump has left out, and how they are made."""

    jump: Jump
    slots: tuple[int, ...]
    """The storages of the period that they are like."""
    growth: tuple[int, ...]
    """Bytes of each, from period to period."""
    begin: int
    """The tick at which that period begins."""
    end: int

    @property
    def length(self) -> int:
        """Ticks of a period."""
        return self.end - self.begin

    @property
    def ticks(self) -> int:
        """Ticks of all that is put in."""
        return self.jump.copies * self.length


@dataclass(frozen=True)
class Extension:
    """How a recorded generation becomes whole."""

    steps: DecodeSteps
    insertions: tuple[Insertion, ...]
    """In the order of their steps."""

    def find_growth(self, events: Events) -> int | None:
        """By what the bytes alive of the whole generation grow from decode step to decode step; None where that
        changes, or there are too few."""
        period = max((each.jump.period for each in self.insertions), default=1)
        columns = events.births, events.deaths, events.nbytes
        births, deaths, nbytes = (np.frombuffer(each, np.int64) for each in columns)
        live = np.zeros(events.ticks + 2, np.int64)  # at each tick, before what happens then
        np.add.at(live, births + 1, nbytes)
        np.subtract.at(live, deaths + 1, nbytes)
        begins = np.cumsum(live)[events.begins[2:]]
        growth, rest = np.divmod(begins[period:] - begins[:-period], period)
        return int(growth[0]) if len({*growth.tolist()}) == 1 and not rest.any() else None

    def events(self) -> Events:
        """The storages of the whole generation."""
        steps, storages = self.steps, self.steps.profile.storages
        out = recorded_events(steps)
        for each in self.insertions:
            for index, storage in enumerate(storages):
                if storage.birth >= each.end:
                    out.births[index] += each.ticks
                if storage.death >= each.end and index not in each.jump.grown:
                    out.deaths[index] += each.ticks
            for index, nbytes in each.jump.grown.items():
                out.nbytes[index] -= nbytes
        begins: list[int] = []
        done = shift = 0
        for each in self.insertions:
            first, end = (bisect_left(steps.begins, tick) for tick in (each.begin, each.end))
            begins += [begin + shift for begin in steps.begins[done:end]]
            moves = range(each.length, each.ticks + 1, each.length)
            begins += [begin + shift + more for more in moves for begin in steps.begins[first:end]]
            _append_copies(out, each, storages, shift + np.array(moves)[:, None])
            done, shift = end, shift + each.ticks
        begins += [begin + shift for begin in steps.begins[done:]]
        return Events(out.births, out.deaths, out.nbytes, out.sources, out.copies, out.ticks + shift, begins)

    def profile(self, events: Events) -> Profile:
        """The whole generation as a profile; `events` are its storages."""
        recorded = self.steps.profile
        ops: list[Op] = []
        done = shift = 0
        added = [0]  # operators put in before each insertion
        for each in self.insertions:
            jump = each.jump
            ops += [_move_op(op, shift) for op in recorded.ops[done : jump.end_op]]
            period = recorded.ops[jump.first_op : jump.end_op]
            for copy in range(1, jump.copies + 1):
                ops += [_move_op(op, shift + copy * each.length) for op in period]
            done, shift = jump.end_op, shift + each.ticks
            added.append(added[-1] + jump.copies * len(period))
        ops += [_move_op(op, shift) for op in recorded.ops[done:]]
        ends = [each.jump.end_op for each in self.insertions]

        def move(storage: Storage, index: int) -> Storage:
            copy, op = events.copies[index], storage.op
            if op is not None:
                at = bisect_right(ends, op)
                op += added[at]
                if copy:
                    jump = self.insertions[at].jump
                    op += copy * (jump.end_op - jump.first_op)
            changes = {"birth": events.births[index], "death": events.deaths[index], "nbytes": events.nbytes[index]}
            is_same = op == storage.op and all(getattr(storage, name) == value for name, value in changes.items())
            return storage if is_same else storage.model_copy(update={**changes, "op": op})

        storages = tuple(move(recorded.storages[source], i) for i, source in enumerate(events.sources))
        return recorded.model_copy(update={"ops": tuple(ops), "storages": storages, "ticks": events.ticks})


def _append_copies(out: Events, insertion: Insertion, storages: Sequence[Storage], moved: np.ndarray[Any, Any]) -> None:
    """Add what further periods bring, one after another. `moved`: by how many ticks each comes later."""
    slots, grown = insertion.slots, insertion.jump.grown
    models = [storages[each] for each in slots]
    copies = np.arange(1, len(moved) + 1)[:, None]

    def add(column: array[int], values: np.ndarray[Any, Any]) -> None:
        column.frombytes(np.ascontiguousarray(values, np.int64).data.cast("B") if values.size else b"")

    add(out.births, moved + [each.birth for each in models])
    add(out.deaths, moved + [each.death for each in models])
    first = [storages[each].nbytes - grown.get(each, 0) for each in slots]
    add(out.nbytes, copies * [*insertion.growth] + first)
    add(out.sources, 0 * copies + [*slots])
    add(out.copies, copies + [0] * len(slots))


def extend(steps: DecodeSteps, jumps: Sequence[Jump]) -> Extension:
    """Prove that the steps around each jump differ in sizes alone, which grow evenly; return how to make the others.

    Args:
        steps: a recorded generation.
        jumps: where it leaves out steps, in order.

    Raises:
        AnalysisError: they differ otherwise; with the first difference.
    """
    grown: Counter[int] = Counter()
    for jump in jumps:
        grown.update(jump.grown)
    recorded = _Recorded(steps.profile, grown)
    joints = [0, *(jump.end_op for jump in jumps)]
    return Extension(steps, tuple(map(recorded.find_insertion, jumps, joints)))


class _Recorded:
    """A recorded generation, part by part.

    Args:
        profile: it.
        grown: what all its jumps have made each storage larger by.
    """

    def __init__(self, profile: Profile, grown: Mapping[int, int]) -> None:
        self._profile, self._grown = profile, grown

    def find_insertion(self, jump: Jump, joint: int) -> Insertion:
        """How the steps of a jump are made; the jump before it is at the operator `joint`."""
        first, end = jump.first_op, jump.end_op
        model = self._births(first, end)
        growth: tuple[int, ...] | None = None
        for begin, periods in ((2 * first - end, -1), (end, jump.copies + 1)):  # the period before, and the one after
            if begin < joint:
                continue  # not all of it was recorded
            self._check_operators(first, begin, end - first)
            found = self._compare(model, self._births(begin, begin + end - first), periods)
            if growth is not None and growth != found:
                at = next(i for i, (one, other) in enumerate(zip(growth, found, strict=True)) if one != other)
                raise AnalysisError(
                    f"expected sizes that grow evenly up to the last token; {self._name(model[at])} grows by "
                    f"{growth[at]:,} bytes, then by {found[at]:,}"
                )
            growth = found
        return Insertion(jump, tuple(model), growth or (), self._tick(first), self._tick(end))

    def _tick(self, op: int) -> int:
        ops = self._profile.ops
        return ops[op].begin if op < len(ops) else self._profile.ticks

    def _births(self, first: int, end: int) -> list[int]:
        """The storages that come with these operators, in order."""
        begin, until = self._tick(first), self._tick(end)
        storages = self._profile.storages
        found = [i for i, each in enumerate(storages) if each.birth and begin <= each.birth < until]
        return sorted(found, key=lambda i: storages[i].birth)

    def _compare(self, model: Sequence[int], other: Sequence[int], periods: int) -> tuple[int, ...]:
        """What each storage grows by from period to period; the others are those of so many periods later."""
        if len(model) != len(other):
            raise AnalysisError("expected every decode step to allocate as often as others")
        found: list[int] = []
        for pair in zip(model, other, strict=True):
            one, two = (self._profile.storages[each].nbytes - self._grown.get(each, 0) for each in pair)
            by, rest = divmod(two - one, periods)
            if rest:
                raise AnalysisError(
                    f"expected sizes that grow evenly from token to token: {self._name(pair[0])} has {one:,} bytes, "
                    f"and {two:,} after {periods:,} more"
                )
            found.append(by)
        return tuple(found)

    def _check_operators(self, first: int, other: int, count: int) -> None:
        ops = self._profile.ops
        for at in range(count):
            one, two = (ops[i + at].name if i + at < len(ops) else "none" for i in (first, other))
            if one != two:
                raise AnalysisError(
                    f"expected every decode step to run the same operators; operator {at} is {one} in one, and {two} "
                    "in another"
                )

    def _name(self, index: int) -> str:
        storage = self._profile.storages[index]
        op = None if storage.op is None else self._profile.ops[storage.op]
        return f"a {storage.kind.value} of {op.name if op else 'the program'}"


def _move_op(op: Op, ticks: int) -> Op:
    return op.model_copy(update={"begin": op.begin + ticks, "end": op.end + ticks}) if ticks else op
