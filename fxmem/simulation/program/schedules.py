"""What a program's own loops do every so many steps: the few that are recorded may not show it."""

from __future__ import annotations

import ast
import functools
import linecache
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from fxmem.records.parts import Schedule
from fxmem.records.units import package_path
from fxmem.simulation.source_lines import program_frames, variables


def find_schedules(frame: types.FrameType | None) -> dict[Schedule, int | None]:
    """The conditions `if step % 1000 == 0:`, or `if not step % 1000:`, of a frame and its callers, as a round ends.

    Each with how many rounds later its branch runs in this turn of the loop: 0 above the line that is running, 1 below
    it; None where it does not, or nobody can tell. Assumes that what is divided counts steps, and that a turn runs its
    lines from first to last. A divisor that only the program's own code could tell is left out.
    """
    found: dict[Schedule, int | None] = {}
    for each in program_frames(frame)[0]:
        file, scope, now = each.f_code.co_filename, {**each.f_globals, **variables(each)}, each.f_lineno
        lines = {line for *_, line in each.f_code.co_lines()}
        nodes = _read("".join(linecache.getlines(file)))
        loops = [range(at.lineno, (at.end_lineno or 0) + 1) for at in nodes if isinstance(at, ast.For | ast.While)]
        counters = [at for at in nodes if isinstance(at, ast.AugAssign) and at.lineno in lines]
        conditions = (
            (at, by) for at in nodes if isinstance(at, ast.If) and at.lineno in lines for by in _divide(at.test)
        )
        for node, divisor in conditions:
            line, every, then = node.lineno, _find_value(divisor, scope), dict(scope)
            if type(every) is int and every > 0:
                for count in counters:
                    if min(line, now) < count.lineno < max(line, now):
                        by = ast.BinOp(count.target, ast.Add() if line > now else ast.Sub(), count.value)
                        then[ast.unparse(count.target)] = _find_value(by, then)
                is_reached = line < now or all((line in loop) == (now in loop) for loop in loops)
                runs = is_reached and _find_value(node.test, then) is True
                found[Schedule(place=f"{package_path(file)}:{line}", every=every)] = int(line > now) if runs else None
    return found


def find_unseen(schedules: Mapping[Schedule, int | None], peaks: Sequence[int]) -> tuple[Schedule, ...]:
    """Those that the recorded rounds do not show: none did it, or the one that did has a higher peak than the next.

    Args:
        schedules: each with the first round that does it, from 1.
        peaks: of the recorded rounds.
    """
    last = len(peaks) - 1
    shown = {each for each, at in schedules.items() if at and at <= last + 1 and peaks[at - 1] <= peaks[min(at, last)]}
    return tuple(each for each in schedules if each.every > len(peaks) and each not in shown)


@functools.lru_cache(maxsize=64)
def _read(text: str) -> tuple[ast.If | ast.For | ast.While | ast.AugAssign, ...]:
    """The conditions, the loops and the counters (`step += 1`) of a file."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except SyntaxError:
        nodes = []
    kinds = (ast.If, ast.For, ast.While, ast.AugAssign)
    return tuple(
        each for each in nodes if isinstance(each, kinds) and isinstance(getattr(each, "op", ast.Add()), ast.Add)
    )


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


_OPERATORS: Final[Mapping[type[ast.AST], Callable[[int, int], Any]]] = {
    **{ast.Mod: operator.mod, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt},
}


def _find_value(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    """What an expression is, where no code has to run for it; None for others."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=ast.And(), values=values):
            return all(type(each) in (int, bool) and each for each in [_find_value(each, scope) for each in values])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _find_value(operand, scope)
            return not value if type(value) in (int, bool) else None
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATORS
        ):
            a, b = _find_value(left, scope), _find_value(right, scope)
            return _OPERATORS[type(op)](a, b) if type(a) is type(b) is int and (b or type(op) is not ast.Mod) else None
        case ast.Name() | ast.Attribute() if ast.unparse(node) in scope:
            return scope[ast.unparse(node)]
        case ast.Attribute(value=owner, attr=name):
            try:
                return object.__getattribute__(_find_value(owner, scope), "__dict__").get(name)
            except AttributeError:
                return None
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            found = _find_value(owner, scope)
            return found.get(key) if type(found) is dict else None
    return None
