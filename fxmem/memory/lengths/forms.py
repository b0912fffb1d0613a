"""A number of bytes as a function of the lengths of a batch, proved on a few recorded batches.

A size is a polynomial of at most the second degree in one length, which may be rounded up to a multiple (a kernel's
rows, an alignment), perhaps times another length, as that of the batch. It is proved where as many different lengths
as it has coefficients give it, and one more confirms it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

Features = tuple[int, ...]
"""The lengths of one step's batches."""
PADDINGS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Multiples that kernels round a length up to."""
_STRIDES: Final = (1, 2, -2, 4, -4, 8, -8, 16, -16, -14, 32, -32)
"""Multiples that strides and patches round a length up to; negative: down to."""
_MOST_FACTORS: Final = 3
"""Lengths of a product."""
_MOST_SUMMED: Final = 2
"""Lengths by which sums of products are looked for: more would need more batches than are run."""
_MOST_DEGREE: Final = 2


class Form(NamedTuple):
    """A polynomial in a length, perhaps times another length."""

    coefficients: tuple[Fraction, ...]
    """The constant one first."""
    length: int = 0
    """Which of the features."""
    padding: int = 1
    """The length is rounded up to a multiple of this."""
    factor: int | None = None
    """Which feature the polynomial is multiplied by; None for none."""

    def scale(self, features: Features) -> int:
        """What the polynomial is multiplied by."""
        return 1 if self.factor is None else features[self.factor]

    def argument(self, features: Features) -> int:
        """What the polynomial is in."""
        return -(-features[self.length] // self.padding) * self.padding

    def evaluate(self, features: Features) -> Fraction:
        """The value for these lengths; where the form holds, a whole number."""
        x, value = self.argument(features) if len(self.coefficients) > 1 else 0, Fraction(0)
        for coefficient in reversed(self.coefficients):
            value = value * x + coefficient
        return value * self.scale(features)

    def at(self, features: Features) -> int:
        """The value for these lengths, to the nearest whole number."""
        return round(self.evaluate(features))


def find_form(points: Sequence[tuple[Features, int]]) -> Form | MixedForm | None:
    """Find the simplest form that gives all these values; None where none does, or one point more is needed.

    Args:
        points: lengths, and the value there.
    """
    if len({value for _, value in points}) == 1:
        return Form((Fraction(points[0][1]),))
    count = len(points[0][0])
    units = [tuple(int(at == place) for at in range(count)) for place in range(count)]
    factors = [each for most in range(1, _MOST_FACTORS + 1) for each in itertools.combinations(units, most)]
    products = [tuple(map(sum, zip(*each, strict=True))) for each in factors]
    constant, squares = (0,) * count, [tuple(2 * n for n in each) for each in products]
    sums = [[constant, *products], [constant, products[-1], squares[-1]], [constant, *products, *squares[:count]]]
    return (
        _find_sum(points, [[each] for each in products])
        or _find_polynomial(points)
        or (_find_sum(points, sums) if count <= _MOST_SUMMED else None)
    )


def _find_sum(points: Sequence[tuple[Features, int]], sums: Sequence[Sequence[tuple[int, ...]]]) -> MixedForm | None:
    made = (find_mixed_form(points, each, padding) for each in sums for padding in _STRIDES)
    return next((form for form in made if form is not None), None)


def _find_polynomial(points: Sequence[tuple[Features, int]]) -> Form | None:
    for degree in range(1, _MOST_DEGREE + 1):
        for length, padding, factor in _arguments(len(points[0][0])):
            shape = Form((Fraction(0),) * (degree + 1), length, padding, factor)
            found = dict[int, Fraction]()
            pairs = [(shape.argument(each), Fraction(value, shape.scale(each))) for each, value in points]
            if all(found.setdefault(x, value) == value for x, value in pairs) and len(found) >= degree + 2:
                known = sorted(found.items())
                spread = [known[i * (len(known) - 1) // degree] for i in range(degree + 1)]
                form = shape._replace(coefficients=_interpolate(spread))
                if all(form.evaluate(features) == value for features, value in points):
                    return form
    return None


class MixedForm(NamedTuple):
    """A sum of products of lengths' powers, as what an operator reads: its weights, and rows of its inputs."""

    terms: tuple[tuple[tuple[int, ...], Fraction], ...]
    """The power of each length, and the factor."""
    padding: int = 1
    """Each length is rounded up to a multiple of this; where it is negative, down."""

    def at(self, features: Features) -> int:
        """The value for these lengths, to the nearest whole number."""
        rounded = _round(features, self.padding)
        return round(sum(factor * _product(powers, rounded) for powers, factor in self.terms))


