"""What a program does later than in the few steps that are recorded: every so many of them, or after its loop."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

from fxmem.records.parts import Schedule
from fxmem.records.units import package_path
from fxmem.simulation.code.source_lines import is_own_code, program_frames, variables
from fxmem.simulation.code.source_trees import find_body, find_value, read_tree

_Scope = Mapping[str, Any]
_Position = tuple[int, int]
"""Line, from 1, and column, from 0, of a file."""


def find_schedules(frame: types.FrameType | None) -> Iterator[tuple[Schedule, str, Any, list[str]]]:
    """The conditions `if step % 1000 == 0:`, or `if not step % 1000:`, of a frame and its callers, each with what is
    divided, its value, and the lines of its branch.

    Assumes that what is divided counts steps. A divisor that only the program's own code could tell is left out.
    """
    for each in program_frames(frame)[0]:
        file, scope = each.f_code.co_filename, _scope(each)
        lines = {line for *_, line in each.f_code.co_lines()}
        for condition, divisors in _find_conditions(read_tree(file)):
            if condition.lineno in lines:
                name, branch = package_path(file), condition.body
                within = [f"{name}:{line}" for line in range(branch[0].lineno, (branch[-1].end_lineno or 0) + 1)]
                for counter, divisor in divisors:
                    every, names = find_value(divisor, scope), [n for n in ast.walk(counter) if _is_named(n)]
                    if type(every) is int and every > 0:
                        calls = _find_model_call(branch, scope, file, line=each.f_lineno)
                        found = Schedule(place=f"{name}:{condition.lineno}", every=every, calls=calls)
                        value = find_value(names[0], scope) if names else None
                        named = ast.unparse(names[0]) if names else ""
                        yield found, named, value if type(value) is int else None, within


def _is_named(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, (ast.Name, ast.Attribute))


def find_following(frame: types.FrameType | None) -> tuple[Schedule, ...]:
    """The statements that call a model and come after the loop around a frame, in its own function and its callers'.

    The loop is the innermost one of the innermost function that has one. Followed are calls of the program's own
    functions, as far as names and attributes tell what is called.
    """
    found: dict[str, Schedule] = {}
    is_in_loop = False
    for each in program_frames(frame)[0]:
        file, scope = each.f_code.co_filename, _scope(each)
        line, _, column, _ = list(each.f_code.co_positions())[each.f_lasti // 2]
        body = find_body(read_tree(file), each.f_code)
        if line is None or column is None:
            continue
        later, has_loop = _find_later(body, (line, column), is_in_loop=is_in_loop)
        is_in_loop = is_in_loop or has_loop
        for statement in later if is_in_loop else ():
            if calls := _find_model_call([statement], scope, file, line=line):
                place = f"{package_path(file)}:{statement.lineno}"
                found.setdefault(calls, Schedule(place=place, every=None, calls=calls))
    return tuple(found.values())


def _scope(frame: types.FrameType) -> _Scope:
    return {**frame.f_globals, **variables(frame)}


@functools.lru_cache(maxsize=64)
def _find_conditions(tree: ast.Module) -> list[tuple[ast.If, list[tuple[ast.expr, ast.expr]]]]:
    """The conditions of a file in which something is divided, what, and by what: once for all rounds that ask."""
    conditions = ((each, list(_divide(each.test))) for each in ast.walk(tree) if isinstance(each, ast.If))
    return [(each, divisors) for each, divisors in conditions if divisors]


def _find_later(statements: Sequence[ast.stmt], at: _Position, *, is_in_loop: bool) -> tuple[list[ast.stmt], bool]:
    """The statements that come after a position, without those of the innermost loop around it, which come again;
    whether there is such a loop. With `is_in_loop` it is elsewhere, and all are meant."""
    found: list[ast.stmt] = []
    for each in statements:
        if (each.lineno, each.col_offset) > at:
            found.append(each)
        elif at <= (each.end_lineno or 0, each.end_col_offset or 0):
            blocks = [getattr(each, name, []) for name in ("body", "orelse", "finalbody")]
            if isinstance(each, ast.If):
                blocks = [block for block in blocks if block and _holds(block, at)]
            for block in blocks:
                later, is_in_loop = _find_later(block, at, is_in_loop=is_in_loop)
                found += later
            if isinstance(each, (ast.For, ast.AsyncFor, ast.While)) and not is_in_loop:
                found, is_in_loop = list(each.orelse), True
    return found, is_in_loop


def _holds(block: Sequence[ast.stmt], at: _Position) -> bool:
    last = block[-1]
    return (block[0].lineno, block[0].col_offset) <= at <= (last.end_lineno or 0, last.end_col_offset or 0)


def _find_model_call(
    statements: Iterable[ast.stmt],
    scope: _Scope,
    file: str,
    seen: set[types.FunctionType] | None = None,
    *,
    line: int = 0,
) -> str:
    """`file:line` of the first call of a module with parameters, in functions of the program's own, too; or empty.

    `line` is where the function that has the statements runs; 0: it does not run yet."""
    seen = set() if seen is None else seen
    fixed = _find_fixed(read_tree(file), line)
    for call in (each for one in statements for each in _walk(one, scope, fixed) if isinstance(each, ast.Call)):
        called = find_value(call.func, scope)
        owner = find_value(call.func.value, scope) if isinstance(call.func, ast.Attribute) else None
        if isinstance(called, nn.Module) and any(True for _ in nn.Module.parameters(called)):
            return f"{package_path(file)}:{call.lineno}"
        if isinstance(owner, nn.Module) and isinstance(call.func, ast.Attribute) and call.func.attr == "generate":
            return f"{package_path(file)}:{call.lineno}"
        function = inspect.unwrap(called) if callable(called) else None
        if isinstance(function, types.FunctionType) and function not in seen and is_own_code(function):
            seen.add(function)
            code = function.__code__
            given = [*([owner] if owner is not None and not isinstance(owner, types.ModuleType) else [])]
            given += [find_value(each, scope) for each in call.args]
            named = {each.arg: find_value(each.value, scope) for each in call.keywords if each.arg}
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            within = {
                **function.__globals__,
                **{name: cell.cell_contents for name, cell in cells if cell != types.CellType()},
                **dict(zip(code.co_varnames, given, strict=False)),
                **named,
            }
            body = find_body(read_tree(code.co_filename), code)
            if place := _find_model_call(body, within, code.co_filename, seen):
                return place
    return ""


@functools.lru_cache(maxsize=64)
def _find_fixed(tree: ast.Module, line: int) -> Callable[[str], bool]:
    """Whether a file writes to a name, or an attribute, once at most: its value is then what it stays.

    What the function that runs at a line has assigned before it, outside of its loops, is over: `parser =
    parser.parse_args()`.
    """
    written: Counter[str] = Counter()
    around = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.lineno <= line]
    around = [each for each in around if line <= (each.end_lineno or 0)]
    run = [each for body in (tree.body, *(one.body for one in around)) for each in body if each.lineno < line]
    over = {target for each in run if isinstance(each, ast.Assign) for target in each.targets}
    for node in set(ast.walk(tree)) - over:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            written[node.id if isinstance(node, ast.Name) else node.attr] += 1
        loops = [node.target] if isinstance(node, (ast.For, ast.AsyncFor, ast.AugAssign)) else []
        written.update(each.id for one in loops for each in ast.walk(one) if isinstance(each, ast.Name))
    repeated = Counter(node.id for node in over if isinstance(node, ast.Name))
    return lambda name: written[name] + min(repeated[name], 1) < 2


def _walk(node: ast.AST, scope: _Scope, is_fixed: Callable[[str], bool]) -> Iterator[ast.AST]:
    """As `ast.walk`, without branches that the program's options do not take."""
    yield node
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.If, ast.IfExp)) and (taken := _decide(node.test, scope, is_fixed)) is not None:
        branch = node.body if taken else node.orelse
        children = [node.test, *(branch if isinstance(branch, list) else [branch])]
    for each in children:
        yield from _walk(each, scope, is_fixed)


