"""The decode steps of a recorded generation, and the same generation with more of them.

A decode step begins where the decoder's forward begins. Three steps one after another are compared, event by event: the
same operators, the same storages come and go at the same places, and each storage's size grows by the same number of
bytes from step to step. Then further steps are put in after the second of the three, by arithmetic, and those after
them are moved on. Where steps change in between (a window begins to slide), a recording of the change is joined on:
`joined_steps`. Where sizes go by a period (a mask's rows are padded), three periods are compared and put in.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fxmem.errors import AnalysisError
from fxmem.records.profile import Op, Profile, Storage

RECORDED = 7
"""Tokens of a recorded generation that is to be extended: a prefill and six decode steps."""
TAIL = 3
"""Steps that are recorded after the one that further ones are made like: one to compare it with, and two."""
PERIOD = 16
"""Steps after which sizes that do not grow evenly may: attention pads rows of a mask to a multiple of 16 bytes."""


@dataclass(frozen=True)
class DecodeSteps:
    """Where the steps of a recorded generation begin."""

    profile: Profile
    begins: tuple[int, ...]
    """The tick at which each forward of the decoder begins, the prefill first."""
    first_ops: tuple[int, ...]
    """The operator that each begins with."""

    def births(self, step: int, count: int = 1) -> list[int]:
        """The storages that a step brings, or so many from it on, in order."""
        end = self.begins[step + count] if step + count < len(self.begins) else self.profile.ticks
        storages = self.profile.storages
        found = [i for i, s in enumerate(storages) if s.birth and self.begins[step] <= s.birth < end]
        return sorted(found, key=lambda i: storages[i].birth)

    def op_names(self, step: int, count: int = 1) -> list[str]:
        """The names of the operators of a step, or of so many from it on."""
        end = self.first_ops[step + count] if step + count < len(self.begins) else None
        return [op.name for op in self.profile.ops[self.first_ops[step] : end]]


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
    return DecodeSteps(profile, tuple(profile.ops[op].begin for op in ops), tuple(ops))


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
class Slot:
    """A storage that each decode step brings anew."""

    storage: int
    """That of the step that others are made like."""
    growth: int
    """Bytes from period to period."""
    stays: bool
    """Whether it is alive until the generation ends, rather than for as long as those of other steps."""


@dataclass(frozen=True)
class Insertion:
    """Where further steps are put in, and how they are made."""

    model: int
    """The step after which they come, and which they are made like; the first of them where the period is longer."""
    count: int | None
    """How many; None for as many as the generation is to have."""
    slots: tuple[Slot, ...]
    lagging: frozenset[int]
    """Storages of recorded steps whose death moves with their birth."""
    later_growth: dict[int, int]
    """Growth of the storages that come after that step and were recorded at another length, by index."""
    period: int = 1
    """Steps after which sizes have grown evenly: so many come at a time."""

    def copies(self, steps: int) -> int:
        """How many periods so many further steps are."""
        return steps // self.period


@dataclass(frozen=True)
class Extension:
    """How a recorded generation becomes a longer one."""

    steps: DecodeSteps
    insertions: tuple[Insertion, ...]
    """In the order of their steps."""

    @property
    def growth_bytes(self) -> int | None:
        """By what the bytes alive grow from step to step; None where that changes."""
        if len(self.insertions) > 1:
            return None
        model, period = self.insertions[0].model, self.insertions[0].period
        storages, ticks = self.steps.profile.storages, self.steps.begins[model : model + period + 1 : period]
        before, after = (sum(s.nbytes for s in storages if s.birth < tick <= s.death) for tick in ticks)
        growth, rest = divmod(after - before, period)
        return None if rest else growth

    def counts(self, tokens: int) -> list[int]:
        """How many steps each insertion puts in for so many tokens."""
        rest = tokens - len(self.steps.begins) - sum(each.count or 0 for each in self.insertions)
        return [rest if each.count is None else each.count for each in self.insertions]

    def token(self, insertion: Insertion) -> int:
        """Which token the step is that an insertion's are made like, from 0."""
        before = self.insertions[: self.insertions.index(insertion)]
        return insertion.model + sum(each.count or 0 for each in before)

    def _length(self, insertion: Insertion) -> int:
        begins, model = self.steps.begins, insertion.model
        return begins[model + insertion.period] - begins[model]

    def events(self, tokens: int, *, jump: bool = False) -> Events:
        """The storages of a generation of so many tokens.

        Args:
            tokens: how many are new.
            jump: leave out the steps in between. Those after them have the sizes that they have in the end.
        """
        steps, storages = self.steps, self.steps.profile.storages
        out = recorded_events(steps)
        counts = [each.copies(more) for each, more in zip(self.insertions, self.counts(tokens), strict=True)]
        copied = [0] * len(counts) if jump else counts
        begins, shift = [*out.begins], 0
        for insertion, more, copies in zip(self.insertions, counts, copied, strict=True):
            length, end = self._length(insertion), steps.begins[insertion.model + insertion.period]
            for index, storage in enumerate(storages):
                if storage.birth >= end:
                    out.births[index] += copies * length
                    out.nbytes[index] += more * insertion.later_growth.get(index, 0)
                if storage.death >= end and index not in insertion.lagging:
                    out.deaths[index] += copies * length
        for insertion, copies in zip(self.insertions, copied, strict=True):
            length, model, period = self._length(insertion), insertion.model, insertion.period
            at = len(begins) - len(steps.begins) + model
            shift, end = begins[at] - steps.begins[model], at + period
            further = [each + copy * length for copy in range(1, copies + 1) for each in begins[at:end]]
            begins[end:] = [*further, *(begin + copies * length for begin in begins[end:])]
            _append_copies(out, insertion, storages, shift + length * np.arange(1, copies + 1)[:, None])
        ticks = out.ticks + begins[-1] - steps.begins[-1]
        return Events(out.births, out.deaths, out.nbytes, out.sources, out.copies, ticks, begins)

    def profile(self, events: Events) -> Profile:
        """The longer generation as a profile; `events` are its storages."""
        recorded, steps = self.steps.profile, self.steps
        is_whole = len(events.begins) > len(steps.begins)
        counts = self.counts(len(events.begins)) if is_whole else [0] * len(self.insertions)
        copied = [each.copies(more) for each, more in zip(self.insertions, counts, strict=True)]
        spans = [(steps.first_ops[each.model], steps.first_ops[each.model + each.period]) for each in self.insertions]
        ops: list[Op] = []
        done = shift = 0
        added = [0]  # operators put in before each insertion
        for insertion, (first, end), copies in zip(self.insertions, spans, copied, strict=True):
            ops += [_move_op(op, shift) for op in recorded.ops[done:end]]
            length = self._length(insertion)
            for copy in range(1, copies + 1):
                ops += [_move_op(op, shift + copy * length) for op in recorded.ops[first:end]]
            done, shift = end, shift + copies * length
            added.append(added[-1] + copies * (end - first))
        ops += [_move_op(op, shift) for op in recorded.ops[done:]]
        ends = [end for _, end in spans]

        def move(storage: Storage, index: int) -> Storage:
            copy, op = events.copies[index], storage.op
            if op is not None:
                at = bisect_right(ends, op)
                op += added[at] + (copy * (spans[at][1] - spans[at][0]) if copy else 0)
            changes = {"birth": events.births[index], "death": events.deaths[index], "nbytes": events.nbytes[index]}
            is_same = op == storage.op and all(getattr(storage, name) == value for name, value in changes.items())
            return storage if is_same else storage.model_copy(update={**changes, "op": op})

        storages = tuple(move(recorded.storages[source], i) for i, source in enumerate(events.sources))
        return recorded.model_copy(update={"ops": tuple(ops), "storages": storages, "ticks": events.ticks})

    def check_step(self, other: DecodeSteps, step: int, more: int) -> None:
        """Hold the arithmetic of the last insertion against a recorded step.

        Args:
            other: recorded after a longer prompt.
            step: which of its steps.
            more: how many tokens later it is than the step that others are made like, whole periods.

        Raises:
            AnalysisError: the step differs from what arithmetic makes of it.
        """
        insertion = self.insertions[-1]
        period = insertion.period
        storages, later = self.steps.profile.storages, other.profile.storages
        born = other.births(step, period) if len(other.begins) >= step + period else []
        names = self.steps.op_names(insertion.model, period)
        if names != other.op_names(step, period) or len(born) != len(insertion.slots):
            raise AnalysisError("expected the last decode steps to run the operators of the first")
        for slot, index in zip(insertion.slots, born, strict=True):
            expected = storages[slot.storage].nbytes + insertion.copies(more) * slot.growth
            if later[index].nbytes != expected:
                raise AnalysisError(
                    f"expected sizes that grow evenly up to the last token; {_name(self.steps, slot.storage)} has "
                    f"{later[index].nbytes:,} bytes there instead of {expected:,}"
                )


