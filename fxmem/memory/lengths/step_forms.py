"""Steps that differ in sizes alone, which are functions of their lengths: the proof, and further steps by it.

Compared are the steps that allocate and free in the same order. Of each size a form is found that gives it in all of
them (`find_form`). What a kernel has for itself is no such function: it comes and goes with the length. So the shapes
of its call are, and the operator's row is asked again at each length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fxmem.errors import AnalysisError
from fxmem.hardware.hidden_memory import HiddenMemory, Signature, expand
from fxmem.hardware.tensor_layouts import TensorLayout
from fxmem.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from fxmem.memory.allocator_acts import Act, Empty, Free, Hold, RunKernel
from fxmem.memory.lengths.forms import Features, Form, find_form
from fxmem.records.units import group

MOST_STEPS: Final = 20_000
"""Steps of different lengths that are kept."""
LEAST_LENGTHS: Final = 4
"""Different lengths that prove a form: three give it, a fourth checks it."""

Look = Callable[[str, Sequence[Any], Any], HiddenMemory | None]
"""What a call hides, its tensors as layouts."""
Ask = Callable[[Sequence[Signature]], Mapping[Signature, int | None]]
"""How much workspace cuDNN has for these."""


class LengthsUnproved(AnalysisError):
    """The sizes of the recorded steps follow no form."""


class BlockRequest(NamedTuple):
    """An allocation or a free of a step."""

    nbytes: int
    """-1 for a free, -2 where the cache is emptied."""
    age: int
    """How many steps ago it was allocated."""
    slot: int
    """Its number among what its step allocated; negative for a kernel's own, which its operator frees."""
    stream: int