def _decide(test: ast.expr, scope: _Scope, is_fixed: Callable[[str], bool]) -> bool | None:
    """Whether a condition of options holds: words, flags and None that nothing writes to again; None for any other."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = _decide(operand, scope, is_fixed)
            return None if found is None else not found
        case ast.BoolOp(op=op, values=values):
            each = [_decide(value, scope, is_fixed) for value in values]
            ends = isinstance(op, ast.Or)
            return ends if ends in each else None if None in each else not ends
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as op], comparators=[right]):
            sides = [_find_option(one, scope, is_fixed) for one in (left, right)]
            if not all(sides):
                return None
            return (sides[0] == sides[1]) == isinstance(op, (ast.Eq, ast.Is))
    option = _find_option(test, scope, is_fixed)
    return None if option is None else bool(option[0])


def _find_option(node: ast.expr, scope: _Scope, is_fixed: Callable[[str], bool]) -> tuple[str | bool | None] | None:
    """The value of an option; None for what is none."""
    names = [each.id if isinstance(each, ast.Name) else each.attr for each in ast.walk(node) if _is_named(each)]
    value = find_value(node, scope)
    owner = find_value(node.value, scope) if isinstance(node, ast.Attribute) else None
    is_none = isinstance(node, ast.Constant) or (isinstance(owner, argparse.Namespace) and names[0] in owner)
    is_known = isinstance(value, (str, bool)) or (value is None and is_none)
    return (value,) if is_known and all(map(is_fixed, names)) else None


def _divide(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            for each in values:
                yield from _divide(each)
        case (
            ast.Compare(
                left=ast.BinOp(left=counter, op=ast.Mod(), right=divisor), ops=[ast.Eq()], comparators=[ast.Constant()]
            )
            | ast.UnaryOp(op=ast.Not(), operand=ast.BinOp(left=counter, op=ast.Mod(), right=divisor))
        ):
            yield counter, divisor