def find_mixed_form(
    points: Sequence[tuple[Features, int]], powers: Sequence[tuple[int, ...]], padding: int = 1
) -> MixedForm | None:
    """Find the sum of these products that gives all the values; None where none does, or no further point checks it.

    Args:
        points: lengths, and the value there.
        powers: of each product, the power of each length.
        padding: of the form.
    """
    if len(points) <= len(powers):
        return None
    rows = [[*(Fraction(_product(each, _round(at, padding))) for each in powers), Fraction(n)] for at, n in points]
    for column in range(len(powers)):
        pivot = next((number for number in range(column, len(rows)) if rows[number][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [each / rows[column][column] for each in rows[column]]
        for number in range(len(rows)):
            if number != column and (scale := rows[number][column]):
                rows[number] = [a - scale * b for a, b in zip(rows[number], rows[column], strict=True)]
    if any(row[-1] for row in rows[len(powers) :]):
        return None
    return MixedForm(tuple((each, rows[n][-1]) for n, each in enumerate(powers) if rows[n][-1]), padding)


def _round(features: Features, padding: int) -> Features:
    return tuple(-(-length // padding) * padding for length in features)


def _product(powers: Sequence[int], features: Features) -> int:
    return math.prod(length**power for length, power in zip(features, powers, strict=True))


def _arguments(count: int) -> Iterator[tuple[int, int, int | None]]:
    """What a polynomial may be in: a length, its padding, and a factor; plain ones first."""
    for padding in PADDINGS:
        yield from ((length, padding, None) for length in range(count))
    for padding in PADDINGS:
        yield from ((length, padding, other) for length, other in itertools.permutations(range(count), 2))


def _interpolate(points: Sequence[tuple[int, Fraction]]) -> tuple[Fraction, ...]:
    """The coefficients of the polynomial through these points (Lagrange)."""
    total = [Fraction(0)] * len(points)
    for x, value in points:
        basis, scale = [Fraction(1)], value
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
        self._ranks = tuple(map(len, shapes[0]))
        if not all(map(self.is_like, shapes)):
            raise ValueError("its batches differ in how many tensors they have, or dimensions")
        columns = list(zip(*(itertools.chain.from_iterable(each) for each in shapes), strict=True))
        kept: dict[tuple[int, ...], int] = {}
        for number, column in enumerate(columns):
            kept.setdefault(column, number)
        self._same = [kept[column] for column in columns]
        """By column, the first that is like it in all batches."""
        self._fixed = {number: column[0] for column, number in kept.items() if len(set(column)) == 1}
        self._columns = tuple(number for number in kept.values() if number not in self._fixed)
        outer = [place == 0 for rank in self._ranks for place in range(rank)]
        self.are_outer = tuple(outer[column] for column in self._columns)
        """Of each length, whether it is the first of its tensor: how many samples a batch has."""

    def is_like(self, batch: tuple[tuple[int, ...], ...]) -> bool:
        """Whether a batch has the same tensors but for their lengths."""
        return tuple(map(len, batch)) == self._ranks

    def tell(self, batch: tuple[tuple[int, ...], ...]) -> bool:
        """Whether the features say all of a batch, which need not be one of these."""
        flat = [*itertools.chain.from_iterable(batch)] if self.is_like(batch) else []
        return bool(flat) and all(n == self._fixed.get(at, flat[at]) for n, at in zip(flat, self._same, strict=True))

    def features_of(self, batch: tuple[tuple[int, ...], ...]) -> Features:
        """The lengths of one batch."""
        return self.features([batch])

    def features(self, batches: Sequence[tuple[tuple[int, ...], ...]]) -> Features:
        """The lengths of a step of so many batches."""
        flat = [[*itertools.chain.from_iterable(each)] for each in batches]
        return tuple(each[column] for each in flat for column in self._columns)