class StepForms:
    """How a program's further steps allocate.

    Args:
        recorded: set-up, then each step.
        features: of each recorded step, its lengths; None where they are not known. Set-up has none.
        look: what a call hides.
        ask: cuDNN's workspaces.

    Raises:
        LengthsUnproved: too few steps are alike, or their sizes follow no form; with the first that does not.
    """

    def __init__(
        self, recorded: Sequence[Sequence[Act]], features: Sequence[Features | None], look: Look, ask: Ask
    ) -> None:
        self._look, self._ask = look, ask
        self._asked: dict[Signature, int | None] = {}
        self._rounds = [*_number(recorded)]
        known = (number for number, lengths in enumerate(features) if lengths is not None)
        alike = group((_outline(self._rounds[number]), number) for number in known)
        self.models = max(alike.values(), key=lambda each: (len(each), each[-1]), default=[])
        """The steps that are compared."""
        self._features = {number: each for number in self.models if (each := features[number]) is not None}
        if len(set(self._features.values())) < LEAST_LENGTHS:
            raise LengthsUnproved(
                f"expected {LEAST_LENGTHS} steps of different lengths that allocate and free in the same order, got "
                f"{len(set(self._features.values()))} of {len(features) - 1}"
            )
        self._known: dict[tuple[int, ...], int] = {}
        self._forms: list[Form] = []
        self._plan = [*self._make_plan()]
        self.step = functools.lru_cache(MOST_STEPS)(self._make_step)
        """The requests of a step of these lengths."""

    def recorded(self) -> list[list[BlockRequest]]:
        """The requests of set-up and of each recorded step."""
        return [[*self._write(each)] for each in self._rounds]

    def _make_plan(self) -> Iterator[tuple[Any, ...]]:
        """The acts of a step, each size by the number of its form."""
        for same in zip(*(_without_holds(self._rounds[number]) for number in self.models), strict=True):
            act = same[0]
            if not isinstance(act, _Run):
                yield (act,)
                continue
            sizes = [self._find([each.nbytes[i] for each in same]) for i in range(len(act.nbytes))]
            if act.call is not None:
                trees = [flatten(each.call) for each in same]
                numbers = [self._find([each[0][i] for each in trees]) for i in range(len(trees[0][0]))]
                yield act, sizes, numbers, trees[0][1]
            else:
                buffers = [[e.nbytes for e in each.hidden.events] if each.hidden else [] for each in same]
                known = [None if None in each else self._find(each) for each in zip(*buffers, strict=True)]
                yield act, sizes, known, None

    def _find(self, values: Sequence[int]) -> int:
        """The number of the form of a value, by what it is in each of the compared steps."""
        key = tuple(values)
        if key not in self._known:
            form = find_form([*zip(self._features.values(), key, strict=True)])
            if form is None:
                pairs = sorted(zip(self._features.values(), key, strict=True))
                shown = ", ".join(f"{value:,} at {' x '.join(map(str, lengths))}" for lengths, value in pairs)
                raise LengthsUnproved(f"expected sizes that follow the lengths, got {shown}")
            self._known[key] = len(self._forms)
            self._forms.append(form)
        return self._known[key]

    def ask_ahead(self, steps: Iterable[Features]) -> None:
        """Ask for the workspaces of steps of these lengths, all in one go."""
        self._ask_for(act for features in steps for act in self._fill(features))

    def _make_step(self, features: Features) -> list[BlockRequest]:
        return [*self._write([*self._fill(features)])]

    def _fill(self, features: Features) -> Iterator[Any]:
        at = [form.at(features) for form in self._forms]
        for act, *sizes in self._plan:
            if not sizes:
                yield act
                continue
            of_outputs, numbers, tree = sizes
            hidden = act.hidden
            if tree is not None:
                hidden = self._look(*rebuild(tree, [at[number] for number in numbers]))
            elif hidden is not None:
                sized = zip(hidden.events, numbers, strict=True)
                events = (e if n is None else e.model_copy(update={"nbytes": at[n]}) for e, n in sized)
                hidden = HiddenMemory(events=tuple(events))
            yield act._replace(nbytes=tuple(at[number] for number in of_outputs), hidden=hidden)

    def _ask_for(self, acts: Iterable[Any]) -> None:
        missing = {s for act in acts if isinstance(act, _Run) and act.hidden for s in act.hidden.signatures}
        if missing := missing - self._asked.keys():
            self._asked.update(self._ask([*missing]))

    def _write(self, acts: _Acts) -> Iterator[BlockRequest]:
        """The requests of acts."""
        self._ask_for(acts)
        slot = 0
        for act in acts:
            if isinstance(act, _Run):
                hidden = None if act.hidden is None else act.hidden.fill_workspaces(self._asked)
                for number, nbytes in expand(len(act.nbytes), hidden):
                    is_output = number >= 0
                    size = act.nbytes[number] if is_output else -1 if nbytes is None else nbytes
                    yield BlockRequest(size, 0, slot + number if is_output else number, act.stream)
                slot += len(act.nbytes)
            elif isinstance(act, _Gone):
                yield BlockRequest(-1, act.age, act.slot, 0)
            elif isinstance(act, Hold):
                yield BlockRequest(act.nbytes, 0, HELD, act.stream)
            else:
                yield BlockRequest(-2, 0, 0, 0)


HELD: Final = -(1 << 20)
"""The slot of what is never freed."""


class _Run(NamedTuple):
    """An operator that allocates."""

    nbytes: tuple[int, ...]
    stream: int
    hidden: HiddenMemory | None
    call: tuple[str, Sequence[Any], Any] | None


class _Gone(NamedTuple):
    """A free, by when and as which it was allocated."""

    age: int
    slot: int


_Acts = list[_Run | _Gone | Hold | Empty]
"""Those of a step, its storages by their places."""


def _number(recorded: Iterable[Sequence[Act]]) -> Iterator[_Acts]:
    born: dict[int, tuple[int, int]] = {}
    for number, acts in enumerate(recorded):
        found: _Acts = []
        slot = 0
        for act in acts:
            if isinstance(act, RunKernel):
                for storage in act.storages:
                    born[storage] = number, slot
                    slot += 1
                found.append(_Run(act.nbytes, act.stream, act.hidden, act.call))
            elif isinstance(act, Free):
                if act.storage in born:
                    when, place = born.pop(act.storage)
                    found.append(_Gone(number - when, place))
            else:
                found.append(act)
        yield found


def _without_holds(acts: _Acts) -> Iterator[_Run | _Gone | Empty]:
    """Those of a step without what is allocated once."""
    return (each for each in acts if not isinstance(each, Hold))


