"""What a program is told that no card has computed: numbers read back, decisions by them, shapes that hang on data.

A prediction is as good as these guesses are harmless, so each is noted with the user's line; the report lists them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from fxmem.records.profile import MadeUp, MadeUpKind
from fxmem.simulation.asked.checks import find_passing_value
from fxmem.simulation.source_lines import program_place


class MadeUpNotes:
    """The notes of one program."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[MadeUpKind, str, str]] = Counter()

    def note(self, kind: MadeUpKind, what: str) -> None:
        """Note one guess, at the user's line that runs."""
        self._counts[kind, what, program_place(sys._getframe(1))] += 1

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


def _note_decision(number: Any, what: str) -> None:
    if number.notes is not None:
        number.notes.note("decided", what)


def _comparison(base: Any, name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(base, f"__{name}__")

    def comparing(self: Any, other: Any) -> Any:
        what = f"{name} {other!r}" if isinstance(other, (int, float)) else name
        passes = find_passing_value(sys._getframe(1))
        _note_decision(self, what if passes is None else f"{what}, as the check wants it")
        result = compare(self, other)
        return result if passes is None or result is NotImplemented else passes

    return comparing


def _arithmetic(base: Any, name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(base, f"__{name}__")
    by_this = name in ("rtruediv", "rfloordiv", "rmod")

    def computing(self: Any, other: Any) -> Any:
        number = base(1) if by_this and not base.__bool__(self) else self
        return made_up_number(compute(number, other), self.notes)

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


def made_up_number(value: Any, notes: MadeUpNotes | None) -> Any:
    """The same number, which notes what is decided by it; what is no number as it is."""
    cls = _CLASSES.get(type(value)) or (_CLASSES[int] if isinstance(value, _CLASSES[int]) else None)
    if cls is None:
        return value
    number = cls(value)
    number.notes = notes
    return number
