"""Who keeps a tensor, looked for from it upward: through what refers to it, and to that, up to a name of the program's.

A search from the program's variables downward looks at all that they lead to, and cannot see into what no object shows:
the generator that a running `for` goes through, an iterator of C. Upward there are few objects between a tensor and its
name, and Python's collector knows all that it tracks: one walk through these for each of a few levels, whatever else
the program has.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.pause_gc import unfreeze_gc
from fxmem.simulation.code.round_rule import Owner
from fxmem.simulation.code.source_lines import is_own_file, program_frames, variables
from fxmem.simulation.recording.observe.event_log import StepLog

_HIGHEST: Final = 16
"""Levels above a tensor."""
_WIDEST: Final = 64
"""Objects of a level."""
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)


class _Step(NamedTuple):
    """An object on the way up, and what leads down from it."""

    value: Any
    storage: int
    path: str = ""
    owner: Owner = None
    """The class or function that has the first name on the way down."""
    key: Any = None
    """Of a dictionary or a tuple; before the path."""

    def down(self) -> tuple[str, Owner]:
        """What leads down, from what has this under no name of its own, and who has the first name on that way."""
        return (self.path, self.owner) if self.key is None else (f"[{self.key!r:.40}]{self.path}", None)


_Below = dict[int, list[_Step]]
"""The steps of a level, by the identity of their objects."""


def find_keepers(log: StepLog, wanted: Sequence[Collection[int]]) -> dict[int, tuple[str, Owner]]:
    """The nearest names above the tensors in these storages, each with who has its first element; without what no
    object of Python's has, or no name.

    Args:
        log: of the storages.
        wanted: groups of storages, for each of which it is looked by itself.
    """
    with unfreeze_gc():  # else it leaves out what was there before the recording
        steps = [_Step(each, index) for index, each in _find_tensors(log, {*itertools.chain(*wanted)})]
        return _climb_up([[each for each in steps if each.storage in group] for group in wanted])


def _climb_up(levels: list[list[_Step]]) -> dict[int, tuple[str, Owner]]:
    """Climb from each level by itself, and look through the collector's objects once for all of them."""
    found: dict[int, tuple[str, Owner]] = {}
    group_of = {each.storage: number for number, level in enumerate(levels) for each in level}
    seen = {(group_of[each.storage], id(each.value)): each.value for level in levels for each in level}
    scopes = {id(vars(each)): each for each in sys.modules.copy().values() if isinstance(each, types.ModuleType)}
    frames, _ = program_frames(sys._getframe(2))  # the collector does not track what runs
    for _ in range(_HIGHEST):
        below: _Below = {}
        for level in levels:
            for each in level[:_WIDEST]:
                if each.storage not in found:
                    below.setdefault(id(each.value), []).append(each)
        levels, referred = [[] for _ in levels], set[int]()
        for value in [*gc.get_referrers(*(each[0].value for each in below.values())), *frames] if below else ():
            if value is seen or type(value) is _Step:
                continue
            for child, step in _climb(value, below):
                referred.add(id(child.value))
                key = group_of[step.storage], id(value)
                if (name := _find_root(step, scopes)) is not None:
                    found.setdefault(step.storage, (name, step.owner))
                elif key not in seen:
                    seen[key] = value
                    levels[key[0]].append(step)
        for each in itertools.chain(*below.values()):
            kind, (path, owner) = type(each.value), each.down()
            is_iterator = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
            if id(each.value) not in referred and is_iterator:  # the stack of a running function has it
                name = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
                found.setdefault(each.storage, (name + path, owner))
    return found


def _find_tensors(log: StepLog, wanted: Collection[int]) -> Iterator[tuple[int, torch.Tensor]]:
    objects = gc.get_objects()
    tensors = {each for each in {*map(type, objects)} if issubclass(each, torch.Tensor)}
    for each in itertools.compress(objects, map(tensors.__contains__, map(type, objects))):
        indices = [log.find_storage(part) for part in torch_wrappers.parts(each)]
        yield from ((index, each) for index in indices if index is not None and index in wanted)


