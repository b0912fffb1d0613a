"""The requests that a program's card refused: which of them ended it, and which it caught and went on from."""

from __future__ import annotations

from fxmem.errors import linked_errors
from fxmem.records.profile import RefusedRequests
from fxmem.simulation.card.card_memory import CardMemory, describe_shortage


class Refusals:
    """Follows whether a program goes on from a refused request.

    It does where a step runs through after the last one: a backward that ended, then the step of an optimizer. Of a
    program without a backward a call of a module is enough.

    Args:
        memory: the card's; None for the CPU, which refuses nothing.
    """

    def __init__(self, memory: CardMemory | None) -> None:
        self._memory = memory
        self._outlived = 0
        """How many refused requests a step ran through after."""
        self._before: int | None = None
        """How many there were when a backward ended last; None before any began."""

    @property
    def _refused(self) -> tuple[tuple[str, str], ...]:
        return () if self._memory is None else self._memory.refused

    def begin_backward(self) -> None:
        """A backward begins: it trains."""
        self._before = self._before or 0

    def end_backward(self) -> None:
        """A backward has ended."""
        self._before = len(self._refused)

    def end_call(self) -> None:
        """A call of a module has ended."""
        if self._before is None:
            self._outlived = len(self._refused)

    def end_step(self) -> None:
        """A step has ended."""
        if self._before == len(self._refused):
            self._outlived = self._before

    def find_cause(self, error: BaseException) -> tuple[str, str] | None:
        """The refused request that an error of the program comes of, as torch's message and the line; None for none.

        That is its own error, one that was raised from it or while it was handled, or that the program leaves after it.
        """
        if len(self._refused) == self._outlived:
            return None
        texts = [str(each) for each in linked_errors(error)]
        found = (each for each in reversed(self._refused) if any(each[0] in text for text in texts))
        return next(found, self._refused[-1] if isinstance(error, SystemExit) else None)

    def record(self, *, has_ended: bool) -> RefusedRequests | None:
        """What the program caught; None for nothing. `has_ended`: the error of the last request ended it."""
        caught = self._refused[: -1 if has_ended else None]
        if not caught:
            return None
        is_outlived = self._outlived >= len(caught)
        return RefusedRequests(count=len(caught), last=describe_shortage(*caught[-1]), is_outlived=is_outlived)
