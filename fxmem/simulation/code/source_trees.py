"""What the source of a program says of its loops and of what it keeps; read, and never run."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import nn

from fxmem._torch import modules as torch_modules
from fxmem.simulation.code.source_lines import last_name

_KEEPING: Final = frozenset("add append appendleft extend extendleft insert put setdefault update".split())
"""Methods that put something into what they are called of."""
PUSHING: Final = frozenset("heappush insort insort_left insort_right".split())
"""Functions that put something into what they are given first."""
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


def parse(text: str) -> ast.Module:
    """A file's code; none where it is none."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


_parse: Final = functools.lru_cache(maxsize=256)(parse)


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
    return len(value) if isinstance(value, (list, tuple, dict, range, str)) else None


# --- where it is made -------------------------------------------------------------------------------------------------


class Making(NamedTuple):
    """A line that gives a name a value which is not made of what it was."""

    line: int
    function: str
    """The innermost around it; empty for the module."""
    is_attribute: bool
    is_new: bool
    """Whether the value is made there: `losses = []`, and not `losses = self.losses`."""
    is_always: bool
    """Whether that is in each pass of the loop around it: not under an `if`."""


def find_makings(name: str, tree: ast.AST, function: str = "", inside: Inside = None) -> Iterator[Making]:
    """Find the lines of a file that make what a name has."""
    for node in ast.iter_child_nodes(tree):
        for each, value in pair_targets(node):
            is_its = not isinstance(each, ast.Subscript) and last_name(each) == name
            if is_its and isinstance(node, ast.stmt) and all(last_name(part) != name for part in ast.walk(value)):
                is_new, is_always = isinstance(assigned(node)[1], _MAKING), not is_now_and_then(name, inside)
                yield Making(node.lineno, function, isinstance(each, ast.Attribute), is_new, is_always)
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        yield from find_makings(name, node, inner, enter(node, inside))


Inside = tuple[ast.AST, ...] | None
"""The conditions around a node within the innermost loop; None: there is no loop."""


def enter(node: ast.AST, inside: Inside) -> Inside:
    """What is around the nodes of one that has this around it."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return None
        case ast.For() | ast.AsyncFor() | ast.While():
            return ()
        case ast.If(test=condition):
            return inside if inside is None else (*inside, condition)
        case ast.ExceptHandler():
            return inside if inside is None else (*inside, node)
    return inside


def is_now_and_then(name: str, inside: Inside) -> bool:
    """Whether a statement about a name runs in some passes of a loop alone, and not where it has no value yet."""
    return bool(inside) and all(last_name(each) != name for one in inside or () for each in ast.walk(one))


def assigned(node: ast.AST) -> tuple[Sequence[ast.expr], ast.expr | None]:
    """What a statement gives a value to, and the value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return targets, value
        case ast.AnnAssign(target=target, value=value) | ast.For(target=target, iter=value):
            return [target], value
    return (), None


def pair_targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement gives a value to, each with its value, of `a, b = [], c` as well."""
    targets, value = assigned(node)
    if value is None:
        return
    for each in targets:
        if not isinstance(each, (ast.Tuple, ast.List)):
            yield each, value
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(each.elts):
            yield from zip(each.elts, value.elts, strict=True)
        else:  # of what it is made of nothing is known
            yield from ((one, ast.Name("")) for one in each.elts)


# --- the line that keeps it -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def keeping_lines(tree: ast.Module) -> tuple[tuple[str, int, bool], ...]:
    """What a file's lines keep something under, in the order of the lines, and whether that is an attribute."""
    found = {(last_name(each), each.lineno, _is_attribute(each)) for node in ast.walk(tree) for each in find_kept(node)}
    return tuple(sorted(found, key=operator.itemgetter(1)))


def _is_attribute(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute)


def find_kept(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or a call keeps something in."""
    if isinstance(node, ast.Call) and last_name(node.func) in PUSHING and node.args:
        yield node.args[0]
    if isinstance(node, ast.Call):
        # As a method that is called, or handed to who calls it: `out.register_hook(grads.append)`.
        methods = (each for each in (node.func, *node.args) if isinstance(each, ast.Attribute))
        yield from (each.value for each in methods if each.attr in _KEEPING)
    elif isinstance(node, ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        is_same = isinstance(node.value, (ast.Name, ast.Attribute))  # `self.losses = losses`
        read = {last_name(each) for each in ast.walk(node.value) if not is_same}
        yield from (each for each in node.targets if isinstance(each, ast.Subscript) or last_name(each) in read)
