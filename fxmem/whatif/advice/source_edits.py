"""Lines of something's source as they are to be written."""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from fxmem.simulation.code.source_lines import last_name

_TAKING: Final = frozenset("add append appendleft insert put setdefault".split())
"""Methods whose last argument is kept."""


def calls_in_place(file: str, calls: Mapping[tuple[int, str], bool]) -> Iterator[tuple[int, str]]:
    """Rewrite the statements of a file that call some functions to run in place. Returns the first line of each and its
    text, dedented, empty where the call cannot be found.

    `F.relu(x)` gets `inplace=True` where it takes that; else `torch.relu(x)` becomes `torch.relu_(x)`, and `x.relu()`
    becomes `x.relu_()`.

    Args:
        calls: the line, as a frame that calls the function gives it, and the last part of the function's name, to
            whether it takes `inplace=`.
    """
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        tree = ast.Module([], [])
    groups: dict[tuple[ast.stmt, ...], dict[tuple[int, str], bool]] = {}
    for (line, name), keyword in calls.items():
        groups.setdefault(_innermost(tree, line), {})[line, name] = keyword
    for statements, inside in groups.items():
        text = _rewrite(statements, lines, inside)
        if text:
            yield statements[0].lineno, text
        else:
            yield from ((line, "") for line, _ in inside)


_ON_THE_HOST: Final = ".detach().cpu()"
_WITHOUT_GRAPH: Final = ".detach()"


def let_go(file: str, line: int, owner: str) -> str:
    """Rewrite the statement of a line that keeps something of the card, so that it keeps it on the host, and a sum
    without its graph. Returns its text, with its indentation; empty where it cannot be rewritten.

    `preds.append(out)` becomes `preds.append(out.detach().cpu())`, `total += loss` becomes `total += loss.detach()`.

    Args:
        owner: the last name of what keeps it (`preds` of `self.preds`).
    """
    lines = linecache.getlines(file)
    try:
        statements = _innermost(ast.parse("".join(lines)), line)
        kept = [found for each in statements for node in ast.walk(each) for found in _find_kept(node, owner)]
        texts = {number: lines[number - 1].encode() for number in range(line, _last_line(statements) + 1)}
        for part, ending in sorted(kept, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
            number, begin, end, _ = _span(part, "")
            text = texts[number][begin:end].decode()
            is_whole = isinstance(part, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
            text = (text if is_whole else f"({text})") + ending
            texts[number] = texts[number][:begin] + text.encode() + texts[number][end:]
    except (SyntaxError, ValueError, KeyError):
        return ""
    return b"".join(texts.values()).decode() if kept and statements[0].lineno == line else ""


def _last_line(statements: tuple[ast.stmt, ...]) -> int:
    return max((each.end_lineno or 0 for each in statements), default=0)


def _find_kept(node: ast.AST, owner: str) -> Iterator[tuple[ast.expr, str]]:
    """What a statement gives to an owner, and what is to be written behind it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKING:
        if node.args and any(last_name(each) == owner for each in ast.walk(node.func.value)):
            yield from _parts(node.args[-1], _ON_THE_HOST)
    elif isinstance(node, ast.AugAssign) and last_name(node.target) == owner:
        is_list = isinstance(node.value, (ast.List, ast.Tuple))
        yield from _parts(node.value, _ON_THE_HOST if is_list else _WITHOUT_GRAPH)
    elif isinstance(node, ast.Assign) and any(last_name(each) == owner for each in node.targets):
        is_item = any(isinstance(each, ast.Subscript) for each in node.targets)
        if is_item or isinstance(node.value, ast.BinOp):
            yield from _parts(node.value, _ON_THE_HOST if is_item else _WITHOUT_GRAPH)


def _parts(value: ast.expr, ending: str) -> Iterator[tuple[ast.expr, str]]:
    """The expressions in which tensors are kept, with what is missing at their end."""
    if isinstance(value, (ast.Tuple, ast.List)):
        for each in value.elts:
            yield from _parts(each, ending)
    elif isinstance(value, ast.Dict):
        for each in value.values:
            yield from _parts(each, ending)
    elif not isinstance(value, ast.Constant):
        is_detached = isinstance(value, ast.Call) and _last(value.func) == "detach"
        ending = ending.removeprefix(_WITHOUT_GRAPH) if is_detached else ending
        if ending:
            yield value, ending


def _rewrite(statements: tuple[ast.stmt, ...], lines: list[str], calls: Mapping[tuple[int, str], bool]) -> str:
    texts = {
        number: lines[number - 1].encode()
        for each in statements
        for number in range(each.lineno, (each.end_lineno or 0) + 1)
    }
    try:
        edits = [
            _edit(call, texts, keyword=keyword)
            for (line, name), keyword in calls.items()
            for call in _calls(statements, line, name)
        ]
        for number, begin, end, text in sorted(edits, reverse=True):
            texts[number] = texts[number][:begin] + text.encode() + texts[number][end:]
        made = textwrap.dedent(b"".join(texts.values()).decode()).rstrip()
        ast.parse(made)
    except (SyntaxError, ValueError):
        return ""
    return made if edits else ""


def _innermost(tree: ast.Module, line: int) -> tuple[ast.stmt, ...]:
    """The statements without statements of their own that a line has a part of."""
    found = (
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    )
    return tuple(node for node in found if not any(isinstance(below, ast.stmt) for below in ast.iter_child_nodes(node)))


def _calls(statements: tuple[ast.stmt, ...], line: int, name: str) -> list[ast.Call]:
    """Those that a frame's line can mean: Python gives the line where a call begins, or that of a method's name."""
    calls = [
        node
        for each in statements
        for node in ast.walk(each)
        if isinstance(node, ast.Call) and _last(node.func) == name
    ]
    return [call for call in calls if line in (call.lineno, call.func.end_lineno)]


def _last(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _edit(call: ast.Call, texts: dict[int, bytes], *, keyword: bool) -> tuple[int, int, int, str]:
    """Line, first and last byte of what is replaced, and what by."""
    function = call.func
    if keyword:
        for given in call.keywords:
            if given.arg == "inplace":
                return _span(given.value, "True")
        number, end = call.end_lineno or 0, (call.end_col_offset or 1) - 1
        before = (texts[number][:end] if texts[number][:end].strip() else texts.get(number - 1, b"")).strip()
        return number, end, end, "inplace=True" if before.endswith((b",", b"(")) else ", inplace=True"
    if not call.args:
        number, end = function.end_lineno or 0, function.end_col_offset or 0
        return number, end, end, "_"
    return _span(function, f"torch.{_last(function)}_")


def _span(node: ast.expr, text: str) -> tuple[int, int, int, str]:
    if node.lineno != node.end_lineno or node.end_col_offset is None:
        raise ValueError("an expression of several lines")
    return node.lineno, node.col_offset, node.end_col_offset, text
