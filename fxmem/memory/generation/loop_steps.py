"""The steps of a decoding loop while it runs: what each allocates and frees, and how further ones are made of them.

A storage is known by its step and its place among what that step allocates, so that a free says whose it is: of this
step, of the one before. Steps are even if they do the same and each size grows by the same number of bytes from one to
the next. Sizes may be padded to a multiple of something, which a few steps do not show: so many are compared that every
multiple of `PERIOD` is crossed, or sizes go by such a period themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from fxmem.hardware.hidden_memory import Signature, expand
from fxmem.memory.allocator_acts import Act as AllocatorAct
from fxmem.memory.allocator_acts import Free, RunKernel
from fxmem.memory.generation.decode_steps import PERIOD

COMPARED: Final = {1: PERIOD + 1, PERIOD // 2: 3 * PERIOD // 2, PERIOD: 3 * PERIOD}
"""By period, the steps that are compared."""
LEAST_COMPARED: Final = {1: 3}
"""The same, where no size is padded: of three steps each says how the next differs."""


_OLDER: Final = -2
"""The age of what was there before the loop."""


class LoopEvent(NamedTuple):
    """An allocation, or the free of what was allocated under the same key."""

    key: Hashable
    nbytes: int | None
    """None: it is freed."""
    stream: int = 0


class Act(NamedTuple):
    """One event, by where its storage is from."""

    age: int
    """How many steps ago it was allocated; -1: now."""
    slot: int
    """Its place among what that step allocates."""
    stream: int


def find_events(
    acts: Sequence[AllocatorAct], asked: Mapping[Signature, int | None] = MappingProxyType({})
) -> list[LoopEvent] | None:
    """The events of a step's acts, by the numbers of storages; None where something else is among them, or where a
    kernel wants a workspace whose size was not asked."""
    events: list[LoopEvent] = []
    for number, act in enumerate(acts):
        if isinstance(act, Free):
            events.append(LoopEvent(act.storage, None))
            continue
        if not isinstance(act, RunKernel):
            return None
        hidden = act.hidden
        if hidden is not None and hidden.signatures:
            if not asked.keys() >= {*hidden.signatures}:
                return None
            hidden = hidden.fill_workspaces(asked)
        for place, nbytes in expand(len(act.storages), hidden):
            own = place < 0
            key = (number, place) if own else act.storages[place]
            events.append(LoopEvent(key, nbytes if own else act.nbytes[place], act.stream))
    return events


@dataclass(frozen=True)
class LoopStep:
    """One step of the loop."""

    number: int
    """Which it is, those that were made by arithmetic counted."""
    acts: tuple[Act, ...]
    nbytes: np.ndarray[Any, Any]
    """Of each slot."""
    ops: tuple[str, ...]
    flops: int | None
    """Of all operators; None where one is not known."""
    moved_bytes: int

    def does_the_same(self, other: LoopStep) -> bool:
        """Whether another step runs the same operators and has the same events."""
        return self.acts == other.acts and self.ops == other.ops


@dataclass
class LoopSteps:
    """The steps that a loop has run, in order."""

    steps: list[LoopStep] = field(default_factory=list)
    homes: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    """By key of what a step has allocated and nobody has freed, the step's number and the slot."""

    def add(
        self, number: int, events: Sequence[LoopEvent], ops: tuple[str, ...], flops: int | None, moved_bytes: int
    ) -> LoopStep:
        """Note a step."""
        acts: list[Act] = []
        sizes: list[int] = []
        for key, nbytes, stream in events:
            if nbytes is None:
                born, slot = self.homes.pop(key, (None, 0))
                acts.append(Act(_OLDER if born is None else number - born, slot, stream))
                continue
            self.homes[key] = number, len(sizes)
            acts.append(Act(-1, len(sizes), stream))
            sizes.append(nbytes)
        step = LoopStep(number, tuple(acts), np.array(sizes, np.int64), ops, flops, moved_bytes)
        self.steps.append(step)
        del self.steps[: -max(COMPARED.values())]
        return step

    def move_on(self, even: EvenSteps, steps: int) -> None:
        """So many steps were made by arithmetic: what the last one left is what these have left."""
        homes = self.homes.items()
        self.homes = {key: (home[0] + steps, home[1]) if even.moves(home) else home for key, home in homes}

    def find_even(self, compared: Mapping[int, int] = COMPARED) -> EvenSteps | None:
        """How further steps are made; None where those that have run do not say it yet.

        Args:
            compared: by period, how many steps are compared.
        """
        found = (self._compare(period, self.steps[-count:], count) for period, count in compared.items())
        return next((even for even in found if even is not None), None)

    def _compare(self, period: int, compared: Sequence[LoopStep], count: int) -> EvenSteps | None:
        if len(compared) < count:
            return None
        growth: dict[int, np.ndarray[Any, Any]] = {}
        flops: dict[int, int | None] = {}
        last: dict[int, LoopStep] = {}
        for step in compared:
            place = step.number % period
            before = last.get(place)
            last[place] = step
            if before is None:
                continue
            periods = (step.number - before.number) // period
            if not step.does_the_same(before):
                return None
            grown, rest = np.divmod(step.nbytes - before.nbytes, periods)
            if rest.any() or (place in growth and (growth[place] != grown).any()):
                return None
            growth[place] = grown
            is_known = step.flops is not None and before.flops is not None
            flops[place] = ((step.flops or 0) - (before.flops or 0)) // periods if is_known else None
        models = tuple(compared[-period:])
        order = [model.number % period for model in models]
        closed = all(act.age != _OLDER for model in models for act in model.acts)
        if not closed or any((growth[place] < 0).any() for place in order):
            return None
        return EvenSteps(
            models, tuple(growth[place] for place in order), tuple(flops[place] for place in order), dict(self.homes)
        )


