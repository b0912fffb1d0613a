"""Which functions, classes and modules have something as their own, by the objects that run and hold it."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Final

from fxmem.simulation.code.loaded_modules import program_modules
from fxmem.simulation.code.source_lines import variables
from fxmem.simulation.code.source_uses import Named

Owner = type | types.CodeType | None
"""The class of the object that has something as an attribute, or the function whose variable it is; None: a variable
of the functions that run or of a module."""
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


def split_path(path: str) -> list[str]:
    """`meter` and `values` of `graph of meter.values[3]`."""
    return _WORD.findall(re.sub(r"\[.*?\]", "", re.sub(r"^((graph|frames|hook) of )+", "", path)))


def find_names(path: str, owner: Owner, frames: Sequence[types.FrameType]) -> frozenset[Named]:
    """What the program's code calls what holds something; nothing where that is not known.

    Args:
        path: what a search has called it.
        owner: who has it.
        frames: of the program's functions that run, the innermost first.
    """
    words = split_path(path)
    if not words:
        return frozenset()
    if owner is not None:
        return frozenset(Named(file, scope, words[-1]) for file, scope in _find_scopes(owner))
    found = frozenset(_find_variables(words[-1], frames)) if len(words) == 1 else frozenset()
    return found or frozenset(_find_global(words, frames))


def _find_variables(name: str, frames: Sequence[types.FrameType]) -> Iterator[Named]:
    """The running functions' variables with this name, or with the value of the innermost of these."""
    value: object = None
    for frame in frames:
        own, code = variables(frame), frame.f_code
        if value is None:
            value = own.get(name, frame.f_globals.get(name))
        named = {each for each in own if value is not None and own[each] is value}
        for each in named:
            scopes = _find_scopes(code) if each in code.co_freevars else [(code.co_filename, _scope_of(code))]
            yield from (Named(file, scope, each) for file, scope in scopes)
        if value is not None and frame.f_globals.get(name) is value:
            yield Named(code.co_filename, "", name)


def _find_global(words: Sequence[str], frames: Sequence[types.FrameType]) -> Iterator[Named]:
    """A variable of a module, or of a class."""
    owner, name = ".".join(words[:-1]), words[-1]
    for module, scope in program_modules():
        if owner == module or not owner:
            yield Named(scope["__file__"], "", name)
    for frame in frames:
        if isinstance(cls := frame.f_globals.get(owner), type):
            yield from (Named(file, scope, name) for file, scope in _find_scopes(cls))


@functools.lru_cache(maxsize=4096)
def _find_scopes(owner: type | types.CodeType) -> tuple[tuple[str, str], ...]:
    """A class and those it inherits from, each with its file; a function and those around it."""
    if isinstance(owner, types.CodeType):
        inner, parts = _scope_of(owner), []
        while inner:
            parts.append(inner)
            inner = inner.rpartition(".<locals>.")[0]
        return tuple((owner.co_filename, each) for each in parts)
    classes = [(vars(sys.modules.get(each.__module__) or functools).get("__file__"), each) for each in owner.__mro__]
    return tuple((file, each.__qualname__) for file, each in classes if isinstance(file, str))


def _scope_of(code: types.CodeType) -> str:
    return "" if code.co_name == "<module>" else code.co_qualname
