"""Lines of something's source as they are to be written."""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterator, Mapping


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
