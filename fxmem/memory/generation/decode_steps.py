"""The decode steps of a recorded generation, and the same generation with more of them.

A decode step begins where the decoder's forward begins. Three steps one after another are compared, event by event: the
same operators, the same storages come and go at the same places, and each storage's size grows by the same number of
bytes from step to step. Then further steps are put in after the second of the three, by arithmetic, and those after
them are moved on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from fxmem.errors import AnalysisError
from fxmem.memory import liveness
from fxmem.records.profile import Op, Phase, PhaseSpan, Profile, Storage

RECORDED = 7
"""Tokens of a recorded generation that is to be extended: a prefill and six decode steps."""
_MODEL = 3
"""The decode step that further ones are made like; it is compared with the one before it and the one after it."""


@dataclass(frozen=True)
class DecodeSteps:
    """Where the steps of a recorded generation begin."""

    profile: Profile
    begins: tuple[int, ...]
    """The tick at which each forward of the decoder begins, the prefill first."""
    first_ops: tuple[int, ...]
    """The operator that each begins with."""

    def births(self, step: int) -> list[int]:
        """The storages that a step brings, in order."""
        end = self.begins[step + 1] if step + 1 < len(self.begins) else self.profile.ticks
        storages = self.profile.storages
        found = [i for i, s in enumerate(storages) if s.birth and self.begins[step] <= s.birth < end]
        return sorted(found, key=lambda i: storages[i].birth)

    def op_names(self, step: int) -> list[str]:
        """The names of the operators of a step."""
        end = self.first_ops[step + 1] if step + 1 < len(self.begins) else None
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
    """How many steps later it comes than that one; 0 for a recorded storage."""
    ticks: int
    begins: list[int]
    """The tick at which each token's forward begins."""


def find_steps(profile: Profile, module: str) -> DecodeSteps:
    """Find the calls of the decoder in a profile of its generation.

    Args:
        profile: a recorded generation.
        module: path of the decoder, whose every call is a step.

    Raises:
        AnalysisError: it was not called.
    """
    nodes = sorted(call.first_node for call in profile.calls if call.module == module)
    if not nodes:
        raise AnalysisError(f"expected a generation that calls {module or 'the model'}; it is not called once")
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
    """Bytes from step to step."""
    stays: bool
    """Whether it is alive until the generation ends, rather than for as long as those of other steps."""


@dataclass(frozen=True)
class Extension:
    """How a recorded generation becomes a longer one."""

    steps: DecodeSteps
    slots: tuple[Slot, ...]
    lagging: frozenset[int]
    """Storages of recorded steps whose death moves with their birth."""
    later_growth: dict[int, int]
    """Growth of the storages that come after the step that others are made like, by index."""

    @property
    def _end(self) -> int:
        return self.steps.begins[_MODEL + 1]

    @property
    def _length(self) -> int:
        return self._end - self.steps.begins[_MODEL]

    @property
    def growth_bytes(self) -> int:
        """By what the bytes alive grow from step to step."""
        storages, ticks = self.steps.profile.storages, self.steps.begins[_MODEL : _MODEL + 2]
        before, after = (sum(s.nbytes for s in storages if s.birth < tick <= s.death) for tick in ticks)
        return after - before

    def events(self, tokens: int, *, jump: bool = False) -> Events:
        """The storages of a generation of so many tokens.

        Args:
            tokens: how many are new.
            jump: leave out the steps in between. Those after them have the sizes that they have in the end.
        """
        more = tokens - len(self.steps.begins)
        copies = 0 if jump else more
        shift, end, storages = copies * self._length, self._end, self.steps.profile.storages
        begins = self.steps.begins
        further = [begins[_MODEL] + copy * self._length for copy in range(1, copies + 1)]
        out = recorded_events(self.steps)
        out.begins[:] = [*begins[: _MODEL + 1], *further, *(begin + shift for begin in begins[_MODEL + 1 :])]
        for index, storage in enumerate(storages):
            if storage.birth >= end:
                out.births[index] += shift
                out.nbytes[index] += more * self.later_growth.get(index, 0)
            if storage.death >= end and index not in self.lagging:
                out.deaths[index] += shift
        for copy in range(1, copies + 1):
            moved = copy * self._length
            for slot in self.slots:
                storage = storages[slot.storage]
                out.births.append(storage.birth + moved)
                out.deaths.append(storage.death + (shift if slot.stays else moved))
                out.nbytes.append(storage.nbytes + copy * slot.growth)
                out.sources.append(slot.storage)
                out.copies.append(copy)
        return Events(out.births, out.deaths, out.nbytes, out.sources, out.copies, out.ticks + shift, out.begins)

    def profile(self, events: Events) -> Profile:
        """The longer generation as a profile; `events` are its storages."""
        recorded, steps = self.steps.profile, self.steps
        first, end = steps.first_ops[_MODEL], steps.first_ops[_MODEL + 1]
        copies, count = max(events.copies, default=0), end - first
        shift = copies * self._length
        ops = [*recorded.ops[:end]]
        for copy in range(1, copies + 1):
            ops += [_move_op(op, copy * self._length) for op in recorded.ops[first:end]]
        ops += [_move_op(op, shift) for op in recorded.ops[end:]]

        def move(storage: Storage, index: int) -> Storage:
            copy, op = events.copies[index], storage.op
            if op is not None:
                op += copy * count if copy else copies * count * (op >= end)
            changes = {"birth": events.births[index], "death": events.deaths[index]}
            return storage.model_copy(update={**changes, "nbytes": events.nbytes[index], "op": op})

        storages = tuple(move(recorded.storages[source], i) for i, source in enumerate(events.sources))
        return recorded.model_copy(update={"ops": tuple(ops), "storages": storages, "ticks": events.ticks})

    def check_far(self, far: DecodeSteps, more: int) -> None:
        """Hold the arithmetic against a recording of the last tokens.

        Args:
            far: recorded after a prompt that is longer by `more` tokens.
            more: how many steps are made by arithmetic.

        Raises:
            AnalysisError: a step differs from what arithmetic makes of it.
        """
        storages, later = self.steps.profile.storages, far.profile.storages
        born = far.births(_MODEL) if len(far.begins) > _MODEL else []
        if self.steps.op_names(_MODEL) != far.op_names(_MODEL) or len(born) != len(self.slots):
            raise AnalysisError("expected the last decode steps to run the operators of the first")
        for slot, index in zip(self.slots, born, strict=True):
            expected = storages[slot.storage].nbytes + more * slot.growth
            if later[index].nbytes != expected:
                raise AnalysisError(
                    f"expected sizes that grow evenly up to the last token; {_name(self.steps, slot.storage)} has "
                    f"{later[index].nbytes:,} bytes there instead of {expected:,}"
                )


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
        spans.append(
            PhaseSpan(phase=Phase.DECODE, begin=border, end=profile.ticks, first_op=op, last_op=len(profile.ops))
        )
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


