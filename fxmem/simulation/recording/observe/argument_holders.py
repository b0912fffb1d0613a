"""Calls of torch's functions in Python that hold their arguments no longer than the functions themselves do.

Where calls are observed, a function such as `gaussian_nll_loss` runs twice: once up to `handle_torch_function`, and
within that for good. The first run and whatever is between hold the arguments until the call returns. A real run has
one frame, which frees what it assigns to anew (`var = var.clone()`), if the caller gave it away.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import torch.overrides

import fxmem

_BETWEEN: Final = (os.path.dirname(fxmem.__file__) + os.sep, torch.overrides.__file__)
"""Where the frames between the two runs are from."""
_HELD_AS: Final = frozenset({"args", "kwargs", "shown", "relevant_args", "overloaded_args"})
"""Their variables that hold the arguments."""


def assigns_to_a_tensor(function: Any) -> bool:
    """Whether a function in Python assigns to one of its own arguments that may be a tensor."""
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tensors = {name for name in arguments if "Tensor" in str(function.__annotations__.get(name))}
    return any(not tensors.isdisjoint(_find_stored(each)) for each in dis.get_instructions(code))


def _find_stored(instruction: dis.Instruction) -> list[str]:
    """The variables that an instruction stores to; of Python 3.13 on are some of two, as `STORE_FAST_LOAD_FAST`."""
    if not instruction.opname.startswith("STORE_FAST"):
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return [name for part, name in zip(instruction.opname.split("_FAST"), names, strict=False) if "STORE" in part]


def call_unheld(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function from within `handle_torch_function`; neither its own first run nor we hold its arguments."""
    code = function.__code__
    frames = [sys._getframe(1)]
    while frames[-1].f_code is not code and frames[-1].f_code.co_filename.startswith(_BETWEEN) and frames[-1].f_back:
        frames.append(frames[-1].f_back)
    if frames[-1].f_code is not code:
        return function(*args, **kwargs)
    given = [*args, *kwargs.values()][::-1]
    call = _make_call(len(args), tuple(kwargs))
    del args, kwargs
    while frames:
        _drop(frames.pop(), code)
    return call(function, given)


def _drop(frame: types.FrameType, code: types.CodeType) -> None:
    """Set what holds arguments in a frame to None; in a run of `code`, all it has."""
    variables = frame.f_locals
    variables.update(dict.fromkeys(set(variables) if frame.f_code is code else _HELD_AS.intersection(variables)))
    if sys.version_info < (3, 13):  # from there on `f_locals` writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


@functools.cache
def _make_call(count: int, names: tuple[str, ...]) -> Callable[[Any, list[Any]], Any]:
    """Make `lambda function, given: function(given.pop(), ..., name=given.pop())`, whose arguments go to the function's
    frame. Of `function(*given)` the tuple stays as well."""
    arguments = ["given.pop()"] * count + [f"{name}=given.pop()" for name in names]
    made: Callable[[Any, list[Any]], Any] = eval(f"lambda function, given: function({', '.join(arguments)})")
    return made