def _append_copies(out: Events, insertion: Insertion, storages: Sequence[Storage], moved: np.ndarray[Any, Any]) -> None:
    """Add what further periods bring, one after another. `moved`: by how many ticks each comes later."""
    slots = insertion.slots
    models = [storages[each.storage] for each in slots]
    copies = np.arange(1, len(moved) + 1)[:, None]
    last = np.array([out.deaths[each.storage] for each in slots], np.int64)

    def add(column: array[int], values: np.ndarray[Any, Any]) -> None:
        column.frombytes(np.ascontiguousarray(values, np.int64).data.cast("B") if values.size else b"")

    add(out.births, moved + [each.birth for each in models])
    add(out.deaths, np.where([each.stays for each in slots], last, moved + [each.death for each in models]))
    add(out.nbytes, copies * [each.growth for each in slots] + [each.nbytes for each in models])
    add(out.sources, 0 * copies + [each.storage for each in slots])
    add(out.copies, copies + [0] * len(slots))


def extend(steps: DecodeSteps, before: tuple[Insertion, ...] = (), period: int = 1) -> Extension:
    """Prove that the decode steps differ in sizes alone, which grow evenly; return how to make further ones.

    Args:
        steps: a recorded generation. Its last steps but two are compared.
        before: what is put in before these.
        period: steps after which sizes have grown evenly; further ones come so many at a time.

    Raises:
        AnalysisError: they differ otherwise; with the first difference.
    """
    needed = recorded_tokens(period)
    model = len(steps.begins) - (TAIL - 1) - 2 * period
    if len(steps.begins) < needed:
        raise AnalysisError(f"expected {needed} recorded tokens to compare, got {len(steps.begins)}")
    _check_operators(steps, model, period)
    storages = steps.profile.storages
    around = (model - period, model, model + period)
    born = [steps.births(step, period) for step in around]
    lengths = {steps.begins[step + period] - steps.begins[step] for step in around}
    if len({len(each) for each in born}) > 1 or len(lengths) > 1:
        raise AnalysisError("expected every decode step to allocate as often as others, and to free as often")
    slots: list[Slot] = []
    lagging: set[int] = set()
    for earlier, same, later in zip(*born, strict=True):
        compared = [storages[i] for i in (earlier, same, later)]
        sizes = [each.nbytes for each in compared]
        growth = sizes[1] - sizes[0]
        if sizes[2] - sizes[1] != growth:
            shown = ", ".join(f"{size:,}" for size in sizes)
            raise AnalysisError(f"expected sizes that grow evenly from token to token: {_name(steps, same)}, {shown}")
        stays = min(each.death for each in compared) >= steps.begins[-1]
        if not stays:
            if len({each.death - each.birth for each in compared}) > 1:
                raise AnalysisError(f"expected the same life in every decode step: {_name(steps, same)} has none")
            lagging |= {earlier, same}
        slots.append(Slot(same, growth, stays))
    _check_early(steps, model, period)
    growths = _find_later_growth(steps, model, slots, period)
    return Extension(steps, (*before, Insertion(model, None, tuple(slots), frozenset(lagging), growths, period)))


