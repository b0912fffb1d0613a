"""What a program is told that no card has computed: numbers read back, decisions by them, shapes that depend on data.

A prediction is as good as these guesses are harmless, so each is noted with the user's line; the report lists them.
"""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem._torch import common as torch_common
from fxmem.records.profile import Assumption, MadeUp, MadeUpKind
from fxmem.records.units import package_path
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.checks import find_passing_value, is_in_while
from fxmem.simulation.code.source_lines import program_place, variables, walk_error

_GUESSED: Final = ("read", "decided", "shape")
"""Kinds of notes that are about a value."""
_OTHER_ERRORS: Final = (AttributeError, ImportError, NameError, NotImplementedError, OSError, SyntaxError, TypeError)
"""What a value that is made up does not raise."""
_ROUNDS: Final = 100
"""Of a loop that goes on by made-up fractions: halved as often, a step is less than any error."""


class _Guess(NamedTuple):
    """The last guess that a program was given."""

    kind: MadeUpKind
    what: str
    place: str
    """Where it was read or decided by."""
    origin: str
    """Where it was made up."""


class MadeUpNotes:
    """The notes of one program.

    Args:
        given: values that the user says are read, by line (`train.py:41`).
    """

    def __init__(self, given: Mapping[str, torch.Tensor] | None = None) -> None:
        self.unfollowed: set[str] = set()
        """Functions that use a card in processes of their own, of which nothing is known."""
        self.loops_ended = 0
        """Of `while` loops, how many ended by a number that is made up."""
        self.reads = 0
        """How often the program has asked a tensor of the target for a number."""
        self.assumed: list[Assumption] = []
        """What stands among the assumptions of the report, not as a guess."""
        self._given = given or {}
        self._counts: Counter[tuple[MadeUpKind, str, str]] = Counter()
        self._last: _Guess | None = None
        self._copies: Any = WeakTensorKeyDictionary()
        """Of each tensor of the host whose numbers are made up, where that was."""
        self._rounds: Counter[tuple[types.CodeType, int, bool]] = Counter()
        """How often running each line of a `while` loop has decided so."""

    def note(self, kind: MadeUpKind, what: str, origin: str = "") -> None:
        """Note one guess, at the user's line that runs; `origin` is where it was made up, if elsewhere."""
        place = program_place(sys._getframe(1))
        self._counts[kind, what, place] += 1
        if kind in _GUESSED:
            self._last = _Guess(kind, what, place, origin or place)

    def decide(self, what: str, passes: bool, frame: types.FrameType, origin: str = "") -> bool:
        """Note that the program decides by a made-up fraction, and how: `passes`, unless a `while` loop has heard that
        `_ROUNDS` times running and may never end."""
        key = frame.f_code, frame.f_lineno, passes
        self._rounds.pop((*key[:2], not passes), None)
        if is_in_while(frame):
            self._rounds[key] += 1
        if self._rounds[key] > _ROUNDS:
            del self._rounds[key]
            what, passes, self.loops_ended = f"{what}, so that the loop ends", not passes, self.loops_ended + 1
        self.note("decided", what, origin)
        return passes

    def give(self, tensor: torch.Tensor) -> None:
        """Attach to a tensor without values those that the user says are read at the line that runs.

        One number stands for all; of more, there are as many as the tensor has.
        """
        if not self._given or known_values.is_known(tensor):
            return
        place = program_place(sys._getframe(1))
        key = next((each for each in self._given if f"/{place}".endswith(f"/{each}")), None)
        value = None if key is None else self._given[key]
        if value is None or value.numel() not in (1, tensor.numel()):
            return
        with torch_common.no_modes(), torch_common.pause_observers():
            many = value.reshape(tensor.shape) if value.numel() == tensor.numel() else value.reshape(())
            known_values.attach(tensor, many.to(tensor.dtype).expand(tensor.shape).clone())
        self.note("answered", given_note(str(key)))

    def mark_copy(self, tensor: torch.Tensor) -> None:
        """Remember that a tensor of the host holds numbers made up at the user's line that runs."""
        self._copies[tensor] = program_place(sys._getframe(1))

    def follow_copies(self, args: tuple[Any, ...], result: Any) -> None:
        """After an operator ran on the host: what it computes from made-up numbers is made up, too."""
        if not self._copies:
            return
        origin = next(filter(None, map(self.find_copy, torch_common.iterate_tensors(args))), "")
        for each in torch_common.iterate_tensors(result) if origin else ():
            self._copies[each] = origin

    def find_copy(self, tensor: torch.Tensor) -> str:
        """Where the numbers of a tensor of the host were made up; empty for one whose numbers are real."""
        return str(self._copies.get(tensor, "")) if self._copies else ""

    def explain(self, error: BaseException) -> str:
        """Which made-up value an error may come of, in words that follow the error; empty for none.

        It is one that the failing line names or reads, or else the last by which a function that fails decided.
        """
        frames = [] if isinstance(error, _OTHER_ERRORS) else list(walk_error(error))
        for frame, line in reversed(frames):
            names = _find_names(frame.f_code.co_filename, line)
            for name, value in variables(frame).items() if names else ():
                if name in names and (origin := self._find_origin(value)):
                    return _describe(f"`{name}`", origin, "")
        last = self._last
        if last is None:
            return ""
        file, _, number = last.place.rpartition(":")
        for frame, line in reversed(frames):
            lines = {each for _, _, each in frame.f_code.co_lines()}
            is_here = package_path(frame.f_code.co_filename) == file and int(number) in lines
            names = _find_names(frame.f_code.co_filename, line)
            bound = _find_names(frame.f_code.co_filename, int(number), until="=")
            if is_here and (int(number) == line or last.what not in _PLAIN or names & bound):
                return _describe(last.what, last.origin, last.place)
        return ""

    def _find_origin(self, value: Any) -> str:
        """Where a number or a tensor was made up; empty where it is none that was."""
        if isinstance(value, _Number):
            return value.origin
        return self.find_copy(value) if type(value) is torch.Tensor else ""

    @property
    def total(self) -> int:
        """How many guesses there have been."""
        return self._counts.total()

    def records(self) -> tuple[MadeUp, ...]:
        """What was noted, in the order it first came."""
        noted = self._counts.items()
        return tuple(MadeUp(kind=kind, what=what, place=place, count=count) for (kind, what, place), count in noted)