@dataclass(frozen=True)
class EvenSteps:
    """How further steps are made: a period of them at a time, like the last that have run."""

    models: tuple[LoopStep, ...]
    growth: tuple[np.ndarray[Any, Any], ...]
    """Of each of these, by slot: bytes from period to period."""
    flops_growth: tuple[int | None, ...]
    homes: dict[Hashable, tuple[int, int]]
    """As of `LoopSteps`, after the last of the models."""

    @property
    def period(self) -> int:
        """Steps after which sizes have grown evenly."""
        return len(self.models)

    @functools.cached_property
    def _oldest(self) -> int:
        """How many steps ago what a step frees was allocated at most."""
        return max((act.age for model in self.models for act in model.acts), default=0)

    @functools.cached_property
    def _staying(self) -> frozenset[tuple[int, int]]:
        """Places in a period, and slots there, of what no later step frees."""
        born = self.models[-1].number - self._oldest
        kept = (home for home in self.homes.values() if born - self.period < home[0] <= born)
        return frozenset((number % self.period, slot) for number, slot in kept)

    def stays(self, home: tuple[int, int]) -> bool:
        """Whether what a step allocates there is freed by no later one."""
        return (home[0] % self.period, home[1]) in self._staying

    def moves(self, home: tuple[int, int]) -> bool:
        """Whether later steps free what is alive there, and allocate it anew."""
        return home[0] > self.models[-1].number - self._oldest and not self.stays(home)

    def growth_of(self, home: tuple[int, int]) -> int:
        """Bytes from period to period of a slot, by the number of a step in which it was allocated."""
        place = (home[0] - self.models[0].number) % self.period
        return int(self.growth[place][home[1]])

    def sizes(self, copies: int) -> Iterator[list[list[int]]]:
        """For each of so many further periods, the bytes of each step's slots."""
        for copy in range(1, copies + 1):
            yield [(m.nbytes + copy * g).tolist() for m, g in zip(self.models, self.growth, strict=True)]

    def predicts(self, step: LoopStep) -> bool:
        """Whether a step that has run is the one that arithmetic makes."""
        place = (step.number - self.models[0].number) % self.period
        model, periods = self.models[place], (step.number - self.models[place].number) // self.period
        return step.does_the_same(model) and bool((model.nbytes + periods * self.growth[place] == step.nbytes).all())

    def sum_flops(self, copies: int) -> int | None:
        """FLOPs of so many further periods; None where they are not known."""
        total = 0
        for model, growth in zip(self.models, self.flops_growth, strict=True):
            if model.flops is None or growth is None:
                return None
            total += copies * model.flops + growth * copies * (copies + 1) // 2
        return total