def _climb(value: Any, below: _Below) -> Iterator[tuple[_Step, _Step]]:
    """The steps from those of a level to an object that refers to them, each with the former one."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, each in [*dict.items(value)]:
            for child in below.get(id(each), ()):
                yield child, _Step(value, child.storage, *child.down(), key)
    elif issubclass(kind, _SEQUENCES):
        for key, each in enumerate([*value] if kind in _SEQUENCES else gc.get_referents(value)):
            for child in below.get(id(each), ()):
                yield child, _Step(value, child.storage, *child.down(), key)
    else:
        named = {id(each): name for name, each in reversed([*_find_named(value)])}
        own = _find_attributes(value)
        referents = {*named, *map(id, gc.get_referents(value))}
        for child in [
            each
            for each in itertools.chain(*below.values())
            if not referents.isdisjoint((id(each.value), _find_cell(each.value)))
        ]:
            name = named.get(id(child.value)) or named.get(_find_cell(child.value))
            path, owner = child.down()
            if name is not None:
                path, owner = f".{name}{path}", owner or _find_scope(value)
            elif child.key is not None and (child.value is own or issubclass(kind, type)):
                path, owner = f".{child.key}{child.path}", child.owner or _find_scope(value)
            elif isinstance(value, types.FunctionType) and value.__closure__ is child.value:
                path, owner = f".{value.__code__.co_freevars[child.key]}{child.path}", child.owner or value.__code__
            yield child, _Step(value, child.storage, path, owner)


def _find_named(value: Any) -> Iterator[tuple[str, Any]]:
    """The variables of a running function of the program or of a generator, the attributes of an object."""
    frame = value.gi_frame if isinstance(value, types.GeneratorType) else value
    if isinstance(frame, types.FrameType):
        if is_own_file(frame.f_code.co_filename):
            for name, each in variables(frame).items():
                yield (type(each).__name__ if name == "self" else name), each
        return
    yield from (_find_attributes(value) or {}).items()
    for cls in type(value).__mro__:
        for name, each in vars(cls).items():
            if isinstance(each, types.MemberDescriptorType):  # of `__slots__`
                with contextlib.suppress(AttributeError):
                    yield name, each.__get__(value)


def _find_attributes(value: Any) -> dict[str, Any] | None:
    with contextlib.suppress(Exception):
        found = object.__getattribute__(value, "__dict__")
        return found if type(found) is dict else None
    return None


def _find_cell(value: Any) -> int:
    """What a variable has that functions share, by identity; 0 for others."""
    with contextlib.suppress(ValueError):  # not yet filled
        return id(value.cell_contents) if isinstance(value, types.CellType) else 0
    return 0


def _find_scope(value: Any) -> Owner:
    """Whose own a variable or an attribute is; None where `find_names` looks for that."""
    if isinstance(value, types.GeneratorType):
        return value.gi_code
    return None if isinstance(value, types.FrameType) else value if isinstance(value, type) else type(value)


def _find_root(step: _Step, scopes: Mapping[int, types.ModuleType]) -> str | None:
    """The path from a name of the program's, where a step has come to one."""
    value, module = step.value, scopes.get(id(step.value))
    if module is not None and not module.__name__.startswith("fxmem"):
        is_plain = module.__name__ == "__main__"
        return f"{step.key}{step.path}" if is_plain else f"{module.__name__}.{step.key}{step.path}"
    if isinstance(value, types.FrameType):
        return step.path.removeprefix(".")
    if isinstance(value, type):
        return f"{value.__name__}{step.path}"
    if isinstance(value, types.GeneratorType) and is_own_file(value.gi_code.co_filename):
        return f"{value.gi_code.co_name}{step.path}"
    return None
