"""Which way a program's own check goes when all is well: away from the line that raises.

`if (labels < 0).any(): raise ValueError(...)` and `assert mask.all()` ask for a value that no run without data has, and
do nothing with it but end the program; so do a function that is called and raises, and one whose answer is checked
(`if not is_increasing(times): raise`). What is asked is found by its place: the instruction that a frame is at has the
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
_Wanted = Callable[[ast.AST, frozenset[str]], Iterator[tuple[ast.AST, ast.expr, bool]]]
"""Of a node, and the names of functions that raise: what is asked, by which condition, and the truth that is wanted."""


def find_passing_value(frame: types.FrameType) -> bool | None:
    """The truth with which the check that `frame` is at is passed, or that its callers are at, whose answer it gives;
    None where it is at no check, or its source cannot be read."""
    passes = _find(frame, _wanted_by_check)
    if passes is None and frame.f_back is not None and (answers := _find(frame, _wanted_to_return_true)) is not None:
        asked = find_passing_value(frame.f_back)
        return None if asked is None else answers == asked
    return passes


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


def _wanted_by_check(node: ast.AST, raisers: frozenset[str]) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """The condition of a statement that checks, and the truth value that passes; of a function that else raises, those
    of its `if ...: return`."""
    match node:
        case ast.Assert(test=test):
            yield node, test, True
        case ast.If(test=test) if _raises(node.body, raisers):
            yield node, test, False
        case ast.If(test=test) if _raises(node.orelse, raisers):
            yield node, test, True
        case ast.Call(func=ast.Attribute(attr="_assert"), args=[test, *_]):
            yield node, test, True
        case ast.FunctionDef(body=body) if _raises(body, raisers):
            for each in body:
                if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return) and not each.orelse:
                    yield each, each.test, True


def _wanted_to_return_true(node: ast.AST, _: frozenset[str]) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
    """What a function returns, or `all` and `any` go through, and the truth value with which that is true."""
    match node:
        case ast.Return(value=ast.expr() as value):
            yield node, value, True
        case ast.If(test=test, body=[ast.Return(value=ast.Constant(value=bool() as answer))]):
            yield node, test, answer
        case ast.Call(func=ast.Name(id="all" | "any"), args=[ast.GeneratorExp(elt=each) | ast.ListComp(elt=each)]):
            yield each, each, True


def _wanted_to_continue(node: ast.AST, _: frozenset[str]) -> Iterator[tuple[ast.AST, ast.expr, bool]]:
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

    nodes = list(ast.walk(_parse(file)))
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef) and _raises(each.body, frozenset())]
    raisers = {each.name for each in functions if not any(isinstance(inner, ast.Return) for inner in ast.walk(each))}
    for node in nodes:
        for asked in wanted_by(node, frozenset(raisers)):
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


def _raises(body: Sequence[ast.stmt], raisers: frozenset[str]) -> bool:
    """Whether statements end in one that raises, or that calls a function of the file's own that does."""
    match body[-1] if body else None:
        case ast.Raise() | ast.Assert(test=ast.Constant(value=False)):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="_assert"), args=[ast.Constant(value=False), *_])):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            # unittest, pytest, torch.testing; sys.exit
            return name in raisers or name in ("fail", "_fail", "exit")
    return False
