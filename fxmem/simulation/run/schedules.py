"""What a program does later than in the few steps that are recorded: every so many of them, or after its loop."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from torch import nn

from fxmem.records.parts import Schedule
from fxmem.records.units import package_path
from fxmem.simulation.code.source_lines import is_own_code, last_name, program_frames, variables
from fxmem.simulation.code.source_trees import find_body, find_number, find_value, read_tree

_Scope = Mapping[str, Any]
_Position = tuple[int, int]
"""Line, from 1, and column, from 0, of a file."""
_SAVES: Final = frozenset(
    "async_save save_16bit_model save_checkpoint save_file save_lora_weights save_model save_pretrained save_state "
    "save_state_dict save_weights write_checkpoint".split()
)
"""What saves by its name alone, whatever has it."""
_NOT_OF_MODELS: Final = frozenset("PIL imageio matplotlib numpy pandas scipy wandb".split())
"""Packages whose `save` is of no model."""


def find_schedules(frame: types.FrameType | None) -> Iterator[tuple[Schedule, str, Any, list[str]]]:
    """The conditions `if step % 1000 == 0:`, or `if not step % 1000:`, of a frame and its callers, each with what is
    divided, its value, and the lines of its branch.

    Assumes that what is divided counts steps. A divisor that only the program's own code could tell is left out.
    """
    for each in program_frames(frame)[0]:
        scope = _scope(each)
        for condition in list_conditions(each.f_code):
            found = describe_branch(condition, each, scope)
            if found.every is not None:
                names = [n for counter, _ in divide(condition.test) for n in ast.walk(counter) if _is_named(n)]
                value = find_value(names[0], scope) if names else None
                named = ast.unparse(names[0]) if names else ""
                yield found, named, value if type(value) is int else None, branch_lines(condition, each.f_code)


def branch_lines(condition: ast.If, code: types.CodeType) -> list[str]:
    """The lines of a condition's branch, as reports name them."""
    name, branch = package_path(code.co_filename), condition.body
    return [f"{name}:{line}" for line in range(branch[0].lineno, (branch[-1].end_lineno or 0) + 1)]


def describe_branch(condition: ast.If, frame: types.FrameType, scope: _Scope) -> Schedule:
    """Where a condition stands, when it holds, and what its branch calls and saves."""
    file = frame.f_code.co_filename
    calls, saves = _find_work(condition.body, scope, file, line=frame.f_lineno)
    every = [value for _, each in divide(condition.test) if type(value := find_value(each, scope)) is int and value > 0]
    about: dict[str, Any] = {"every": every[0] if every else None}
    for counter, number in count_up(condition.test, find_counters(read_tree(file))) if not every else ():
        about |= {"at": find_number(number, scope), "counter": ast.unparse(counter)}
    return Schedule(place=f"{package_path(file)}:{condition.lineno}", calls=calls, saves=saves, **about)


def _is_named(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, (ast.Name, ast.Attribute))


