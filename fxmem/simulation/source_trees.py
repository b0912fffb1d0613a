"""What the source of a program says of its loops and of what it keeps; read, and never run."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import nn

from fxmem._torch import modules as torch_modules
from fxmem.simulation.source_lines import last_name

_KEEPING: Final = frozenset("add append appendleft extend extendleft insert put setdefault update".split())
"""Methods that put something into what they are called of."""
_ADDING: Final = _KEEPING - {"add", "setdefault", "update"}
"""Those that make a list longer, whatever is in it already."""
_REMOVING: Final = frozenset("clear detach detach_ discard item pop popitem popleft remove truncate".split())
_LEAVING: Final = (ast.Break, ast.Continue, ast.Raise, ast.Return)
_MAKING: Final = (ast.List, ast.ListComp, ast.Dict, ast.DictComp, ast.Set, ast.Tuple, ast.Constant, ast.Call)
_ARITHMETIC: Final = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


# --- trees and values -------------------------------------------------------------------------------------------------


def read_tree(file: str) -> ast.Module:
    """A file's code; none where it cannot be read."""
    return _parse("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def find_body(tree: ast.Module, code: types.CodeType) -> Sequence[ast.stmt]:
    """The statements of a function, or of a module where the code is its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    return tree.body if code.co_name == "<module>" else ()


def find_value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """What an expression is, where no code has to run for it; None for others."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return scope.get(name)
        case ast.Attribute(value=value, attr=name):
            owner = find_value(value, scope)
            found = inspect.getattr_static(owner, name, None)
            if found is None and isinstance(owner, nn.Module):
                return torch_modules.own_modules(owner).get(name)
            return found
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            found = find_value(owner, scope)
            return found.get(key) if type(found) is dict else None
    return None


def find_number(node: ast.expr, scope: Mapping[str, Any]) -> int | None:
    """A whole number that an expression of names, attributes and plain arithmetic is; None for others.

    An attribute whose owner is not known (`self.most`) is looked for by its own name.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = find_number(node.left, scope), find_number(node.right, scope)
        is_known = left is not None and right is not None and (right != 0 or not isinstance(node.op, ast.FloorDiv))
        return _ARITHMETIC[type(node.op)](left, right) if is_known else None
    if isinstance(node, ast.Call) and last_name(node.func) in ("len", "int") and len(node.args) == 1:
        given = find_value(node.args[0], scope)
        if last_name(node.func) == "len":
            return count_elements(given)
        return int(given) if isinstance(given, str) and given.isdecimal() else find_number(node.args[0], scope)
    found = find_value(node, scope)
    found = scope.get(node.attr) if found is None and isinstance(node, ast.Attribute) else found
    return found if type(found) is int else None


def count_elements(value: Any) -> int | None:
    """How many elements a loop over a value goes through, without its own code; None where that is not known."""
    if isinstance(value, (list, tuple, dict, range, str)):
        return len(value)
    return None


# --- bounds -----------------------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """A comparison that bounds what something keeps: `len(data) < most`, `if count < most: data.append(x)`."""

    measure: ast.expr | None
    """None: how many elements it has."""
    most: ast.expr


@functools.lru_cache(maxsize=256)
def find_limits(tree: ast.Module) -> Mapping[str, Sequence[Limit]]:
    """What a file compares lengths or counts with before it keeps something, takes something away or leaves, by the
    name of what keeps it. A comparison by which it only prints bounds nothing."""
    found: dict[str, list[Limit]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.While)):
            continue
        parts = [part for one in (*node.body, *node.orelse) for part in ast.walk(one)]
        kept = [name for part in parts for name, _ in find_kept(part)]
        for left, right in _compared(node.test):
            name = _measured(left)
            if name and (name in kept or any(isinstance(one, _LEAVING) or _removes(one, {name}) for one in parts)):
                found.setdefault(name, []).append(Limit(None, right))
            for each in kept if isinstance(node, ast.If) else ():
                found.setdefault(each, []).append(Limit(left, right))
    return found


def _compared(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both sides of a comparison of two, each as the first."""
    if isinstance(node, ast.BoolOp):
        for each in node.values:
            yield from _compared(each)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq)):
        yield node.left, node.comparators[0]
        yield node.comparators[0], node.left


def _measured(node: ast.expr) -> str:
    """`data` of `len(self.data)`."""
    is_length = isinstance(node, ast.Call) and last_name(node.func) == "len" and len(node.args) == 1
    return last_name(node.args[0]) if is_length and isinstance(node, ast.Call) else ""


def _guards(node: ast.AST) -> Iterator[tuple[ast.expr, list[ast.stmt]]]:
    """The condition of an `if`, and what runs or does not run by it."""
    if isinstance(node, ast.If):
        yield node.test, [*node.body, *node.orelse]


