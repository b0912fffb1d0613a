"""Which of the lines that a call comes from is the user's own: the innermost outside torch and fxmem."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dis
import functools
import inspect
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

import fxmem
from fxmem._torch.compiler.inductor import OWN_FILES
from fxmem.records.profile import SourceLine
from fxmem.records.units import package_path

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(fxmem.__file__) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_STARTERS = tuple(
    _HERE + os.path.join("simulation", *path) for path in (("step", "step.py"), ("program", "launcher.py"))
)
"""Files that start a step or a program: beyond them is the caller of the analysis."""
_ENGINE: Final = _HERE + os.path.join("simulation", "recording", "observe", "autograd_engine.py")
_NOT_THE_USERS = (_TORCH, _HERE, contextlib.__file__, functools.__file__, OWN_FILES)

_NOT_CALLED = (_HERE, contextlib.__file__, functools.__file__, _TORCH + "utils" + os.sep + "_contextlib.py")
"""What stands between a line and the function that it calls."""

_WRAPPERS = ("wrapper", "inner", "handle_torch_function")
"""How the names of functions end that are around the one that was called."""

_NOT_BY_NAME = tuple(_TORCH + name for name in ("_subclasses", "_prims", "_refs", "_meta", "_ops", "_decomp"))
"""What runs in the place of operators while tensors have no values: no program calls it by its name."""

_CHECKING = tuple(
    _TORCH + name for name in ("functional.py", "nn" + os.sep, "distributions" + os.sep, "testing" + os.sep)
)


_NOT_AN_OPTIMIZERS = (_HERE, _TORCH + "_tensor.py", _TORCH + "utils" + os.sep)
"""What stands between an optimizer's own code and an operator."""


def calling_line() -> SourceLine | None:
    """The user's line that the caller runs for; None where there is none."""
    return _find_line(user_frame(sys._getframe(2)))


def calling_lines() -> tuple[SourceLine | None, SourceLine | None]:
    """The same, and where that is an installed package's, the program's own line that leads to it."""
    frame = user_frame(sys._getframe(2))
    own = _own_frame(frame)
    return _find_line(frame), None if own is frame else _find_line(own)


def _find_line(frame: types.FrameType | None) -> SourceLine | None:
    return None if frame is None else user_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _own_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost of a frame of the user's and its callers in no installed package; None where all are."""
    while frame is not None and _is_installed(frame.f_code.co_filename):
        frame = user_frame(frame.f_back)
    return frame


def user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost of a frame and its callers that is the user's own code; None where none is."""
    while frame is not None:
        if frame.f_code.co_filename in _STARTERS:
            return None
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return frame
        frame = frame.f_back
    return None


def program_place(frame: types.FrameType | None) -> str:
    """Find `file:line` of the program's own code, where its author looks first.

    The innermost of a frame and its callers in no installed package; in one where there is no other; empty where all is
    torch's or ours.
    """
    found = user_frame(frame)
    shown = _own_frame(found) or found
    if shown is None or shown.f_code.co_filename.startswith("<frozen"):
        return ""
    return f"{package_path(shown.f_code.co_filename)}:{shown.f_lineno}"


def called_place(frame: types.FrameType | None) -> str:
    """As `program_place`, within what backward calls, a hook or the backward of a Function; empty outside of these."""
    while frame is not None and frame.f_code.co_filename != _ENGINE:
        if is_own_file(file := frame.f_code.co_filename):
            return f"{package_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def program_call(frame: types.FrameType | None) -> tuple[str, str]:
    """As `program_place`, and what that line has called: the function of a library, not of Python's own; or empty."""
    place, called = program_place(frame), ""
    while frame is not None and frame.f_code.co_filename not in _STARTERS:
        file = frame.f_code.co_filename
        is_pythons = file.startswith(_STANDARD) and "site-packages" not in file
        if not file.startswith((*_NOT_CALLED, "<")) and not is_pythons:
            if not _is_installed(file) and not file.startswith(_TORCH):
                return place, called
            name = frame.f_code.co_qualname.removesuffix(".__init__").rpartition(".")[2]
            is_inner = name.startswith("_") or name.endswith(_WRAPPERS) or file.startswith(_NOT_BY_NAME)
            called = "" if name == "__next__" else called if is_inner else name  # a `for` names nothing
        frame = frame.f_back
    return place, ""


def program_frames(frame: types.FrameType | None) -> tuple[list[types.FrameType], list[types.FrameType]]:
    """A frame and its callers, innermost first: those of the program's own code, and those of libraries' that it runs.

    torch's and ours are neither. Of a program that is itself installed, all are libraries'.
    """
    found: list[types.FrameType] = []
    while (frame := user_frame(frame)) is not None:
        found.append(frame)
        frame = frame.f_back
    own = [each for each in found if not _is_installed(each.f_code.co_filename)]
    last = found.index(own[-1]) if own else len(found)
    return own, [each for each in found[:last] if _is_installed(each.f_code.co_filename)]


