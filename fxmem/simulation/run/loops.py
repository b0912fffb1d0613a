"""The loops that a program's steps are in, and how many of its steps they still have.

A loop is known by its code: `for step in range(n)`, `for i, batch in enumerate(loader)`, `while step < most`,
`while True:` with `if step > most: break`. Where it stands is the value of what it counts with.
"""

from __future__ import annotations

import ast
import itertools
import math
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch.utils.data

from fxmem.simulation.code.source_lines import callers, last_name, user_frames, variables
from fxmem.simulation.code.source_trees import count_elements, find_body, find_number, find_value, read_tree
from fxmem.simulation.run.loader_watch import count_batches

_THROUGH: Final = frozenset("enumerate iter list prange reversed sorted tqdm track tuple".split())
"""What goes through as many elements as its first argument has."""
_Loops = ast.For | ast.AsyncFor | ast.While
_COMPARED: Final = 3
"""Rounds whose places in their loops are compared."""


class Loop(NamedTuple):
    """A loop around a step."""

    file: str
    first: int
    """Of the lines of its body."""
    last: int
    depth: int
    """How many calls of functions it is within."""
    turns: int | None = None
    """How often it runs; None where that is not known, or without end."""
    turn: int | None = None
    """How often it has run before this time."""
    limit: tuple[int, int] | None = None
    """A counter of the program's own, and what it is when the loop is left; None for none."""
    head: int = 0
    """The line of `for` or `while`."""


