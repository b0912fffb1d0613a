"""What a program's own loops do every so many steps: the few that are recorded may not show it."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator, Mapping
from typing import Any

from fxmem.records.parts import Schedule
from fxmem.records.units import package_path
from fxmem.simulation.source_lines import program_frames, variables


def find_schedules(frame: types.FrameType | None) -> tuple[Schedule, ...]:
    """The conditions `if step % 1000 == 0:`, or `if not step % 1000:`, of a frame and its callers.

    Assumes that what is divided counts steps. A divisor that only the program's own code could tell is left out.
    """
    found: dict[str, Schedule] = {}
    for each in program_frames(frame)[0]:
        file, scope = each.f_code.co_filename, {**each.f_globals, **variables(each)}
        lines = {line for *_, line in each.f_code.co_lines()}
        for line, divisor in _find_conditions("".join(linecache.getlines(file))):
            every = _find_value(divisor, scope) if line in lines else None
            if type(every) is int and every > 0:
                place = f"{package_path(file)}:{line}"
                found[place] = Schedule(place=place, every=every)
    return tuple(found.values())


@functools.lru_cache(maxsize=64)
def _find_conditions(text: str) -> tuple[tuple[int, ast.expr], ...]:
    """The lines of such conditions in a file, and what is divided by."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return ()
    return tuple((each.lineno, divisor) for each in nodes if isinstance(each, ast.If) for divisor in _divide(each.test))


def _divide(test: ast.expr) -> Iterator[ast.expr]:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            for each in values:
                yield from _divide(each)
        case (
            ast.Compare(left=ast.BinOp(op=ast.Mod(), right=divisor), ops=[ast.Eq()], comparators=[ast.Constant()])
            | ast.UnaryOp(op=ast.Not(), operand=ast.BinOp(op=ast.Mod(), right=divisor))
        ):
            yield divisor


def _find_value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """What an expression is, where no code has to run for it; None for others."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return scope.get(name)
        case ast.Attribute(value=owner, attr=name):
            try:
                return object.__getattribute__(_find_value(owner, scope), "__dict__").get(name)
            except AttributeError:
                return None
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            found = _find_value(owner, scope)
            return found.get(key) if type(found) is dict else None
    return None
