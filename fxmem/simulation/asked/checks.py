"""Which way a program's own check goes when all is well: away from the line that raises.

`if (labels < 0).any(): raise ValueError(...)` and `assert mask.all()` ask for a value that no run without data has, and
do nothing with it but end the program. What is asked is found by its place: the instruction that a frame is at has the
columns of the expression it belongs to (PEP 657).
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Callable, Iterator, Sequence
from typing import cast

Place = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column."""
_Wanted = Callable[[ast.AST], Iterator[tuple[ast.AST, ast.expr, bool]]]
"""Of a node: what is asked, by which condition, and the truth that is wanted."""


def find_passing_value(frame: types.FrameType) -> bool | None:
    """The truth with which the check that `frame` is at is passed; None where it is at no check, or its source cannot
    be read."""
    return _find(frame, _wanted_by_check)


def find_going_on_value(frame: types.FrameType) -> bool | None:
    """The truth with which a program goes on after the `if` that `frame` is at.

    It leaves neither its loop nor its function, and else does what it asks for. None where it is at no `if`, or its
    source cannot be read.
    """
    return _find(frame, _wanted_to_continue)


def is_in_while(frame: types.FrameType) -> bool:
    """Whether the innermost loop around the line that `frame` is at is a `while`, which need not end."""
    return frame.f_lineno in _lines_in_while(frame.f_code.co_filename)


def _find(frame: types.FrameType, wanted_by: _Wanted) -> bool | None:
    code = frame.f_code
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), None)
    return None if place is None else _places(code.co_filename, wanted_by).get(place)


def _wanted_by_check(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """The condition of a statement that checks, and the truth value that passes; of a function that else raises, those
    of its `if ...: return`."""
    match node:
        case ast.Assert(test=test):
            yield node, test, True
        case ast.If(test=test) if _raises(node.body):
            yield node, test, False
        case ast.If(test=test) if _raises(node.orelse):
            yield node, test, True
        case ast.Call(func=ast.Attribute(attr="_assert"), args=[test, *_]):
            yield node, test, True
        case ast.FunctionDef(body=body) if _raises(body):
            for each in body:
                if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return) and not each.orelse:
                    yield each, each.test, True


def _wanted_to_continue(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """The condition of an `if`, and the truth value with which the program goes on."""
    if isinstance(node, ast.If):
        yield node, node.test, not isinstance(node.body[-1], (ast.Break, ast.Continue, ast.Raise, ast.Return))


def _parse(file: str) -> ast.Module:
    """The source of a file; nothing where it is none."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=32)
def _places(file: str, wanted_by: _Wanted) -> dict[Place, bool]:
    """By the place of each condition in a file, the truth value that is wanted."""
    found: dict[Place, bool] = {}

    def note(node: ast.AST, test: ast.expr, wanted: bool) -> None:
        conditions = list(_conditions(test, wanted))
        found.update(conditions)
        if len({truth for _, truth in conditions}) == 1:  # Python 3.11 gives a jump the place of the whole statement
            found[_place(cast("ast.expr | ast.stmt", node))] = conditions[0][1]

    for node in ast.walk(_parse(file)):
        for asked in wanted_by(node):
            note(*asked)
    return found


@functools.lru_cache(maxsize=32)
def _lines_in_while(file: str) -> frozenset[int]:
    found: set[int] = set()
    for node in ast.walk(_parse(file)):  # what is inside comes after what is around it
        match node:
            case ast.While():
                found.update(range(node.lineno, _last_line(node) + 1))
            case ast.For() | ast.AsyncFor() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                found.difference_update(range(node.lineno, _last_line(node) + 1))
    return frozenset(found)


def _last_line(node: ast.expr | ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _conditions(test: ast.expr, wanted: bool) -> Iterator[tuple[Place, bool]]:
    """What a condition consists of. One operand of `and` or `or` that is as the whole should be never keeps the whole
    from it."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _conditions(operand, not wanted)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _conditions(value, wanted)
        case ast.Call(func=ast.Name(id="bool"), args=[operand]):
            yield _place(test), wanted
            yield from _conditions(operand, wanted)
        case _:
            yield _place(test), wanted


def _place(node: ast.expr | ast.stmt) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _raises(body: Sequence[ast.stmt]) -> bool:
    match body[-1] if body else None:
        case ast.Raise() | ast.Assert(test=ast.Constant(value=False)):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="_assert"), args=[ast.Constant(value=False), *_])):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="fail" | "_fail"))):  # unittest, pytest, torch.testing
            return True
    return False