class _Number:
    """A number read from a tensor without values: notes where the program decides by it, divides as if it were 1.

    A class of its own, since nothing else sees `number < best`; a program that asks for exact types gets plain numbers.
    """

    notes: MadeUpNotes | None = None
    origin = ""
    """Where it was read from a tensor."""


def given_note(place: str) -> str:
    """What is noted of a value that the user gives."""
    return f"--value {place}"


def _find_names(file: str, line: int, until: str = "\n") -> set[str]:
    """The names in a line of source."""
    return set(re.findall(r"[^\W\d]\w*", linecache.getline(file, line).partition(until)[0]))


def _describe(what: str, origin: str, place: str) -> str:
    """The guess that an error may come of, and what to do."""
    read = f", read at {place}" if place not in ("", origin) else ""
    return f"; perhaps by a made-up value: {what} at {origin}{read}; fxmem run --value {origin}=VALUE gives a real one"


def _note_decision(number: Any, what: str) -> None:
    if number.notes is not None:
        number.notes.note("decided", what, number.origin)


def _comparison(base: Any, name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(base, f"__{name}__")

    def comparing(self: Any, other: Any) -> Any:
        what = f"{name} {other!r}" if isinstance(other, (int, float)) else name
        frame, result = sys._getframe(1), compare(self, other)
        passes = find_passing_value(frame)
        if passes is None and base is float and self.notes is not None and result is not NotImplemented:
            return self.notes.decide(what, result, frame, self.origin)
        _note_decision(self, what if passes is None else f"{what}, as the check wants it")
        return result if passes is None or result is NotImplemented else passes

    return comparing


def _arithmetic(base: Any, name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(base, f"__{name}__")
    by_this = name in ("rtruediv", "rfloordiv", "rmod")

    def computing(self: Any, other: Any) -> Any:
        number = base(1) if by_this and not base.__bool__(self) else self
        return made_up_number(compute(number, other), self.notes, self.origin)

    return computing


_COMPARISONS: Final = "lt le gt ge eq ne".split()
_ARITHMETIC: Final = "add radd sub rsub mul rmul truediv floordiv mod pow rtruediv rfloordiv rmod".split()


def _number_class(base: type[int] | type[float]) -> Any:
    def is_true(self: Any) -> bool:
        _note_decision(self, "truth")
        passes = find_passing_value(sys._getframe(1))
        return bool(base.__bool__(self)) if passes is None else passes

    members: dict[str, Any] = {f"__{name}__": _comparison(base, name) for name in _COMPARISONS}
    members |= {f"__{name}__": _arithmetic(base, name) for name in _ARITHMETIC}
    members |= {
        "__bool__": is_true,
        "__hash__": base.__hash__,
        "__reduce__": lambda self: (base, (base(self),)),
        "__doc__": f"A made-up {base.__name__}.",
    }
    return type(f"MadeUp{base.__name__.title()}", (_Number, base), members)


_CLASSES: Final = {float: _number_class(float), int: _number_class(int)}


_PLAIN: Final = frozenset(str(dtype)[6:] for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
"""What is noted of a single number that is read, as to print it."""


def made_up_number(value: Any, notes: MadeUpNotes | None, origin: str = "") -> Any:
    """The same number, which notes what is decided by it; what is no number as it is.

    `origin` is where it was read; the user's line that runs if it is empty.
    """
    cls = _CLASSES.get(type(value)) or (_CLASSES[int] if isinstance(value, _CLASSES[int]) else None)
    if cls is None:
        return value
    number = cls(value)
    number.notes, number.origin = notes, origin or program_place(sys._getframe(1))
    return number
