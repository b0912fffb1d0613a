"""Branches that a program would take much later, taken once where its recorded steps end.

The condition is not changed: where the program comes to it, its frame goes on at the first line of the branch
(`frame.f_lineno`, which a trace function may set), with the program's own variables as they are then. Up to Python 3.12
what a trace function finds in `f_locals` is written back after it, so that nothing there may be emptied meanwhile.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.records.parts import Schedule
from fxmem.records.units import package_path
from fxmem.simulation.code.source_lines import is_own_file, last_name, program_frames, program_place, variables
from fxmem.simulation.code.source_trees import find_body, read_tree
from fxmem.simulation.run.loops import FrameMark, mark_frame, trace_marked
from fxmem.simulation.run.schedules import (
    asked_lines,
    branch_lines,
    comes,
    describe_branch,
    find_counters,
    find_exit,
    find_trainers,
    list_conditions,
)

_EVERY: Final = "_every_n_train_steps"
_LEAVES: Final = (ast.Raise, ast.Break, ast.Return, ast.Continue)
_CHANGE_NOTHING: Final = frozenset("debug info log print set_description set_postfix warning write".split())
"""Calls that change nothing of what is trained."""
_END: Final = frozenset("_exit exit quit".split())


class Branches:
    """Takes branches of one program: those that save, that call a model, or that change how it trains."""

    def __init__(self) -> None:
        self.saving: Callable[[str], contextlib.AbstractContextManager[None]] = lambda place: contextlib.nullcontext()
        """Around a branch that saves, with the place where it does."""
        self.taken: dict[str, Schedule] = {}
        """By place of the condition."""
        self.is_on = False
        """Whether they are taken."""
        self.is_leaving = self.has_raised = False
        """Whether the loops around the steps are left, and whether what follows the steps ended with an error."""
        self.may_leave: Callable[[], bool] = lambda: True
        """Asked before one is."""
        self._steps: dict[FrameMark, int] = {}
        """By frame around the steps, its line then."""
        self.within: tuple[types.FrameType, range] | None = None
        """The frame of the branch that runs, and its lines."""
        self.saved: set[str] = set()
        """The lines of the program's own functions that were running while it saved."""
        self._stack, self._patches = contextlib.ExitStack(), contextlib.ExitStack()
        self._ran: Collection[str] = ()
        """The lines that ran in recorded steps."""
        self._tracer: Any = None

    def begin(self, frame: types.FrameType | None, ran: Collection[str]) -> bool:
        """Take each branch that the program comes to from here on; whether there may be one.

        Args:
            frame: in which its steps end.
            ran: the lines that ran in recorded steps.
        """
        self._ran = ran
        own, libraries = program_frames(frame)
        place = program_place(frame)
        callbacks = [each for one in find_trainers(libraries) for each in getattr(one, "callbacks", ())]
        for each in callbacks:  # Lightning's `ModelCheckpoint` (2.6), which saves by the number of a batch
            if (every := getattr(each, _EVERY, 0)) > 1 and place not in self.saved:
                self.taken[place] = Schedule(place=place, every=every, saves=place, ran=True)
                self._patches.enter_context(torch_common.replace(each, _EVERY, 1))
        may_save = any(_names_saving(each.f_code) for each in libraries) or any(map(self._list_due, own))
        if not (may_save or self.taken):
            return False
        self._begin_tracing(own)
        return True

    def leave(self, frame: types.FrameType | None) -> bool:
        """Leave the loops around a frame, so that what follows them runs; whether they can be."""
        own, libraries = program_frames(frame)
        trainers = find_trainers(libraries)
        steps = {each: each.f_lineno for each in own}
        bodies = ((find_body(read_tree(each.f_code.co_filename), each.f_code), line) for each, line in steps.items())
        if not trainers and not any(find_exit(body, line, line) for body, line in bodies):
            return False
        for each in trainers:  # this was its last step
            if hasattr(each, "should_stop"):
                each.should_stop = True
            else:
                each.control.should_training_stop = True
        self._steps, self.is_leaving = {mark_frame(each): line for each, line in steps.items()}, True
        self._begin_tracing(own)
        return True

    def _begin_tracing(self, frames: Sequence[types.FrameType]) -> None:
        for each in frames:
            mark_frame(each)
        if not self.is_on:
            self.is_on, self._tracer = True, sys.gettrace()
            trace_marked(self._trace)
            sys.settrace(self._call)

    def end(self) -> None:
        """Take no further one."""
        if self.is_on:
            self.is_on = False
            self._steps.clear()
            sys.settrace(self._tracer)
            trace_marked(None)
            self._patches.close()
            for each in program_frames(sys._getframe(1))[0]:
                variables(each)  # up to Python 3.12 a frame that was traced keeps what it had

    @contextlib.contextmanager
    def save(self) -> Iterator[None]:
        """The program saves inside."""
        own, _ = program_frames(sys._getframe(1))
        lines = [f"{package_path(each.f_code.co_filename)}:{each.f_lineno}" for each in own]
        self.saved.update(lines)
        with self.saving(lines[0] if lines else ""):
            yield

    def _call(self, frame: types.FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        is_asked = is_own_file(code.co_filename) or _names_saving(code)
        if is_asked and not code.co_name.startswith("<") and list_conditions(code):
            mark_frame(frame)
            return frame.f_trace
        return None

    def _trace(self, frame: types.FrameType, event: str) -> None:
        lines = self.within[1] if self.within is not None and self.within[0] is frame else None
        if lines is not None and (event == "return" or frame.f_lineno not in lines):
            self._leave()
        if event == "line" and self.within is None and self.is_on:
            step = self._steps.get(mark_frame(frame))
            body = () if step is None else find_body(read_tree(frame.f_code.co_filename), frame.f_code)
            target = find_exit(body, frame.f_lineno, step) if step else None
            if target is not None and self.may_leave():
                _go_to(frame, target.lineno)
                return
            for condition, found in self._list_due(frame, frame.f_lineno)[:1]:
                self._take(frame, condition, found)

    def _list_due(self, frame: types.FrameType, line: int = 0) -> list[tuple[ast.If, Schedule]]:
        """The branches of a frame's code that are worth it, and have not run; of one line alone if that is given."""
        conditions = [each for each in list_conditions(frame.f_code) if not line or line in asked_lines(each)]
        if not conditions:
            return []
        scope = {**frame.f_globals, **(dict(frame.f_locals) if line else variables(frame))}
        counters, due = find_counters(read_tree(frame.f_code.co_filename)), []
        for each in conditions:
            found = _describe(each, frame, scope)
            lines = branch_lines(each, frame.f_code)
            if is_own_file(frame.f_code.co_filename):
                lines.append(found.calls)
            is_new = found.saves not in self.saved and not {found.place, *lines} & {*self.taken, *self._ran}
            if is_new and _is_worth_it(each, found, frame.f_code) and comes(each.test, scope, counters):
                due.append((each, found.model_copy(update={"ran": True})))
        return due

    def _take(self, frame: types.FrameType, condition: ast.If, found: Schedule) -> None:
        first, last = condition.body[0], condition.body[-1]
        self.taken[found.place] = found
        if found.saves and is_own_file(frame.f_code.co_filename):
            self._stack.enter_context(self.saving(found.place))
        if first.lineno > (condition.test.end_lineno or 0):
            self.within = frame, range(first.lineno, (last.end_lineno or first.lineno) + 1)
            _go_to(frame, first.lineno)
            return
        self.within = frame, range(0)
        try:
            _run_line(frame, condition.body)
        finally:
            self._leave()

    def _leave(self) -> None:
        self.within = None
        self._stack.close()


def _describe(condition: ast.If, frame: types.FrameType, scope: Mapping[str, Any]) -> Schedule:
    """As `describe_branch`; where a trainer asks whether it is time to, the work is the program's call of it."""
    found = describe_branch(condition, frame, scope)
    if is_own_file(frame.f_code.co_filename):
        return found
    place, nodes = program_place(frame), [node for each in condition.body for node in ast.walk(each)]
    stores = {last_name(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)}
    saves = place if any("save" in each for each in stores) else ""
    return found.model_copy(update={"saves": saves, "calls": place if "should_evaluate" in stores else ""})


def _go_to(frame: types.FrameType, line: int) -> None:
    """Go on at another line. Python warns that variables without a value get None then."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        frame.f_lineno = line  # type: ignore[misc] # typeshed has it as read-only


def _run_line(frame: types.FrameType, statements: list[ast.stmt]) -> None:
    """Run the branch of `if x: y()`, whose line a frame cannot tell from the condition's."""
    scope = {**frame.f_globals, **frame.f_locals}
    before = dict(scope)
    exec(compile(ast.Module(statements, []), frame.f_code.co_filename, "exec"), scope)
    changed = {name: value for name, value in scope.items() if name not in before or before[name] is not value}
    frame.f_locals.update({name: value for name, value in changed.items() if name != "__builtins__"})


def _is_worth_it(condition: ast.If, found: Schedule, code: types.CodeType) -> bool:
    """Whether a branch saves, calls a model, or is taken once and changes how the program trains."""
    nodes = [node for each in condition.body for node in ast.walk(each)]
    if not is_own_file(code.co_filename):
        return bool(found.calls or found.saves)
    leaves = {type(each) for each in nodes if isinstance(each, _LEAVES)}
    if found.calls or found.saves:
        return ast.Raise not in leaves
    calls = {last_name(each.func) for each in nodes if isinstance(each, ast.Call)}
    asked = {last_name(each) for each in ast.walk(condition.test)} - {""}
    keys = (each.slice for each in nodes if isinstance(each, ast.Subscript))
    looks_up = any(last_name(each) in asked for key in keys for each in ast.walk(key))  # what another count has not
    is_safe = not (leaves or calls & _END or looks_up)
    return found.at is not None and is_safe and any(map(_changes_something, condition.body))


def _changes_something(statement: ast.stmt) -> bool:
    """Whether a statement is more than a message."""
    match statement:
        case ast.Expr(value=ast.Call(func=called)):
            return last_name(called) not in _CHANGE_NOTHING
    return not isinstance(statement, (ast.Pass, ast.Expr))


@functools.lru_cache(maxsize=8192)
def _names_saving(code: types.CodeType) -> bool:
    """Whether a function of a library names something that saves."""
    return any("save" in each for each in (code.co_name, *code.co_names))