def is_unbounded(name: str, trees: Iterable[ast.Module]) -> bool:
    """Whether a program puts more into a name, and nothing in its code bounds or empties it.

    A list that is appended to, a sum or a tensor that is made of what it was; and nowhere a comparison of its length,
    or of a counter before something is kept, a method, `del` or a slice that removes, or a write at a position, by
    which another may go.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {name, *_find_aliases(name, nodes)}
    kept = False
    for node in nodes:
        is_compared = any(_measured(left) in names for left, _ in _compared(node))
        is_guarded = any(
            keeper in names
            for test, statements in _guards(node)
            if any(not _is_of_remainder(each) for each in _compared(test))
            for one in statements
            for part in ast.walk(one)
            for keeper, _ in find_kept(part)
        )
        if is_compared or is_guarded or _removes(node, names):
            return False
        kept = kept or _adds(node, names)
    return kept


def _is_of_remainder(sides: tuple[ast.expr, ast.expr]) -> bool:
    """Whether a comparison is of `step % 10`, which bounds nothing, or of words."""
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in sides) or any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in sides
    )


def _find_aliases(name: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What the program's own functions call it where they are given it."""
    functions = {each.name: each.args for each in nodes if isinstance(each, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Call) and (arguments := functions.get(last_name(node.func))) is not None:
            names = [each.arg for each in arguments.args if each.arg != "self"]
            yield from (to for to, each in zip(names, node.args, strict=False) if last_name(each) == name)
            yield from (each.arg for each in node.keywords if each.arg and last_name(each.value) == name)


def find_given(name: str, tree: ast.Module) -> Iterator[str]:
    """The functions that are given what has a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(last_name(each) == name for each in node.args):
            yield last_name(node.func)


def find_functions(tree: ast.Module) -> frozenset[str]:
    """The names of a file's functions."""
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))


def _removes(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in _REMOVING:
            return last_name(owner) in names
        case ast.Call(func=ast.Attribute(value=ast.Name(id="heapq"))):
            return any(last_name(each) in names for each in node.args)
        case ast.Delete(targets=targets):
            return any(last_name(each) in names for each in targets)
        case ast.Assign(targets=targets, value=value):
            of = [each for each in targets if last_name(each) in names]
            read = [each for each in ast.walk(value) if _is_slice(each)]
            if any(last_name(each) in names for each in read):
                return True
            is_read = any(last_name(each) in names for each in ast.walk(value))
            return any(isinstance(each, ast.Subscript) and not is_read and not _is_at_end(each) for each in of)
    return False


def _is_slice(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)


def _is_at_end(node: ast.Subscript) -> bool:
    """`seen[len(seen)]`: what is written there is one more."""
    return isinstance(node.slice, ast.expr) and _measured(node.slice) == last_name(node)


def _adds(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in _ADDING:
            return _last_owner(owner) in names
        case ast.AugAssign(target=target):
            return last_name(target) in names
        case ast.Assign(targets=targets, value=value):
            of = [each for each in targets if last_name(each) in names]
            is_read = any(last_name(each) in names for each in ast.walk(value))
            return any(is_read or (isinstance(each, ast.Subscript) and _is_at_end(each)) for each in of)
    return False


def _last_owner(node: ast.expr) -> str:
    """`seen` of `seen.setdefault(key, [])` as of `seen[key]`."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr="setdefault")):
            return last_name(owner)
    return last_name(node)


# --- where it is made -------------------------------------------------------------------------------------------------


class Making(NamedTuple):
    """A line that gives a name a value which is not made of what it was."""

    line: int
    function: str
    """The innermost around it; empty for the module."""
    is_attribute: bool
    is_new: bool
    """Whether the value is made there: `losses = []`, and not `losses = self.losses`."""


def find_makings(name: str, tree: ast.AST, function: str = "") -> Iterator[Making]:
    """Find the lines of a file that make what a name has."""
    for node in ast.iter_child_nodes(tree):
        targets, value = _assigned(node)
        if (
            isinstance(node, ast.stmt)
            and value is not None
            and all(last_name(each) != name for each in ast.walk(value))
        ):
            for each in (part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])):
                if not isinstance(each, ast.Subscript) and last_name(each) == name:
                    yield Making(node.lineno, function, isinstance(each, ast.Attribute), isinstance(value, _MAKING))
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        yield from find_makings(name, node, inner)


def _assigned(node: ast.AST) -> tuple[Sequence[ast.expr], ast.expr | None]:
    """What a statement gives a value to, and the value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return targets, value
        case ast.AnnAssign(target=target, value=value) | ast.For(target=target, iter=value):
            return [target], value
    return (), None


# --- the line that keeps it -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def keeping_lines(tree: ast.Module) -> tuple[tuple[str, int], ...]:
    """What a file's lines keep something under, in the order of the lines."""
    return tuple(sorted({each for node in ast.walk(tree) for each in find_kept(node)}, key=operator.itemgetter(1)))


def find_kept(node: ast.AST) -> Iterator[tuple[str, int]]:
    """What a statement or a call keeps something under, and its line."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _KEEPING:
            yield last_name(node.func.value), node.lineno
    elif isinstance(node, ast.AugAssign):
        yield last_name(node.target), node.lineno
    elif isinstance(node, ast.Assign):
        read = {last_name(each) for each in ast.walk(node.value)}
        for target in node.targets:
            if isinstance(target, ast.Subscript) or last_name(target) in read:
                yield last_name(target), node.lineno
