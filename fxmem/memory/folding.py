"""Runs of numbered siblings that look alike, folded into one row: for tables of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

__all__ = ["folded"]

_Row = TypeVar("_Row")


def folded(
    rows: Sequence[_Row],
    *,
    depth: Callable[[_Row], int],
    label: Callable[[_Row], str],
    likeness: Callable[[_Row], Hashable],
) -> Iterator[tuple[_Row, str, int]]:
    """Rows to show, each with its label and how many siblings it stands for.

    Siblings fold if their labels are numbers that count up by one and they and everything below them are alike; the
    first stays, with what is below it, under a label like `0-31`.

    Args:
        rows: a tree in preorder.
        depth: of a row; children have one more than their parent.
        label: last segment of its path.
        likeness: equal for rows that may stand for one another; leaves out what tells siblings apart, the label too.
    """
    # Every row once, not once for each level above it.
    keys = {id(row): (depth(row), likeness(row)) for row in rows}

    def place(numbered: tuple[int, Sequence[_Row]]) -> Hashable:
        index, subtree = numbered
        head = label(subtree[0])
        below = tuple((keys[id(row)], label(row)) for row in subtree[1:])
        return (int(head) - index if head.isdecimal() else head, keys[id(subtree[0])], below)

    for _, alike in groupby(enumerate(_subtrees(rows, depth)), key=place):
        run = [subtree for _, subtree in alike]
        first, last = label(run[0][0]), label(run[-1][0])
        count = len(run) if first.isdecimal() else 1
        for subtree in run[:1] if count > 1 else run:
            yield subtree[0], f"{first}-{last}" if count > 1 else label(subtree[0]), count
            yield from folded(subtree[1:], depth=depth, label=label, likeness=likeness)


def _subtrees(rows: Sequence[_Row], depth: Callable[[_Row], int]) -> Iterator[Sequence[_Row]]:
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or depth(rows[index]) <= depth(rows[start]):
            yield rows[start:index]
            start = index