def is_own_code(function: Any) -> bool:
    """Whether a function, a method, or an object that is called is the program's own."""
    called = inspect.unwrap(getattr(function, "func", function))
    code = getattr(getattr(called, "__func__", called), "__code__", None) or getattr(
        type(called).__call__, "__code__", None
    )
    return code is not None and is_own_file(code.co_filename)


def exact_types_place(frame: types.FrameType | None) -> str:
    """Find where the program's own code wants a number of exactly one type: `type(x) is float`.

    Only files of a frame and its callers are read; empty where none does.
    """
    own = user_frame(frame)
    while own is not None:
        file = own.f_code.co_filename
        if not _is_installed(file) and (line := _exact_types_line(file)):
            return f"{package_path(file)}:{line}"
        own = user_frame(own.f_back)
    return ""


@functools.cache
def _exact_types_line(file: str) -> int:
    """The first line that compares `type(x)` with a type of numbers; 0 where none does."""
    text = "".join(linecache.getlines(file))
    if "type(" not in text:
        return 0
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                inner = [*ast.walk(node.left), *(part for each in node.comparators for part in ast.walk(each))]
                names = {part.id for part in inner if isinstance(part, ast.Name)}
                if "type" in names and names & {"float", "int"}:
                    return node.lineno
    return 0


def walk_error(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """The frames that an error came through, the innermost last, and the line in each.

    An interrupt may come where Python has no line, as at the end of a `with`; there it is the function's first.
    """
    found: Iterator[tuple[types.FrameType, int | None]] = traceback.walk_tb(error.__traceback__)
    return ((frame, frame.f_code.co_firstlineno if line is None else line) for frame, line in found)


def error_place(error: BaseException) -> str:
    """Find `file:line` of the program's own code that an error came from."""
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_error(error))
    return ["", *(f"{package_path(file)}:{line}" for file, line in frames if is_own_file(file))][-1]


@functools.cache
def is_own_file(file: str) -> bool:
    """Whether a file is the program's own: neither installed, nor torch's or ours."""
    return not file.startswith(_NOT_THE_USERS) and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    return package_path(file) != file or file.startswith(("<", _STANDARD))


def checking_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost of a frame and its callers that may check a tensor's values: the user's code, or the functions,
    layers and distributions that torch itself writes in Python."""
    own = user_frame(frame)
    while frame is not own and frame is not None:
        if frame.f_code.co_filename.startswith(_CHECKING):
            return frame
        frame = frame.f_back
    return own


def variables(frame: types.FrameType) -> dict[str, Any]:
    """The local variables of a frame, in a dictionary of the caller's.

    Up to Python 3.12 a frame keeps the one that `f_locals` answers with, and with it what the program has dropped since
    then. It is left as the program's last `locals()` made it: emptied, where there was none.
    """
    before = _last_locals(frame)
    kept = frame.f_locals
    found = dict(kept)
    is_kept = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(kept) is dict
    if is_kept and (before or sys.getrefcount(kept) <= _KEPT_BY_FRAME):
        kept.clear()
        kept.update(before)
    return found


def _last_locals(frame: types.FrameType) -> dict[str, Any]:
    """What a frame keeps of its last `locals()`, where it may have called that: `f_locals` would write over it.

    In CPython, `frame->f_frame->f_locals` of `PyFrameObject` and `_PyInterpreterFrame` (pycore_frame.h).
    """
    place = _PLACE_OF_LOCALS.get(sys.version_info[:2])
    if place is None or "locals" not in frame.f_code.co_names:
        return {}
    inner = ctypes.c_void_p.from_address(id(frame) + 3 * _POINTER).value or 0
    kept = ctypes.c_void_p.from_address(inner + place * _POINTER)
    return dict(ctypes.cast(kept, ctypes.py_object).value) if kept.value else {}


_POINTER: Final = ctypes.sizeof(ctypes.c_void_p)
_PLACE_OF_LOCALS: Final = {(3, 11): 3, (3, 12): 5}
"""The pointers before it."""


@functools.cache
def loop_variables(code: types.CodeType) -> frozenset[str]:
    """The local variables that a function's `for` loops go through."""
    found: set[str] = set()
    is_bound = False
    for each in dis.get_instructions(code):
        is_bound = each.opname == "FOR_ITER" or (is_bound and each.opname.startswith(("STORE_FAST", "UNPACK")))
        if is_bound and each.opname.startswith("STORE_FAST"):
            found.update(each.argval if isinstance(each.argval, tuple) else (each.argval,))
    return frozenset(found)


