"""What a loop of a library carries from step to step: found from its variables, compared, and put forward.

The state of `generate` is in the variables of its loop and in what these lead to: caches, masks, counters of tokens.
Between two steps whose memory is even it may differ in whole numbers that grow evenly, in tensors whose sizes do, and
in values of such tensors; then it can be put forward by as many steps as are left out.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.asked import known_values
from fxmem.simulation.code.source_lines import set_variable, variables

_BORDERS: Final = frozenset(
    "sliding_window attention_chunk_size max_position_embeddings original_max_position_embeddings".split()
)
"""Numbers of a model's configuration beyond which its steps may be others."""
_BORDER_OWNERS: Final = tuple(
    f"transformers.{name}" for name in ("cache_utils", "generation.logits_process", "generation.stopping_criteria")
)
_NO_STATE: Final = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_MOST: Final = 300_000
"""Values that are looked at."""


class TensorState(NamedTuple):
    """What of a tensor may differ from step to step, or from call to call."""

    home: Any
    """Which storage it lies in: of the loop's steps, by how many steps ago and which; of others its number; of what a
    call returns, which of the storages of that."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, home: Any) -> TensorState:
        """What a tensor is that lies there."""
        return cls(home, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)


class StateValue(NamedTuple):
    """A value, by the path that leads to it."""

    value: Any
    """A number, word or truth value; a `TensorState`; a type for what else there is."""
    known: torch.Tensor | None
    """A tensor's values, where they are known."""
    owner: Any
    key: Any


class LoopState:
    """The state of a loop between two steps.

    Args:
        frame: runs the loop.
        place: which storage a tensor lies in, in words that are the same at each step; None for a tensor elsewhere.
    """

    def __init__(self, frame: types.FrameType, place: Callable[[torch.Tensor], Any]) -> None:
        self.leaves: dict[str, StateValue] = {}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """Those on the target; for as long as this state is looked at."""
        self.borders: set[int] = set()
        """Numbers beyond which steps may be others."""
        self._place = place
        self._seen: set[int] = set()
        for name, value in variables(frame).items():
            self._walk(value, name, frame, name)

    def forget_tensors(self, before: LoopState | None) -> None:
        """Let go of what is not the state's own: the loop alone says how long its tensors live.

        Args:
            before: the state of the step before, whose equal values are kept once for both.
        """
        self.tensors, self._seen = [], set()
        kept = {} if before is None else before.leaves
        for path, leaf in self.leaves.items():
            same = kept.get(path)
            if same is None or same.value != leaf.value or same.known is not leaf.known:
                same = leaf._replace(owner=None)
            self.leaves[path] = same

    def _walk(self, value: Any, path: str, owner: Any, key: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, str)):
            self.leaves[path] = StateValue(value, None, owner, key)
            return
        if isinstance(value, torch.Tensor):
            self._add_tensor(value, path, owner, key)
            return
        if id(value) in self._seen or len(self.leaves) > _MOST:
            return
        self._seen.add(id(value))
        self.leaves[path] = StateValue(type(value), None, owner, key)
        for name, inner, place in list_parts(value):
            self._walk(inner, f"{path}{name}", value, place)
        self._note_borders(value)

    def _add_tensor(self, tensor: torch.Tensor, path: str, owner: Any, key: Any) -> None:
        if type(tensor) is not torch_common.FakeTensor:
            with torch_common.no_modes(), torch_common.pause_observers():
                is_few = type(tensor) is torch.Tensor and tensor.numel() <= 64 and not tensor.is_meta
                value = str(tensor.tolist()) if is_few else type(tensor)
            self.leaves[path] = StateValue(value, None, owner, key)
            return
        state = TensorState.of(tensor, self._place(tensor))
        self.leaves[path] = StateValue(state, known_values.find_value(tensor), owner, key)
        self.tensors.append((path, tensor))

    def _note_borders(self, value: Any) -> None:
        """Note the numbers that a cache, a processor of scores or a criterion compares lengths with, and their sums."""
        if isinstance(value, dict):
            named = [value[name] for name in _BORDERS & value.keys()]
            self.borders.update(each for each in named if type(each) is int)
            return
        module = type(value).__module__
        numbers = [each for each in getattr(value, "__dict__", {}).values() if type(each) is int]
        if module.startswith(_BORDER_OWNERS) and len(numbers) < 8:
            self.borders.update(numbers)
            self.borders.update(one + other for one in numbers for other in numbers)
        elif hasattr(value, "__dict__"):
            self._note_borders(vars(value))


