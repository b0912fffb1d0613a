"""Statements of the user's own source, as a change writes them."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from linecache import getlines
from typing import Any, Final, NamedTuple, cast

from fxmem.memory.findings import ACTIVATIONS
from fxmem.simulation.code.source_lines import last_name
from fxmem.whatif.source_edits import SourceEdit, apply_edits, edited_lines

Edits = tuple[SourceEdit, ...]
"""Of one file or several; empty where no simple way is known."""
_TAKING: Final = frozenset("add append appendleft insert put setdefault".split())
"""Methods whose last argument is kept."""
_ON_THE_HOST: Final = ".detach().cpu()"
_WITHOUT_GRAPH: Final = ".detach()"
_INDENT: Final = "    "


# --- what keeps something of the card ---------------------------------------------------------------------------------


def let_go(file: str, line: int, owner: str) -> Edits:
    """Let the statement of a line that keeps something of the card keep it on the host, and a sum without its graph.

    `preds.append(out)` becomes `preds.append(out.detach().cpu())`, `total += loss` becomes `total += loss.detach()`.

    Args:
        owner: the last name of what keeps it (`preds` of `self.preds`).
    """
    statements = _innermost(_parse(file), line)
    if not statements or statements[0].lineno != line:
        return ()
    return _end_with(file, (kept for each in statements for node in ast.walk(each) for kept in _find_kept(node, owner)))


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


def detach(file: str, line: int) -> Edits:
    """Let a line's statement return or bind its value without a graph: `return loss(x)` becomes `return
    loss(x).detach()`."""
    kinds = (ast.Return, ast.Assign, ast.AugAssign)
    found = [each for each in _innermost(_parse(file), line) if isinstance(each, kinds)]
    if len(found) != 1 or found[0].value is None:
        return ()
    return _end_with(file, _parts(found[0].value, _WITHOUT_GRAPH))


def _end_with(file: str, parts: Iterable[tuple[ast.expr, str]]) -> Edits:
    """Write what is missing at the end of expressions."""
    path, found = os.path.realpath(file), list[SourceEdit]()
    for part, ending in parts:
        is_whole = isinstance(part, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        begin, end = (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)
        found += [] if is_whole else [SourceEdit(path, begin[0], begin[1], begin[1], "(")]
        found.append(SourceEdit(path, end[0], end[1], end[1], ending if is_whole else f"){ending}"))
    return _checked(found)


def _parts(value: ast.expr, ending: str) -> Iterator[tuple[ast.expr, str]]:
    """The expressions in which tensors are kept, with what is missing at their end."""
    if isinstance(value, (ast.Tuple, ast.List, ast.Dict)):
        for each in value.values if isinstance(value, ast.Dict) else value.elts:
            yield from _parts(each, ending)
    elif not isinstance(value, ast.Constant):
        is_detached = isinstance(value, ast.Call) and last_name(value.func) == "detach"
        ending = ending.removeprefix(_WITHOUT_GRAPH) if is_detached else ending
        if ending:
            yield value, ending


def delete_name(file: str, line: int, name: str) -> Edits:
    """Delete a name that a line's assignment binds, after the last statement that reads it.

    None where it is read elsewhere: before the assignment, so that a loop's next round needs it, or after the block.
    """
    tree = _parse(file)
    functions = (each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    *_, scope = (tree, *(each for each in functions if each.lineno <= line <= (each.end_lineno or 0)))
    blocks = [*_find_blocks(tree, line)]
    if not blocks:
        return ()
    block = blocks[-1]
    first = next(number for number, each in enumerate(block) if each.lineno <= line <= (each.end_lineno or 0))
    bound = block[first]
    if not _binds(bound, name):
        return ()
    # Where a line before binds it anew, what reads it from there on needs nothing of a round before.
    anew = (number for number in range(first + 1) if _binds(block[number], name) and not [*_loads(block[number], name)])
    reads = [number for number in range(next(anew, first + 1), len(block)) for _ in _loads(block[number], name)]
    if not reads or len(reads) != len([*_loads(scope, name)]):
        return ()
    after = block[max(reads)]
    if max(reads) <= first or _ends(after) or _binds(after, name):
        return ()
    return _checked([_insert(file, (after.end_lineno or 0) + 1, f"{_indentation(file, after)}del {name}\n")])


def _binds(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and [last_name(each) for each in statement.targets] == [name]


def _find_blocks(tree: ast.AST, *lines: int) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements that have a part of each of some lines, the innermost last."""
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list) and all(_holds(block, line) for line in lines):
                yield block


def _holds(block: list[Any], line: int) -> bool:
    return any(isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or 0) for each in block)


def _loads(tree: ast.AST, name: str) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store):
            yield node


def _ends(statement: ast.stmt) -> bool:
    """Whether nothing comes after it in its block."""
    return isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue))


# --- arguments, and lines that are added ------------------------------------------------------------------------------


def add_argument(files: Iterable[str], names: Collection[str], argument: str, others: Collection[str] = ()) -> Edits:
    """Give every call of these names an argument, `fused=True`.

    None where a call may have it already, or one of the `others`.
    """
    return _give([(file, call) for file in files for call in _find_calls(file, names)], argument, others)


def _give(calls: Sequence[tuple[str, ast.Call]], argument: str, others: Collection[str] = ()) -> Edits:
    given = {each.arg for _, call in calls for each in call.keywords}
    unknown = {argument.partition("=")[0], None, *others}
    if given & unknown or any(isinstance(each, ast.Starred) for _, call in calls for each in call.args):
        return ()
    return _checked(_append_argument(file, call, argument) for file, call in calls)


def add_after(files: Iterable[str], names: Collection[str], code: str) -> Edits:
    """Write lines after the one statement that binds what a call of these names makes; `{}` in them is its name."""
    found = [
        (file, node)
        for file in files
        for node in ast.walk(_parse(file))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and last_name(node.value.func) in names
    ]
    calls = [call for file in files for call in _find_calls(file, names)]
    if len(found) != 1 or len(calls) != 1 or len(found[0][1].targets) != 1:
        return ()
    file, statement = found[0]
    lines = textwrap.indent(code.replace("{}", ast.unparse(statement.targets[0])), _indentation(file, statement))
    return _checked([_insert(file, (statement.end_lineno or 0) + 1, f"{lines}\n")])


def set_argument(file: str, line: int, name: str, argument: str) -> Edits:
    """Give the calls of a name in a line's statement an argument, `map_location="cpu"`, or another value of it."""
    calls = (call for each in _innermost(_parse(file), line) for call in _walk_calls(each, {name}))
    return _checked(_give_value(file, call, argument) for call in calls)


def _give_value(file: str, call: ast.Call, argument: str) -> SourceEdit:
    word, _, value = argument.partition("=")
    given = next((each.value for each in call.keywords if each.arg == word), None)
    return _append_argument(file, call, argument) if given is None else _replace(os.path.realpath(file), given, value)


def drop_argument(file: str, name: str, argument: str) -> Iterator[tuple[int, Edits]]:
    """Yield the line of each call of a name with an argument as this, `retain_graph=True`, and leave it out there."""
    for call in _find_calls(file, {name}):
        given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        for number, each in enumerate(given):
            if isinstance(each, ast.keyword) and ast.unparse(each) == argument:
                begin, end = (each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)
                if number:
                    begin = given[number - 1].end_lineno or 0, given[number - 1].end_col_offset or 0
                elif len(given) > 1:
                    end = given[1].lineno, given[1].col_offset
                if begin[0] == end[0]:
                    yield call.lineno, _checked([SourceEdit(os.path.realpath(file), begin[0], begin[1], end[1], "")])


def set_variable(file: str, name: str, value: str) -> Edits:
    """Set a variable of the environment after a script's first imports."""
    body = _parse(file).body
    at = _after_imports(body)
    has_os = any(ast.unparse(each) == "import os" for each in body if each.lineno < at)
    text = f'\nos.environ["{name}"] = "{value}"\n'
    return _checked([_insert(file, at, text if has_os else f"import os\n{text}")])


def _after_imports(body: Iterable[ast.stmt]) -> int:
    """The line after a file's first imports, or its docstring."""
    at = 1
    for each in body:
        is_docstring = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if not is_docstring and not isinstance(each, (ast.Import, ast.ImportFrom)):
            break
        at = (each.end_lineno or 0) + 1
    return at


def run_within(file: str, first: int, last: int, context: str) -> Edits:
    """Run the statements from one line to another of the same block within a context: `with CONTEXT:`."""
    tree = _parse(file)
    blocks = [*_find_blocks(tree, first, last)]
    if not blocks:
        return ()
    inside = [each for each in blocks[-1] if (each.end_lineno or 0) >= first and each.lineno <= last]
    begin, end = inside[0].lineno, inside[-1].end_lineno or 0
    strings = (node for each in inside for node in ast.walk(each) if isinstance(node, (ast.Constant, ast.JoinedStr)))
    if begin != first or any(node.lineno != node.end_lineno for node in strings):
        return ()  # a string of several lines would get another text
    path = os.path.realpath(file)
    lines, indentation = getlines(path), _indentation(file, inside[0])
    if "\t" in indentation:
        return ()
    edits = [SourceEdit(path, begin, 0, 0, f"{indentation}with {context}:\n{_INDENT}")]
    edits += [SourceEdit(path, line, 0, 0, _INDENT) for line in range(begin + 1, end + 1) if lines[line - 1].strip()]
    return _checked(edits)


def replace_statement(file: str, line: int, code: str, after: str) -> Edits:
    """Write lines in the place of the statement that begins at a line, whose code is given as it is."""
    path = os.path.realpath(file)
    there = getlines(path)[line - 1 : line - 1 + len(code.splitlines())]
    if textwrap.dedent("".join(there)).strip() != code.strip():
        return ()
    indentation = there[0][: len(there[0]) - len(there[0].lstrip())]
    edits = [SourceEdit(path, line, 0, len(there[0].encode()), textwrap.indent(after, indentation) + "\n")]
    edits += [SourceEdit(path, line + number, 0, len(text.encode()), "") for number, text in enumerate(there[1:], 1)]
    return _checked(edits)


def add_import(file: str, statement: str) -> Edits:
    """Write an import after a file's first ones, unless it is there."""
    body = _parse(file).body
    if any(ast.unparse(each) == statement for each in body):
        return ()
    return (_insert(file, _after_imports(body), f"{statement}\n"),)


def write_statement(edits: Edits) -> str:
    """The statement that is edited first, as it is to be written; what else is edited in its file comes after it."""
    there = _innermost(_parse(edits[0].path), edits[0].line)
    return textwrap.dedent(edited_lines(edits, there[0].lineno, there[-1].end_lineno or 0)).rstrip()


# --- an activation that is written out --------------------------------------------------------------------------------


def call_activation(file: str, line: int, call: str) -> Edits:
    """Let one call do what an expression of a line writes out in terms of one variable.

    Args:
        file, line: of the expression.
        call: of the variable `x`, one of those that the finding proposes: `torch.nn.functional.silu(x)`.
    """
    tree, (functions, constants) = _parse(file), ACTIVATIONS[call]
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    for node in (below for each in _innermost(tree, line) for below in ast.walk(each)):
        is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        if is_product or (isinstance(node, ast.Call) and last_name(node.func) in ("mul", "mul_")):
            within = [*ast.walk(node)]
            names = [each.id for each in within if isinstance(each, ast.Name) and each.id not in modules]
            called = {last_name(each.func) for each in within if isinstance(each, ast.Call)}
            is_it = called - {"mul", "mul_", "sqrt", "pow"} == functions - {"pow"}
            is_alone = len(names) == 2 + ("pow" in functions) and len({*names}) == 1
            if is_it and is_alone and re.match(constants or r"[^\d-]*$", ast.unparse(node)):
                written = _replace(os.path.realpath(file), cast(ast.expr, node), call.replace("(x", f"({names[0]}"))
                return _checked((written, *add_import(file, "import torch")))
    return ()


# --- what goes to the card --------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """An object that a program makes and puts on the card."""

    name: str
    """What the program calls it."""
    file: str
    bound: ast.Assign
    moves: tuple[tuple[ast.stmt, ast.Call], ...]
    """The calls that put it there, or say how its parts come there, each with its statement."""


def find_placed(file: str, kind: str) -> Iterator[Placed]:
    """Yield what a file makes by calls whose name ends with `kind`, `FluxPipeline.from_pretrained(...)`."""
    tree = _parse(file)
    statements = [each for each in ast.walk(tree) if isinstance(each, (ast.Assign, ast.Expr))]
    for bound in statements:
        if not isinstance(bound, ast.Assign) or len(bound.targets) != 1 or not isinstance(bound.value, ast.Call):
            continue
        *_, made = _chain(bound.value)
        if re.search(rf"{kind}(For\w+)?\b", ast.unparse(made.func)):
            name = ast.unparse(bound.targets[0])
            # Of what else has its name, and of the statement that makes it.
            calls = [(each, call) for each in statements if each is not bound for call in _find_moves(each, name)]
            calls += [(bound, call) for call in _chain(bound.value) if _is_move(call)]
            yield Placed(name, file, bound, tuple(calls))


def place(placed: Placed, code: str) -> Edits:
    """Put an object on the card by other lines than its own; none where it is put there twice, by those already, or in
    a way that is not known."""
    if not placed.moves:
        *_, made = _chain(placed.bound.value)
        given = [ast.unparse(each) for each in made.keywords if each.arg == "device_map"]
        dropped = (each for word in given for each in drop_argument(placed.file, last_name(made.func), word))
        for edits in (edits for line, edits in dropped if line == made.lineno and edits):
            return _checked([*edits, _insert_after(placed.file, placed.bound, code)])
    if len(placed.moves) != 1 or ast.unparse(placed.moves[0][1]) == code:
        return ()
    (statement, call), path = placed.moves[0], os.path.realpath(placed.file)
    kept = [ast.unparse(each) for each in (*call.args, *call.keywords) if _is_dtype(each)]
    assert isinstance(call.func, ast.Attribute)  # or it were no move
    before = call.func.value
    if isinstance(before, ast.Call) or kept:
        line, begin = before.end_lineno or 0, before.end_col_offset or 0
        if line != call.end_lineno:
            return ()
        left = SourceEdit(path, line, begin, call.end_col_offset or 0, f".to({', '.join(kept)})" if kept else "")
        return _checked([left, _insert_after(placed.file, statement, code)])
    if statement.lineno != statement.end_lineno:
        return ()
    lines = textwrap.indent(code, _indentation(placed.file, statement)).lstrip()
    return _checked([SourceEdit(path, statement.lineno, statement.col_offset, statement.end_col_offset or 0, lines)])


def set_up(placed: Placed, code: str) -> Edits:
    """Write lines after an object is on the card, or is made."""
    last = max((each for each, _ in placed.moves), key=lambda each: each.lineno, default=placed.bound)
    return _checked([_insert_after(placed.file, last, code)])


def cast_called(file: str, line: int, dtype: str) -> Edits:
    """Cast the model that a line calls before it goes to the card, or once it is made there: `Net().cuda()` becomes
    `Net().to(torch.bfloat16).cuda()`. None where the file makes it twice, moves it twice, or to a dtype."""
    there = (each for statement in _innermost(_parse(file), line) for each in ast.walk(statement))
    called = {ast.unparse(each.func) for each in there if isinstance(each, ast.Call)}
    found = [each for each in find_placed(file, "") if each.name in called]
    if len(found) != 1 or len(found[0].moves) > 1:
        return ()
    for _, call in found[0].moves:
        is_cast = any(map(_is_dtype, (*call.args, *call.keywords)))
        return () if is_cast else _end_with(file, [(cast(ast.Attribute, call.func).value, f".to({dtype})")])
    return set_up(found[0], f"{found[0].name}.to({dtype})")


def load_with(placed: Placed, part: str, argument: str, of_whole: str) -> Edits:
    """Give the call that loads a part an argument; where the object loads its parts itself, give it another. None
    where such a call is not known, or has one."""
    *_, made = _chain(placed.bound.value)
    names = [ast.unparse(each.value) for each in made.keywords if each.arg == part]
    there = (each for each in ast.walk(_parse(placed.file)) if isinstance(each, ast.Assign))
    bound = [each for each in there if ast.unparse(each.targets[0]) in names] if names else [placed.bound]
    calls = [call for each in bound for call in _chain(each.value) if last_name(call.func) == "from_pretrained"]
    return _give([(placed.file, each) for each in calls], argument if names else of_whole) if len(calls) == 1 else ()


def _chain(call: ast.expr) -> Iterator[ast.Call]:
    """Yield a call, and those whose results' methods it calls: of `a(x).b().c()` that of c, of b and of a."""
    while isinstance(call, ast.Call):
        yield call
        if not isinstance(call.func, ast.Attribute):
            return
        call = call.func.value


def _find_moves(statement: ast.Assign | ast.Expr, name: str) -> Iterator[ast.Call]:
    """Yield the call by which a statement moves what has a name."""
    call = statement.value
    if isinstance(call, ast.Call) and _is_move(call) and ast.unparse(call.func).rpartition(".")[0] == name:
        yield call


def _is_move(call: ast.Call) -> bool:
    word = last_name(call.func) if isinstance(call.func, ast.Attribute) else ""
    given = [*call.args, *call.keywords]
    is_to = word == "to" and any(not _is_dtype(each) for each in given)
    return is_to or word == "cuda" or re.fullmatch(r"enable_\w+_offload", word) is not None


def _is_dtype(argument: ast.AST) -> bool:
    return re.search(r"^dtype=|\b(b?float\d+|half|dtype)$", ast.unparse(argument)) is not None


def _insert_after(file: str, statement: ast.stmt, code: str) -> SourceEdit:
    return _insert(file, (statement.end_lineno or 0) + 1, textwrap.indent(code, _indentation(file, statement)) + "\n")


# --- calls that run in place ------------------------------------------------------------------------------------------


def calls_in_place(file: str, calls: Mapping[tuple[int, str], bool]) -> Iterator[tuple[int, str]]:
    """Rewrite the statements of a file that call some functions to run in place. Returns the first line of each and its
    text, dedented, empty where the call cannot be found.

    `F.relu(x)` gets `inplace=True` where it takes that; else `torch.relu(x)` becomes `torch.relu_(x)`, and `x.relu()`
    becomes `x.relu_()`.

    Args:
        calls: the line, as a frame that calls the function gives it, and the last part of the function's name, to
            whether it takes `inplace=`.
    """
    tree = _parse(file)
    groups: dict[tuple[ast.stmt, ...], dict[tuple[int, str], bool]] = {}
    for (line, name), keyword in calls.items():
        groups.setdefault(_innermost(tree, line), {})[line, name] = keyword
    for statements, inside in groups.items():
        edits = _checked(
            _edit_call(file, call, keyword=keyword)
            for (line, name), keyword in inside.items()
            for call in _calls(statements, line, name)
        )
        if edits:
            yield statements[0].lineno, write_statement(edits)
        else:
            yield from ((line, "") for line, _ in inside)


def _calls(statements: tuple[ast.stmt, ...], line: int, name: str) -> list[ast.Call]:
    """Those that a frame's line can mean: Python gives the line where a call begins, or that of a method's name."""
    calls = (call for each in statements for call in _walk_calls(each, {name}))
    return [call for call in calls if line in (call.lineno, call.func.end_lineno)]


def _edit_call(file: str, call: ast.Call, *, keyword: bool) -> SourceEdit:
    path, function = os.path.realpath(file), call.func
    if keyword:
        return _give_value(file, call, "inplace=True")
    if not call.args:
        number, end = function.end_lineno or 0, function.end_col_offset or 0
        return SourceEdit(path, number, end, end, "_")
    return _replace(path, function, f"torch.{last_name(function)}_")


def _replace(path: str, node: ast.expr, text: str) -> SourceEdit:
    if node.lineno != node.end_lineno or node.end_col_offset is None:
        raise ValueError("an expression of several lines")
    return SourceEdit(path, node.lineno, node.col_offset, node.end_col_offset, text)


# --- where things are -------------------------------------------------------------------------------------------------


def _parse(file: str) -> ast.Module:
    """A file's statements; none where it cannot be read or parsed."""
    try:
        return ast.parse("".join(getlines(os.path.realpath(file))))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _innermost(tree: ast.Module, line: int) -> tuple[ast.stmt, ...]:
    """The statements without statements of their own that a line has a part of."""
    found = (
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    )
    return tuple(node for node in found if not any(isinstance(below, ast.stmt) for below in ast.iter_child_nodes(node)))


def _find_calls(file: str, names: Collection[str]) -> Iterator[ast.Call]:
    return _walk_calls(_parse(file), names)


def _walk_calls(tree: ast.AST, names: Collection[str]) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return (each for each in calls if last_name(each.func) in names)


def _indentation(file: str, statement: ast.stmt) -> str:
    line = getlines(os.path.realpath(file))[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _append_argument(file: str, call: ast.Call, argument: str) -> SourceEdit:
    path = os.path.realpath(file)
    number, end = call.end_lineno or 0, (call.end_col_offset or 1) - 1
    lines = [each.encode() for each in getlines(path)]
    before = lines[number - 1][:end].strip() or lines[number - 2].strip()
    return SourceEdit(path, number, end, end, argument if before.endswith((b",", b"(")) else f", {argument}")


def _insert(file: str, line: int, text: str) -> SourceEdit:
    return SourceEdit(os.path.realpath(file), line, 0, 0, text)


def _checked(edits: Iterable[SourceEdit]) -> Edits:
    """The edits, where what they make of their files is Python; else none."""
    try:
        found = tuple(edits)
        for text in apply_edits(found).values():
            ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    return found