def _outline(acts: _Acts) -> Any:
    """All of a step but its sizes."""
    alike = _without_holds(acts)
    return tuple(
        (len(each.nbytes), each.stream, _outline_hidden(each)) if isinstance(each, _Run) else each for each in alike
    )


def _outline_hidden(act: _Run) -> Any:
    if act.call is not None:
        return flatten(act.call)[1]
    return None if act.hidden is None else tuple((each.action, each.name) for each in act.hidden.events)


# --- the whole numbers of a call --------------------------------------------------------------------------------------


class _Number(NamedTuple):
    """The place of a whole number."""


def flatten(value: Any) -> tuple[list[int], Any]:
    """Take the whole numbers out of a call: return them in order, and the call with empty places."""
    numbers: list[int] = []

    def take(each: Any) -> Any:
        if type(each) is int:
            numbers.append(each)
            return _Number()
        if type(each) is float:
            return 1.0  # a rate or a correction, which changes from step to step and decides no size
        if isinstance(each, TensorLayout):
            return TensorLayout, take(each.shape), take(each.stride), each.dtype
        if isinstance(each, (list, tuple)):
            return (list if isinstance(each, list) else tuple, *map(take, each))
        return each

    return numbers, take(value)


def rebuild(tree: Any, numbers: Iterable[int]) -> Any:
    """Put whole numbers into a call that `flatten` has emptied."""
    rest = iter(numbers)

    def put(each: Any) -> Any:
        if isinstance(each, _Number):
            return next(rest)
        if not isinstance(each, tuple):
            return each
        if each[0] is TensorLayout:
            return TensorLayout(put(each[1]), put(each[2]), each[3])
        made = map(put, each[1:])
        return [*made] if each[0] is list else tuple(made)

    return put(tree)


# --- a long run of steps of given lengths on the caching allocator ----------------------------------------------------


_SLOTS = 1 << 24
"""More than a step allocates."""


class LongRun(NamedTuple):
    """What the allocator makes of a run."""

    steps: int
    """Steps that were replayed to their end, the recorded ones included."""
    requested_bytes: tuple[int, ...]
    """The most at once, of set-up and of each step."""
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    retries: int
    """How often the cache was emptied to find room."""
    is_full: bool
    """Whether the step after the last found no room."""


def replay_lengths(
    forms: StepForms,
    steps: Iterable[Features],
    settings: AllocatorSettings,
    *,
    capacity_bytes: int | None = None,
    device_bytes: int | None = None,
    most_requests: int | None = None,
    recorded: int | None = None,
) -> LongRun:
    """Replay set-up and recorded steps, then steps of these lengths.

    Args:
        forms: of the program.
        steps: the lengths of each further step.
        settings: the allocator's.
        capacity_bytes: what the driver has; None refuses nothing.
        device_bytes: the card's memory.
        most_requests: after so many requests no further step begins; None for all steps.
        recorded: how many recorded steps come first; None for all.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=device_bytes)
    addresses: dict[int, int] = {}
    peaks: list[tuple[int, int, int]] = []
    done = 0

    def list_steps() -> Iterator[list[BlockRequest]]:
        yield from forms.recorded()[: None if recorded is None else recorded + 1]
        for features in steps:
            if most_requests is not None and done >= most_requests:
                return
            yield forms.step(features)

    malloc, free, is_full = allocator.malloc, allocator.free, False
    try:
        for number, requests in enumerate(list_steps()):
            for nbytes, age, slot, stream in requests:
                key = slot if slot < 0 else (number - age) * _SLOTS + slot
                if nbytes >= 0:
                    address = malloc(nbytes, stream)
                    if slot != HELD:
                        addresses[key] = address
                elif nbytes == -1:
                    free(addresses.pop(key, 0))
                else:
                    allocator.empty_cache()
            stats = allocator.stats()
            peaks.append((stats.requested_bytes.peak, stats.allocated_bytes.peak, stats.reserved_bytes.peak))
            allocator.reset_peak_stats()
            done += len(requests)
    except OutOfMemory:
        is_full = True
    requested, allocated, reserved = (tuple(each[i] for each in peaks) for i in range(3))
    return LongRun(len(peaks) - 1, requested, allocated, reserved, allocator.stats().alloc_retries, is_full)
