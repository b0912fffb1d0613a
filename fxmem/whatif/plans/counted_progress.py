"""What is being done, and which part of the work that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

_Part = TypeVar("_Part")


class CountedProgress:
    """Reports what is being done, with the number of the part that it belongs to.

    Args:
        tell: called with the words.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._done, self._count = tell, 0, 0

    def __call__(self, what: str) -> None:
        """Report what is being done."""
        self._tell(f"{min(self._done + 1, self._count)} of {self._count}, {what}" if self._count else what)

    def steps(self, parts: Sequence[_Part], of: int = 1) -> Iterator[_Part]:
        """Iterate over parts of the work, each of so many steps."""
        self._count = of * len(parts)
        for index, part in enumerate(parts):
            self._done = of * index
            yield part
        self._done = self._count

    def within(self, steps: Iterable[_Part]) -> Iterator[_Part]:
        """Iterate over the steps of the part that is being done."""
        for step in steps:
            yield step
            self._done += 1