class LoopWatch:
    """Notes the loops around each step."""

    def __init__(self, frame: types.FrameType | None) -> None:
        self._outside = {id(each): each.f_lineno for each in callers(frame)}
        """By frame that called the program, its line: what is around that repeats the program."""
        self._rounds: deque[list[Loop]] = deque(maxlen=_COMPARED)
        self._stood: list[tuple[FrameMark, int]] = []
        """The marks of the frames around the last call of a model, and where each stood then."""
        self._gradients: tuple[FrameMark, int] | None = None
        """The frame of the loop around the last gradients, and where it stood then."""

    def note_gradients(self, frame: types.FrameType | None) -> None:
        """Gradients were returned in this frame: another pass of the innermost loop around it begins another step."""
        found = next((each for each in user_frames(frame) if any(self._own_loops(each))), None)
        self._gradients = None if found is None else (mark_frame(found), found.f_lasti)

    def has_passed(self, frame: types.FrameType | None) -> bool:
        """Whether that loop has begun another pass since: it stands no further than it did."""
        if self._gradients is None:
            return False
        mark, at = self._gradients
        return next((each.f_lasti <= at for each in callers(frame) if mark_frame(each) == mark), False)

    def find_passed(
        self, frame: types.FrameType | None, followed: FrameMark | None
    ) -> tuple[FrameMark, Sequence[Loop]] | None:
        """The outermost function that has begun another pass of a loop since it was last asked, by the mark of its
        frame, and the loops there; None where none has. It is to be asked in each call of a model.

        Args:
            frame: of the call.
            followed: the mark of the function whose loop is followed: while it runs, loops within do not count.
        """
        frames, stood = list_frames(frame), self._stood
        self._stood = [(mark_frame(each), each.f_lasti) for each in frames]
        pairs = zip(self._stood, stood, strict=False)
        same = [*itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs)]
        for depth, ((mark, at), (_, before)) in enumerate(same):
            is_in_same_call = at == before and depth + 1 < len(same)
            if at <= before and not is_in_same_call:
                return (mark, loops) if (loops := [*self._find_loops(frames[depth], depth)]) else None
            if mark == followed:
                return None
        return None

    def note_round(self, frame: types.FrameType | None) -> None:
        """A round ends in this frame."""
        frames = enumerate(list_frames(frame))
        self._rounds.append([loop for depth, each in frames for loop in self._find_loops(each, depth)])

    @property
    def loops(self) -> Sequence[Loop]:
        """Of the last round, the outermost first."""
        return self._rounds[-1] if self._rounds else ()

    def find_last(self, rounds: int, outer: int = 0) -> int | None:
        """The last round before these loops are over; None where that is not known.

        Args:
            rounds: that are over.
            outer: how many of the outermost loops are left out.
        """
        rounds_before = [each[outer:] for each in self._rounds if len(each) == len(self.loops)]
        loops = self.loops[outer:]
        ends = []
        for number, each in enumerate(loops):
            counters = [before[number].limit for before in rounds_before]
            if each.limit is not None and (per_round := _find_rate([counter and counter[0] for counter in counters])):
                now, most = each.limit
                ends.append(rounds + math.ceil(max(most - 1 - now, 0) / per_round))
        whole = math.prod(each.turns or 0 for each in loops)
        if loops and all(each.turns is not None for each in loops):
            places = [_find_place(each) for each in rounds_before]
            per_round = _find_rate(places)
            left = whole if places[-1] is None else max(whole - 1 - places[-1], 0)
            ends.append(rounds + int(left // per_round) if per_round else max(whole, rounds))
        return min(ends, default=None)

    def _find_loops(self, frame: types.FrameType, depth: int) -> Iterator[Loop]:
        code, line = frame.f_code, frame.f_lineno
        is_passing = code.co_name.startswith("<") and code.co_name not in ("<module>", "<lambda>")
        if is_passing and id(frame) not in self._outside:
            yield Loop(code.co_filename, line, line, depth, head=line)  # a comprehension
        around = [*self._own_loops(frame)]
        scope = {**frame.f_globals, **variables(frame)} if around else {}
        for number, node in enumerate(around, 1):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or line
            turns, turn, limit = _measure(node, scope)
            inner = {name for each in around[number:] for name in _targets(each)}  # `_` of both is the inner one's
            turn = turn if inner.isdisjoint(_targets(node)) else None
            yield Loop(code.co_filename, first, last, depth, turns, turn, limit, node.lineno)

    def _own_loops(self, frame: types.FrameType) -> Iterator[_Loops]:
        """Those in a frame's code, around where it stands, that are not around the program."""
        code, outside = frame.f_code, self._outside.get(id(frame))
        for node in _loops_around(find_body(read_tree(code.co_filename), code), frame.f_lineno):
            if outside is None or not node.body[0].lineno <= outside <= (node.body[-1].end_lineno or outside):
                yield node


def list_frames(frame: types.FrameType | None) -> list[types.FrameType]:
    """A frame and its callers outside torch and fxmem, the outermost first."""
    return [*user_frames(frame)][::-1]


Follow = Callable[[types.FrameType, str], None] | None
"""Told of each line of marked frames, and of their ends."""


class _Mark:
    """Tells one frame from another that has its place in memory later; traces nothing but for `trace_marked`."""

    follow: Follow = None

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> None:
        """See `sys.settrace`."""
        if _Mark.follow is not None:
            _Mark.follow(frame, event)


def trace_marked(follow: Follow) -> None:
    """Follow marked frames from here on, where Python traces; None: no longer."""
    _Mark.follow = None if follow is None else staticmethod(follow)


FrameMark = tuple[int, object]


def mark_frame(frame: types.FrameType) -> FrameMark:
    """What is of this frame alone. Where a debugger or a coverage tool has its own mark on all frames, it is only of
    those that run at the same time."""
    if frame.f_trace is None:
        frame.f_trace = _Mark()
    return id(frame), frame.f_trace


def _find_rate(numbers: Sequence[int | None]) -> float | None:
    """By how much numbers rise from one to the next, in the mean; None where they do not, or are not known."""
    known = [each for each in numbers if each is not None]
    more = [after - before for before, after in itertools.pairwise(known)]
    is_rising = len(known) == len(numbers) and min(more, default=-1) >= 0
    return (known[-1] - known[0]) / len(more) if is_rising and known[-1] > known[0] else None


def _find_place(loops: Sequence[Loop]) -> int | None:
    """How often the innermost of nested loops has run before; None where that is not known."""
    place = 0
    for each in loops:
        if each.turns is None or each.turn is None:
            return None
        place = place * each.turns + min(each.turn, each.turns)
    return place


def _loops_around(statements: Sequence[ast.stmt], line: int) -> Iterator[_Loops]:
    """The loops whose bodies have a line, the outermost first."""
    for each in statements:
        if not each.lineno <= line <= (each.end_lineno or each.lineno) or isinstance(
            each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            continue
        if isinstance(each, _Loops) and each.body[0].lineno <= line <= (each.body[-1].end_lineno or line):
            yield each
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _loops_around(getattr(each, name, []), line)


def _targets(node: _Loops) -> set[str]:
    """The variables that a loop gives values to."""
    return set() if isinstance(node, ast.While) else {last_name(each) for each in ast.walk(node.target)} - {""}


def _measure(node: _Loops, scope: Mapping[str, Any]) -> tuple[int | None, int | None, tuple[int, int] | None]:
    """How often a loop runs, how often it has before this time, and the counter that ends it."""
    limit = _find_limit(node, scope)
    if isinstance(node, ast.While):
        return None, None, limit
    index, count = _find_index(node.target, node.iter, scope), _count(node.iter, scope)
    if limit is not None and index is not None and limit[0] == index:  # it is left before it is over
        count, limit = limit[1] if count is None else min(count, limit[1]), None
    return count, index if count is None or index is None or 0 <= index < count else None, limit


def _count(node: ast.expr, scope: Mapping[str, Any]) -> int | None:
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        if name in ("range", "trange"):
            steps = _find_range(node.args, scope)
            return None if steps is None else len(steps)
        if name == "zip":
            counts = [count for each in node.args if (count := _count(each, scope)) is not None]
            return min(counts, default=None)
        if name == "islice" and (steps := _find_range(node.args[1:], scope)) is not None:
            whole = _count(node.args[0], scope)
            return len(steps) if whole is None else min(len(steps), whole)
        return _count(node.args[0], scope) if name in _THROUGH and node.args else None
    value = find_value(node, scope)
    if isinstance(value, torch.utils.data.DataLoader):
        return count_batches(value)
    return count_elements(value)


def _find_range(nodes: Sequence[ast.expr], scope: Mapping[str, Any]) -> range | None:
    """`range` of these arguments, which are those of `islice`, too; None where it is not known."""
    numbers = [number for each in nodes if (number := find_number(each, scope)) is not None]
    is_known = 1 <= len(nodes) == len(numbers) <= 3 and 0 not in numbers[2:]
    return range(*numbers) if is_known else None


def _find_index(target: ast.expr, node: ast.expr, scope: Mapping[str, Any]) -> int | None:
    """How many elements came before the one that a loop's variable has."""
    if not isinstance(node, ast.Call):
        return None
    name = last_name(node.func)
    if name == "enumerate" and isinstance(target, ast.Tuple):
        start = next((each.value for each in node.keywords if each.arg == "start"), None)
        start = node.args[1] if len(node.args) > 1 else start
        first, now = 0 if start is None else find_number(start, scope), find_number(target.elts[0], scope)
        return None if first is None or now is None else now - first
    if name in ("range", "trange"):
        steps, now = _find_range(node.args, scope), find_number(target, scope)
        return steps.index(now) if steps is not None and now is not None and now in steps else None
    return _find_index(target, node.args[0], scope) if name in _THROUGH and node.args else None


def _find_limit(node: _Loops, scope: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of `while step < most`, or the first `if step > most: break`, the counter and what it is when that ends; of
    `while left > 0` what is left, below zero."""
    tests: list[tuple[ast.expr, tuple[type[ast.cmpop], ...], tuple[type[ast.cmpop], ...]]]
    goes_on = _split(node.test, ast.And) if isinstance(node, ast.While) else []
    tests = [(each, (ast.Lt, ast.LtE, ast.NotEq, ast.Gt, ast.GtE), (ast.LtE, ast.GtE)) for each in goes_on]
    ends = [each.test for each in node.body if isinstance(each, ast.If) and _leaves(each)]
    tests += [(each, (ast.Gt, ast.GtE, ast.Eq), (ast.Gt,)) for end in ends for each in _split(end, ast.Or)]
    for test, kinds, more in tests:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], kinds):
            now, most = find_number(test.left, scope), find_number(test.comparators[0], scope)
            if now is not None and most is not None:
                if test in goes_on and isinstance(test.ops[0], (ast.Gt, ast.GtE)):  # it counts down
                    now, most = -now, -most
                if now <= most:
                    return now, most + isinstance(test.ops[0], more)
    return None


def _split(test: ast.expr, by: type[ast.boolop]) -> Sequence[ast.expr]:
    """The conditions that a test has, of which all must hold, or one."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, by) else [test]


def _leaves(node: ast.If) -> bool:
    exits = (each.value for each in node.body if isinstance(each, ast.Expr))
    is_exit = any(isinstance(each, ast.Call) and last_name(each.func) in ("exit", "_exit", "quit") for each in exits)
    return is_exit or any(isinstance(each, (ast.Break, ast.Return)) for each in node.body)