def find_following(frame: types.FrameType | None) -> tuple[Schedule, ...]:
    """The statements that call a model and come after the loop around a frame, in its own function and its callers'.

    The loop is a trainer's, or the innermost one of the innermost function that has one. Followed are calls of the
    program's own functions, as far as names and attributes tell what is called.
    """
    found: dict[str, Schedule] = {}
    own, libraries = program_frames(frame)
    is_in_loop = bool(find_trainers(libraries))
    for each in own:
        file, scope = each.f_code.co_filename, _scope(each)
        line, _, column, _ = list(each.f_code.co_positions())[each.f_lasti // 2]
        body = find_body(read_tree(file), each.f_code)
        if line is None or column is None:
            continue
        later, has_loop = _find_later(body, (line, column), is_in_loop=is_in_loop)
        is_in_loop = is_in_loop or has_loop
        for statement in later if is_in_loop else ():
            calls, saves = _find_work([statement], scope, file, line=line)
            if calls or saves:
                place = f"{package_path(file)}:{statement.lineno}"
                found.setdefault(calls or saves, Schedule(place=place, every=None, calls=calls, saves=saves))
    return tuple(found.values())


def find_trainers(frames: Iterable[types.FrameType]) -> list[Any]:
    """The trainers whose methods the frames run: transformers', Lightning's."""
    owners = [variables(each).get("self") for each in frames]
    trainers = [each for each in owners if any(one.__name__ == "Trainer" for one in type(each).__mro__)]
    return [each for each in trainers if hasattr(each, "should_stop") or hasattr(each, "control")]


def find_exit(statements: Sequence[ast.stmt], line: int, step: int, after: ast.stmt | None = None) -> ast.stmt | None:
    """What comes after the innermost loop that two lines are in; None where nothing does, or it would not be left
    cleanly, as out of a `with`.

    Args:
        statements: of a block.
        line: where a frame stands: at the loop's head, or before the other line.
        step: the line that is not to run again.
        after: what comes after the block.
    """
    for number, each in enumerate(statements):
        if not each.lineno <= step <= (each.end_lineno or 0):
            continue
        following = statements[number + 1] if number + 1 < len(statements) else after
        if isinstance(each, (ast.For, ast.While)):
            inner = find_exit(each.body, line, step, following)
            is_guarded = any(isinstance(node, _GUARDS) and node.lineno <= line for node in _around(each.body, step))
            return inner or (following if each.lineno <= line <= step and not is_guarded else None)
        if isinstance(each, ast.If):
            is_in_body = _holds(each.body, (step, 0), (step, 1 << 20))
            return find_exit(each.body if is_in_body else each.orelse, line, step, following)
        return find_exit(each.body, line, step) if isinstance(each, (ast.With, ast.Try)) else None
    return None


_GUARDS: Final = (ast.With, ast.AsyncWith, ast.Try)


def _around(statements: Sequence[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements that a line is in."""
    nodes = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.stmt))
    return (each for each in nodes if each.lineno <= line <= (each.end_lineno or 0))


def _scope(frame: types.FrameType) -> _Scope:
    return {**frame.f_globals, **variables(frame)}


def list_conditions(code: types.CodeType) -> list[ast.If]:
    """The conditions in a function that depend on a count: in which something is divided, or compared with a number
    that it may come to."""
    return _list_conditions(code, code.co_filename)


@functools.lru_cache(maxsize=1024)
def _list_conditions(code: types.CodeType, file: str) -> list[ast.If]:
    lines = {line for *_, line in code.co_lines()}  # of equal code of two files, each has its own
    return [each for each in _find_conditions(read_tree(file)) if not lines.isdisjoint(asked_lines(each))]


def asked_lines(condition: ast.If) -> range:
    """The lines of what is asked; with parentheses the first may have none of it."""
    return range(condition.lineno, (condition.test.end_lineno or condition.lineno) + 1)


@functools.lru_cache(maxsize=64)
def _find_conditions(tree: ast.Module) -> list[ast.If]:
    """As `list_conditions`, of a file: once for all rounds that ask."""
    counters = find_counters(tree)
    conditions = [each for each in ast.walk(tree) if isinstance(each, ast.If)]
    return [each for each in conditions if any(divide(each.test)) or any(count_up(each.test, counters))]


@functools.lru_cache(maxsize=64)
def find_counters(tree: ast.Module) -> frozenset[str]:
    """The names and attributes of a file that count: loops go through them, or something is added to them."""
    nodes = [*ast.walk(tree)]
    targets = [each.target for each in nodes if isinstance(each, (ast.For, ast.AsyncFor))]
    targets += [each.target for each in nodes if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add)]
    return frozenset(last_name(one) for each in targets for one in ast.walk(each) if _is_named(one))


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
                blocks = [block for block in blocks if block and _holds(block, at, at)]
            for block in blocks:
                later, is_in_loop = _find_later(block, at, is_in_loop=is_in_loop)
                found += later
            if isinstance(each, (ast.For, ast.AsyncFor, ast.While)) and not is_in_loop:
                found, is_in_loop = list(each.orelse), True
    return found, is_in_loop


def _holds(block: Sequence[ast.stmt], first: _Position, last: _Position) -> bool:
    begin, end = block[0], block[-1]
    return (begin.lineno, begin.col_offset) <= last and first <= (end.end_lineno or 0, end.end_col_offset or 0)


def _find_work(
    statements: Iterable[ast.stmt],
    scope: _Scope,
    file: str,
    seen: set[types.FunctionType] | None = None,
    *,
    line: int = 0,
) -> tuple[str, str]:
    """`file:line` of the first call of a module with parameters, and of the first that saves, in functions of the
    program's own, too; each may be empty.

    `line` is where the function that has the statements runs; 0: it does not run yet."""
    seen = set() if seen is None else seen
    calls = saves = ""
    fixed = _find_fixed(read_tree(file), line)
    for call in (each for one in statements for each in _walk(one, scope, fixed) if isinstance(each, ast.Call)):
        called, place = find_value(call.func, scope), f"{package_path(file)}:{call.lineno}"
        owner = find_value(call.func.value, scope) if isinstance(call.func, ast.Attribute) else None
        is_model = isinstance(called, nn.Module) and any(True for _ in nn.Module.parameters(called))
        is_generating = isinstance(owner, nn.Module) and last_name(call.func) == "generate"
        calls = calls or (place if is_model or is_generating else "")
        saves = saves or (place if _is_save(call, called) else "")
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
            inner = _find_work(find_body(read_tree(code.co_filename), code), within, code.co_filename, seen)
            calls, saves = calls or inner[0], saves or inner[1]
    return calls, saves


def _is_save(call: ast.Call, called: Any) -> bool:
    """Whether a call saves what is on the card: `torch.save`, `save_pretrained`, `accelerator.save_state`."""
    name = last_name(call.func)
    if name in _SAVES:
        return True
    root = str(getattr(called, "__module__", "")).partition(".")[0]
    return name == "save" and called is not None and root not in _NOT_OF_MODELS and not is_own_code(called)


@functools.lru_cache(maxsize=64)
def _find_fixed(tree: ast.Module, line: int) -> Callable[[str], bool]:
    """Whether a file writes to a name, or an attribute, once at most: its value is then what it stays.

    What the function that runs at a line has assigned before it, outside of its loops, is over: `parser =
    parser.parse_args()`.
    """
    written: Counter[str] = Counter()
    around = [each for each in _around(tree.body, line) if isinstance(each, ast.FunctionDef)]
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


def divide(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a condition divides, and by what, where it asks for the rest."""
    match test:
        case ast.BoolOp(values=values):
            for each in values:
                yield from divide(each)
        case (
            ast.Compare(
                left=ast.BinOp(left=counter, op=ast.Mod(), right=divisor), ops=[ast.Eq()], comparators=[ast.Constant()]
            )
            | ast.UnaryOp(op=ast.Not(), operand=ast.BinOp(left=counter, op=ast.Mod(), right=divisor))
        ):
            yield counter, divisor


def count_up(test: ast.expr, counters: frozenset[str]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is compared with a number that it may come to, and that number."""
    match test:
        case ast.BoolOp(values=values):
            for each in values:
                yield from count_up(each, counters)
        case ast.Compare(left=counter, ops=[ast.Eq() | ast.GtE() | ast.Gt()], comparators=[number]):
            names = [{last_name(each) for each in ast.walk(side) if _is_named(each)} for side in (counter, number)]
            is_rest = any(isinstance(each, ast.Mod) for each in ast.walk(counter))
            if names[0] & counters and not names[1] & counters and not is_rest:
                yield counter, number


def comes(test: ast.expr, scope: _Scope, counters: frozenset[str]) -> bool | None:
    """Whether a condition holds when what it counts has gone on; None where it has none of that, and holds or not as it
    does now. What else it says is asked as the program would.

    Args:
        test: the condition.
        scope: the variables where it stands.
        counters: as of `find_counters`.
    """
    if isinstance(test, ast.BoolOp):
        parts = [comes(each, scope, counters) for each in test.values]
        if all(each is None for each in parts):
            return None
        known = [is_true(node, scope) if each is None else each for node, each in zip(test.values, parts, strict=True)]
        return all(known) if isinstance(test.op, ast.And) else any(known)
    if any(divide(test)):
        return all(type(every) is int and every > 0 for _, each in divide(test) for every in [find_value(each, scope)])
    for counter, number in count_up(test, counters):
        now, most = find_number(counter, scope), find_number(number, scope)
        is_at = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)
        return now is not None and most is not None and (now <= most or not is_at)
    is_counter = _is_named(test) and last_name(test) in counters
    return True if is_counter else None


def is_true(test: ast.expr, scope: _Scope) -> bool:
    """Whether a condition holds now, that asks no more than what the program is: one that may do something is taken for
    one that does not hold."""
    calls = [each for each in ast.walk(test) if isinstance(each, (ast.Call, ast.NamedExpr, ast.Await))]
    if not all(isinstance(each, ast.Call) and _only_asks(each) for each in calls):
        return False
    try:
        return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), dict(scope)))
    except Exception:  # the program's own code, of which nothing is known
        return False


def _only_asks(call: ast.Call) -> bool:
    name = last_name(call.func)
    return name in ("isinstance", "len", "hasattr") or (not call.args and name.startswith(("is_", "get_", "has_")))
