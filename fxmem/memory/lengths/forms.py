"""A number of bytes as a function of the lengths of a batch, proved on a few recorded batches.

A size is a polynomial of at most the second degree in one length, in a length rounded up to a multiple (a kernel's
rows, an alignment), or in the product of two of a batch. It is proved where as many different lengths as it has
coefficients give it, and one more confirms it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

Features = tuple[int, ...]
"""The lengths of one step's batches."""
PADDINGS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Multiples that kernels round a length up to."""
_MOST_DEGREE: Final = 2


class Form(NamedTuple):
    """A polynomial in a length, or in the product of two."""

    coefficients: tuple[Fraction, ...]
    """The constant one first."""
    length: int = 0
    """Which of the features."""
    padding: int = 1
    """The length is rounded up to a multiple of this."""
    factor: int | None = None
    """Which feature it is multiplied by; None for none."""

    def argument(self, features: Features) -> int:
        """What the polynomial is in."""
        if len(self.coefficients) == 1:
            return 0
        padded = -(-features[self.length] // self.padding) * self.padding
        return padded if self.factor is None else padded * features[self.factor]

    def at(self, features: Features) -> int:
        """The value for these lengths, to the nearest whole number."""
        x, value = self.argument(features), Fraction(0)
        for coefficient in reversed(self.coefficients):
            value = value * x + coefficient
        return int(value) if value.denominator == 1 else round(value)


def find_form(points: Sequence[tuple[Features, int]]) -> Form | None:
    """Find the simplest form that gives all these values; None where none does, or one point more is needed.

    Args:
        points: lengths, and the value there.
    """
    values = {value for _, value in points}
    if len(values) == 1:
        return Form((Fraction(points[0][1]),))
    for degree in range(1, _MOST_DEGREE + 1):
        for length, padding, factor in _arguments(len(points[0][0]), degree):
            shape = Form((Fraction(0),) * (degree + 1), length, padding, factor)
            found = dict[int, int]()
            pairs = [(shape.argument(features), value) for features, value in points]
            if all(found.setdefault(x, value) == value for x, value in pairs) and len(found) >= degree + 2:
                known = sorted(found.items())
                spread = [known[i * (len(known) - 1) // degree] for i in range(degree + 1)]
                form = shape._replace(coefficients=_interpolate(spread))
                if all(form.at(features) == value for features, value in points):
                    return form
    return None


def _arguments(count: int, degree: int) -> Iterator[tuple[int, int, int | None]]:
    """What a polynomial may be in: a length, its padding, and a factor; plain ones first."""
    for padding in PADDINGS:
        yield from ((length, padding, None) for length in range(count))
    if degree == 1:
        for padding in PADDINGS:
            yield from ((length, padding, other) for length, other in itertools.permutations(range(count), 2))


def _interpolate(points: Sequence[tuple[int, int]]) -> tuple[Fraction, ...]:
    """The coefficients of the polynomial through these points (Lagrange)."""
    total = [Fraction(0)] * len(points)
    for x, value in points:
        basis, scale = [Fraction(1)], Fraction(value)
        for other, _ in points:
            if other != x:
                basis = [a - other * b for a, b in zip([Fraction(0), *basis], [*basis, Fraction(0)], strict=True)]
                scale /= x - other
        total = [t + scale * b for t, b in zip(total, basis, strict=True)]
    return tuple(total)


class Lengths:
    """The lengths by which the batches of an epoch differ.

    Args:
        shapes: of each batch, the shapes of its tensors.

    Raises:
        ValueError: the batches differ in more than the lengths of their tensors.
    """

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], ...]]) -> None:
        if len({tuple(map(len, each)) for each in shapes}) != 1:
            raise ValueError("its batches differ in how many tensors they have")
        columns = list(zip(*(itertools.chain.from_iterable(each) for each in shapes), strict=True))
        kept: dict[tuple[int, ...], int] = {}
        for number, column in enumerate(columns):
            if len(set(column)) > 1:
                kept.setdefault(column, number)
        self._columns = tuple(kept.values())

    @property
    def vary(self) -> bool:
        """Whether any two batches differ."""
        return bool(self._columns)

    def features(self, batches: Sequence[tuple[tuple[int, ...], ...]]) -> Features:
        """The lengths of a step of so many batches."""
        flat = [[*itertools.chain.from_iterable(each)] for each in batches]
        return tuple(each[column] for each in flat for column in self._columns)