def list_parts(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a value is made of: by the end of its path, with what it is called there."""
    if isinstance(value, dict):
        yield from ((f".{name}", each, name) for name, each in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i - len(value)}]", each, i) for i, each in enumerate(value))
    elif not isinstance(value, _NO_STATE) and hasattr(value, "__dict__"):
        own = vars(value)
        if isinstance(value, torch.nn.Module):
            own = {name: each for name, each in own.items() if name != "_parameters" and not name.endswith("hooks")}
        yield from ((f".{name}", each, name) for name, each in list(own.items()))


# --- how it goes on ---------------------------------------------------------------------------------------------------


class Advance(NamedTuple):
    """How a state changes with each period."""

    numbers: dict[str, int]
    """By path, what a whole number grows by."""
    tensors: dict[str, TensorState]
    """By path, what a tensor's shape, strides and offset grow by."""
    known: dict[str, Callable[[int], torch.Tensor]]
    """By path, a tensor's values after so many periods more."""
    borders: set[int]
    """Numbers beyond which steps may be others: those of all three states, since what grows is none."""

    def room(self, state: LoopState) -> int | None:
        """How many periods there are before a number or a size that grows reaches a border; None for no end."""
        grown = [(state.leaves[path].value, by) for path, by in self.numbers.items()]
        for path, by in self.tensors.items():
            grown += zip(state.leaves[path].value.shape, by.shape, strict=True)
        rooms = [(most - now) // by for now, by in grown if by > 0 for most in self.borders if most > now]
        return min(rooms, default=None)


def find_advance(states: Sequence[tuple[int, LoopState]], period: int) -> Advance | str:
    """How a state changes with each period, from three of them with their steps' numbers; or what differs otherwise."""
    (first, one), (second, two), (third, three) = states
    if not one.leaves.keys() == two.leaves.keys() == three.leaves.keys():
        paths = one.leaves.keys() ^ three.leaves.keys() or two.leaves.keys() ^ three.leaves.keys()
        return f"{min(paths)} comes or goes"
    spans = (second - first) // period, (third - second) // period
    advance = Advance({}, {}, {}, one.borders & two.borders & three.borders)
    for path, leaf in three.leaves.items():
        values = one.leaves[path].value, two.leaves[path].value, leaf.value
        known = one.leaves[path].known, two.leaves[path].known, leaf.known
        if values[0] == values[1] == values[2] and all(each is None for each in known):
            continue
        if all(type(each) is int for each in values):
            by = _grow(*values, spans)
            if by is None:
                return f"{path} is {', '.join(map(str, values))}"
            advance.numbers[path] = by
            continue
        if not all(isinstance(each, TensorState) for each in values):
            return f"{path} changes"
        grown = _grow_tensor(values, spans)
        if grown is None:
            return f"{path} has sizes {', '.join(str(list(each.shape)) for each in values)}"
        if grown.shape or grown.offset or any(grown.stride):
            advance.tensors[path] = grown
        if any(each is not None for each in known):
            go_on = _grow_values(known, spans)
            if go_on is None:
                return f"the values of {path} change"
            advance.known[path] = go_on
    return advance


def _grow(one: int, two: int, three: int, spans: tuple[int, int]) -> int | None:
    """What a number grows by, period by period; None where that is not the same."""
    by, rest = divmod(three - two, spans[1])
    return by if not rest and two - one == by * spans[0] else None


def _grow_tensor(values: tuple[Any, ...], spans: tuple[int, int]) -> TensorState | None:
    if len({(each.home, each.dtype, len(each.shape)) for each in values}) > 1:
        return None
    rows = ([*each.shape, *each.stride, each.offset] for each in values)
    grown = [by for a, b, c in zip(*rows, strict=True) if (by := _grow(a, b, c, spans)) is not None]
    rank = len(values[0].shape)
    if len(grown) < 2 * rank + 1:
        return None
    return TensorState(None, tuple(grown[:rank]), tuple(grown[rank:-1]), grown[-1], values[0].dtype)


def _grow_values(
    known: tuple[torch.Tensor | None, ...], spans: tuple[int, int]
) -> Callable[[int], torch.Tensor] | None:
    """How known values go on: what was there stays, and what comes is as far from what came before as that."""
    if any(each is None for each in known):
        return None
    one, two, three = (each for each in known if each is not None)
    with torch_common.no_modes(), torch_common.pause_observers():
        if one.shape == three.shape:
            if torch.equal(one, three) and torch.equal(two, three):
                return lambda _: three
            if one.dtype is torch.bool:
                return _push(one, two, three, spans)
            by = (three - two) // spans[1]
            even = torch.equal(two + by * spans[1], three) and torch.equal(one + by * spans[0], two)
            return (lambda periods: three + periods * by) if even else _push(one, two, three, spans)
        grown = [i for i, (a, b) in enumerate(zip(one.shape, three.shape, strict=True)) if a != b]
        if len(grown) != 1:
            return None
        dim = grown[0]
        kept, width = three.narrow(dim, 0, two.shape[dim]), (three.shape[dim] - two.shape[dim]) // spans[1]
        if not torch.equal(kept, two) or not torch.equal(two.narrow(dim, 0, one.shape[dim]), one):
            return None
        tail = three.narrow(dim, three.shape[dim] - width, width)
        before = three.narrow(dim, three.shape[dim] - 2 * width, width)
        if tail.dtype is torch.bool:
            return (lambda periods: torch.cat([three, *[tail] * periods], dim)) if torch.equal(tail, before) else None
        by = tail - before
        return lambda periods: torch.cat([three, *(tail + i * by for i in range(1, periods + 1))], dim)


def _push(
    one: torch.Tensor, two: torch.Tensor, three: torch.Tensor, spans: tuple[int, int]
) -> Callable[[int], torch.Tensor] | None:
    """How a tensor goes on in whose rows each period puts further columns, which push what follows to the right: the
    mask of a static cache, the tokens and choices of beams."""
    if not three.dim() or not three.shape[-1]:
        return None
    size = three.shape[-1]
    columns = torch.arange(size)
    pairs = (one, two), (two, three)
    first, second = (torch.where(old != new, columns, size).amin(-1, keepdim=True) for old, new in pairs)
    moved = (second - first)[second < size]
    width, rest = divmod(int(moved[0]), spans[0]) if moved.numel() else (0, 0)
    if rest or width <= 0 or (moved != moved[0]).any():
        return None

    def push(rows: torch.Tensor, begins: torch.Tensor, more: int) -> torch.Tensor:
        again = begins - width + (columns - begins) % width
        later = torch.where(columns < begins + more, again, columns - more)
        return rows.gather(-1, torch.where(columns < begins, columns, later).clamp(min=0))

    if not torch.equal(push(one, first, width * spans[0]), two):
        return None
    if not torch.equal(push(two, second, width * spans[1]), three):
        return None
    third = torch.where(second < size, second + width * spans[1], size)
    return lambda periods: push(three, third, width * periods)


def set_number(leaf: StateValue, value: int) -> None:
    """Put another number where a state has one.

    Raises:
        TypeError: nothing can be put there.
    """
    owner, key = leaf.owner, leaf.key
    if isinstance(owner, types.FrameType):
        set_variable(owner, key, value)
    elif isinstance(owner, (dict, list, deque)):
        owner[key] = value
    elif isinstance(owner, tuple):
        raise TypeError("a tuple cannot be written to")
    else:
        vars(owner)[key] = value