def extend(steps: DecodeSteps) -> Extension:
    """Prove that the decode steps differ in sizes alone, which grow evenly; return how to make further ones.

    Raises:
        AnalysisError: they differ otherwise; with the first difference.
    """
    if len(steps.begins) < RECORDED:
        raise AnalysisError(f"expected {RECORDED} recorded tokens to compare, got {len(steps.begins)}")
    _check_operators(steps)
    storages = steps.profile.storages
    born = [steps.births(step) for step in (_MODEL - 1, _MODEL, _MODEL + 1)]
    if len({len(each) for each in born}) > 1 or len({_length(steps, step) for step in (2, 3, 4)}) > 1:
        raise AnalysisError("expected every decode step to allocate as often as others, and to free as often")
    slots: list[Slot] = []
    lagging: set[int] = set()
    for before, model, after in zip(*born, strict=True):
        growth = storages[model].nbytes - storages[before].nbytes
        if storages[after].nbytes - storages[model].nbytes != growth:
            sizes = ", ".join(f"{storages[i].nbytes:,}" for i in (before, model, after))
            raise AnalysisError(f"expected sizes that grow evenly from token to token: {_name(steps, model)}, {sizes}")
        stays = min(storages[i].death for i in (before, model, after)) >= steps.begins[-1]
        if not stays:
            _check_lives(steps, (before, model, after))
            lagging |= {before, model}
        slots.append(Slot(model, growth, stays))
    _check_early(steps)
    return Extension(steps, tuple(slots), frozenset(lagging), _find_later_growth(steps, slots))


def _find_later_growth(steps: DecodeSteps, slots: Sequence[Slot]) -> dict[int, int]:
    """Growth of the storages of later steps. The last step ends otherwise: what it alone brings does not grow."""
    later: dict[int, int] = {}
    for step in range(_MODEL + 1, len(steps.begins)):
        same = steps.first_ops[step] + _count_equal(steps.op_names(_MODEL), steps.op_names(step))
        for index, slot in zip(steps.births(step), slots, strict=False):
            op = steps.profile.storages[index].op
            if op is None or op < same:
                later[index] = slot.growth
    return later


def _length(steps: DecodeSteps, step: int) -> int:
    return steps.begins[step + 1] - steps.begins[step]


def _check_operators(steps: DecodeSteps) -> None:
    model = steps.op_names(_MODEL)
    for step in (_MODEL - 1, _MODEL + 1):
        names = steps.op_names(step)
        if names != model:
            at = _count_equal(model, names)
            one, other = (each[at] if at < len(each) else "none" for each in (model, names))
            raise AnalysisError(
                f"expected every decode step to run the same operators; operator {at} is {one} in step {_MODEL}, and "
                f"{other} in step {step}"
            )


def _check_lives(steps: DecodeSteps, indices: tuple[int, int, int]) -> None:
    """Refuse storages that live for another time in each step."""
    if len({s.death - s.birth for s in (steps.profile.storages[index] for index in indices)}) > 1:
        raise AnalysisError(f"expected the same life in every decode step: {_name(steps, indices[1])} has none")


def _check_early(steps: DecodeSteps) -> None:
    """Refuse what is older than the compared steps, and freed in one that moves."""
    begin, end, last = steps.begins[_MODEL - 1], steps.begins[_MODEL + 1], steps.begins[-1]
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
    return op.model_copy(update={"begin": op.begin + ticks, "end": op.end + ticks})
