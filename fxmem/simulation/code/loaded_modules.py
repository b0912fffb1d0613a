"""The modules that are loaded: those of the program's own, and who has a function under some name.

There are thousands, most of them of libraries, and to look into one is a walk through memory. What was seen in a
library's is kept.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from typing import Any, Final

from fxmem.simulation.code.source_lines import is_own_file, program_frames

_libraries: Final[dict[str, types.ModuleType]] = {}
"""Modules of libraries, by the names under which they were loaded: another may take the name."""


def program_files(frame: types.FrameType | None) -> dict[str, set[int]]:
    """The files of the program's own code: of a frame and its callers, with the lines of these functions, then of the
    modules that are imported."""
    own, _ = program_frames(frame)
    found: dict[str, set[int]] = {}
    for each in own:
        lines = {line for *_, line in each.f_code.co_lines() if line is not None}
        found.setdefault(each.f_code.co_filename, set()).update(lines)
    for _, scope in program_modules():
        found.setdefault(scope["__file__"], set())
    return found


def program_modules() -> list[tuple[str, dict[str, Any]]]:
    """The names and variables of the modules that are the program's own: neither installed, nor torch's or ours."""
    found, known = [], _libraries.get
    for name, module in sys.modules.copy().items():
        # No `getattr`: a module that is imported lazily would be imported by it.
        if (
            known(name) is not module
            and isinstance(module, types.ModuleType)
            and isinstance(file := vars(module).get("__file__"), str)
        ):
            if is_own_file(file):
                found.append((name, vars(module)))
            else:
                _libraries[name] = module
    return found


def find_holders(values: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Modules that have one of these values, under which names: who has imported it by name keeps it."""
    given = frozenset(values)
    wanted, without = {id(each) for each in given}, _without(given)
    program_modules()  # which finds those of libraries
    found = []
    for key, module in sys.modules.copy().items():
        scope = getattr(module, "__dict__", {})
        if without.get(key) == (module, len(scope)):
            continue
        names = [(module, name, value) for name, value in list(scope.items()) if id(value) in wanted]
        if not names and _libraries.get(key) is module:
            without[key] = module, len(scope)
        found += names
    return found


@functools.lru_cache(maxsize=8)
def _without(values: frozenset[Any]) -> dict[str, tuple[types.ModuleType, int]]:
    """Libraries' modules that had none of the values, and how many names: what they import later is one more.

    A name that is bound anew to a value leaves the count as it was, and is not seen.
    """
    return {}
