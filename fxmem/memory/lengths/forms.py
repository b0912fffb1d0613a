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
    """A sum of products of lengths' powers, as what an operator reads: its weights, and rows of its inputs."""

    terms: tuple[tuple[tuple[int, ...], Fraction], ...]
    """The power of each length, and the factor."""
    paddings: tuple[int, ...]
    """What each length is rounded up to a multiple of; where it is negative, down."""

    def at(self, features: Features) -> int:
        """The value for these lengths, to the nearest whole number."""
        rounded = _round(features, self.paddings)
        return round(sum(factor * _product(powers, rounded) for powers, factor in self.terms))


def find_form(points: Sequence[tuple[Features, int]]) -> Form | None:
    """Find the simplest form that gives all these values; None where none does, or one point more is needed.

    Args:
        points: lengths, and the value there.
    """
    if len({value for _, value in points}) == 1:
        return Form((((0,) * len(points[0][0]), Fraction(points[0][1])),), (1,) * len(points[0][0]))
    made = (find_sum(points, *each) for each in _list_forms(len(points[0][0])))
    return next((form for form in made if form is not None), None)


def _list_forms(count: int) -> Iterator[tuple[Sequence[tuple[int, ...]], tuple[int, ...]]]:
    """The products that a size may be a sum of, and the paddings, plain ones first.

    One product; a polynomial in one length, then one times another length; sums in all lengths.
    """
    units = [tuple(int(at == place) for at in range(count)) for place in range(count)]
    factors = [each for most in range(1, _MOST_FACTORS + 1) for each in itertools.combinations(units, most)]
    products = [tuple(map(sum, zip(*each, strict=True))) for each in factors]
    for each, padding in itertools.product(products, _STRIDES):
        yield [each], (padding,) * count
    constant = (0,) * count
    for degree, others in itertools.product(range(1, _MOST_DEGREE + 1), ([constant], units)):
        for padding, length, other in itertools.product(PADDINGS, units, others):
            if other != length:
                powers = [tuple(n * a + b for a, b in zip(length, other, strict=True)) for n in range(degree + 1)]
                yield powers, tuple(padding if each else 1 for each in length)
    if count <= _MOST_SUMMED:
        squares = [tuple(2 * n for n in each) for each in products]
        sums = [constant, *products], [constant, products[-1], squares[-1]], [constant, *products, *squares[:count]]
        yield from ((each, (padding,) * count) for each, padding in itertools.product(sums, _STRIDES))


def find_sum(
    points: Sequence[tuple[Features, int]], powers: Sequence[tuple[int, ...]], paddings: tuple[int, ...]
) -> Form | None:
    """Find the sum of these products that gives all the values; None where none does, or no further point checks it.

    Args:
        points: lengths, and the value there.
        powers: of each product, the power of each length.
        paddings: of the form.
    """
    solved: dict[int, list[Fraction]] = {}
    """By product, an equation in which no other that is solved stands."""
    different = set[object]()
    for features, value in points:
        rounded = _round(features, paddings)
        row = [Fraction(_product(each, rounded)) for each in powers]
        # What all products have in common shows nothing of their sum.
        different.add(tuple(each / (row[0] or 1) for each in row[1:]) or row[0])
        row.append(Fraction(value))
        for number, other in solved.items():
            row = _eliminate(row, number, other)
        pivot = next((number for number, each in enumerate(row[:-1]) if each), None)
        if pivot is not None:
            row = [each / row[pivot] for each in row]
            solved = {number: _eliminate(other, pivot, row) for number, other in solved.items()} | {pivot: row}
        elif row[-1]:
            return None
    if min(len(solved), len(different) - 1) < len(powers):
        return None
    return Form(tuple((each, solved[n][-1]) for n, each in enumerate(powers) if solved[n][-1]), paddings)


def _eliminate(row: list[Fraction], number: int, solved: list[Fraction]) -> list[Fraction]:
    return [a - row[number] * b for a, b in zip(row, solved, strict=True)] if row[number] else row


def _round(features: Features, paddings: tuple[int, ...]) -> Features:
    return tuple(-(-length // padding) * padding for length, padding in zip(features, paddings, strict=True))


def _product(powers: Sequence[int], features: Features) -> int:
    return math.prod(length**power for length, power in zip(features, powers, strict=True))


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

    def features(self, batches: Sequence[tuple[tuple[int, ...], ...]]) -> Features:
        """The lengths of a step of so many batches."""
        flat = [[*itertools.chain.from_iterable(each)] for each in batches]
        return tuple(each[column] for each in flat for column in self._columns)