def set_variable(frame: types.FrameType, name: str, value: Any) -> None:
    """Give a local variable of a running frame another value.

    From Python 3.13 on `f_locals` writes through (PEP 667). Before, `PyFrame_LocalsToFast` of CPython does it for the
    whole dictionary; what the frame has not assigned yet stays so.
    """
    kept = frame.f_locals
    kept[name] = value
    if type(kept) is dict:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        del kept
        variables(frame)  # empties what the frame keeps


_KEPT_BY_FRAME = 3
"""References to that dictionary where nobody else has it: the frame's, ours, and the question's."""


def optimizer_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame of an optimizer's own method that asks: the innermost outside fxmem. None for another."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_AN_OPTIMIZERS):
        frame = frame.f_back
    return frame if frame is not None and isinstance(variables(frame).get("self"), torch.optim.Optimizer) else None


def is_stepping(frame: types.FrameType | None) -> bool:
    """Whether a frame runs within an optimizer's step, which may itself be within backward."""
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(variables(frame).get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(100_000)
def user_line(file: str, line: int, function: str) -> SourceLine:
    """The record of a line, its text read once."""
    return SourceLine(file=file, line=line, function=function, code=linecache.getline(file, line).strip())


def forget_lines(file: str) -> None:
    """Forget the text of a file that another may have the name of: a script is known by the name that it was given."""
    linecache.checkcache(file)
    user_line.cache_clear()
    _exact_types_line.cache_clear()


def innermost_user_line(error: BaseException) -> SourceLine | None:
    """Where in the user's own code (neither torch's nor ours) an error came from."""
    found = None
    for frame, line in walk_error(error):
        code = frame.f_code
        if not code.co_filename.startswith((*_NOT_THE_USERS, "<")):
            found = user_line(code.co_filename, line, code.co_name)
    return found


def describe_place(error: BaseException) -> str:
    """`innermost_user_line` in words, for the end of a sentence; empty for none."""
    where = innermost_user_line(error)
    return "" if where is None else f" at {where.file}:{where.line} in {where.function}: `{where.code}`"


def last_name(node: ast.AST) -> str:
    """`preds` of `self.preds[-1]`; empty for what has no name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# --- the modules that are loaded: those of the program's own, and who has a function under some name ------------------
# There are thousands, most of them of libraries, and to look into one is a walk through memory. What was seen in a
# library's is kept.


_libraries: Final[dict[str, types.ModuleType]] = {}
"""Modules of libraries, by the names under which they were loaded: another may take the name."""


def program_files(frame: types.FrameType | None) -> dict[str, set[int]]:
    """The files of the program's own code: of a frame and its callers, with the lines of these functions, then of the
    modules that are imported."""
    own, _ = program_frames(frame)
    found: dict[str, set[int]] = {}
    for each in own:
        lines = {line for *_, line in each.f_code.co_lines() if line is not None}
        found.setdefault(each.f_code.co_filename, set()).update(lines)
    for _, scope in program_modules():
        found.setdefault(scope["__file__"], set())
    return found


def program_modules() -> list[tuple[str, dict[str, Any]]]:
    """The names and variables of the modules that are the program's own: neither installed, nor torch's or ours."""
    found, known = [], _libraries.get
    for name, module in sys.modules.copy().items():
        # No `getattr`: a module that is imported lazily would be imported by it.
        if (
            known(name) is not module
            and isinstance(module, types.ModuleType)
            and isinstance(file := vars(module).get("__file__"), str)
        ):
            if is_own_file(file):
                found.append((name, vars(module)))
            else:
                _libraries[name] = module
    return found


def find_holders(values: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Modules that have one of these values, under which names: who has imported it by name keeps it."""
    given = frozenset(values)
    wanted, without = {id(each) for each in given}, _without(given)
    program_modules()  # which finds those of libraries
    found = []
    for key, module in sys.modules.copy().items():
        scope = getattr(module, "__dict__", {})
        if without.get(key) == (module, len(scope)):
            continue
        names = [(module, name, value) for name, value in list(scope.items()) if id(value) in wanted]
        if not names and _libraries.get(key) is module:
            without[key] = module, len(scope)
        found += names
    return found


@functools.lru_cache(maxsize=8)
def _without(values: frozenset[Any]) -> dict[str, tuple[types.ModuleType, int]]:
    """Libraries' modules that had none of the values, and how many names: what they import later is one more.

    A name that is bound anew to a value leaves the count as it was, and is not seen.
    """
    return {}