def recorded_tokens(period: int) -> int:
    """Tokens to record, at the least, where further ones come so many at a time."""
    return RECORDED + 3 * (period - 1)


def _find_later_growth(steps: DecodeSteps, model: int, slots: Sequence[Slot], period: int) -> dict[int, int]:
    """Growth of the storages of later steps. The last step ends otherwise: what it alone brings does not grow."""
    later: dict[int, int] = {}
    for step in range(model + period, len(steps.begins), period):
        same = steps.first_ops[step] + _count_equal(steps.op_names(model, period), steps.op_names(step, period))
        for index, slot in zip(steps.births(step, period), slots, strict=False):
            op = steps.profile.storages[index].op
            if op is None or op < same:
                later[index] = slot.growth
    return later


def _check_operators(steps: DecodeSteps, model: int, period: int) -> None:
    expected = steps.op_names(model, period)
    for step in (model - period, model + period):
        names = steps.op_names(step, period)
        if names != expected:
            at = _count_equal(expected, names)
            one, other = (each[at] if at < len(each) else "none" for each in (expected, names))
            raise AnalysisError(
                f"expected every decode step to run the same operators; operator {at} is {one} in step {model}, and "
                f"{other} in step {step}"
            )


def _check_early(steps: DecodeSteps, model: int, period: int) -> None:
    """Refuse what is older than the compared steps, and freed in one that moves."""
    begin, end, last = steps.begins[model - period], steps.begins[model + period], steps.begins[-1]
    for index, storage in enumerate(steps.profile.storages):
        if storage.birth < begin and end <= storage.death < last:
            raise AnalysisError(f"expected decode steps that free what they allocate; {_name(steps, index)} is older")


def _count_equal(one: list[str], other: list[str]) -> int:
    """How many items two lists begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _name(steps: DecodeSteps, index: int) -> str:
    storage = steps.profile.storages[index]
    op: Op | None = steps.profile.ops[storage.op] if storage.op is not None else None
    return f"a {storage.kind.value} of {op.name if op else 'the program'}"


def _move_op(op: Op, ticks: int) -> Op:
    return op.model_copy(update={"begin": op.begin + ticks, "end": op.end + ticks}) if ticks else op
