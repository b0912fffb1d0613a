"""What a program keeps more of after each step, and what it does later than they show."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from fxmem.records.names import OF_FRAMES, OF_GRAPH
from fxmem.records.parts.base import Bytes, Many, Record

ONLY_TORCH = "a graph that only torch has"
"""The holder of what no object of Python's leads to, in words."""
ANEW = "with each new optimizer"
"""When what is kept of a fold or a trial grows, in words."""
IN_CYCLES = "reference cycles, which Python does not collect after gc.disable()"


class Growth(Record):
    """What one owner keeps more of after each step than after the one before."""

    holder: str
    """What the program calls the owner (`preds`, `graph of losses`, `frames of errors`); where only torch keeps it,
    empty, or the call that made it. Untrusted text."""
    nbytes: Bytes
    """A step; the mean where steps differ."""
    tensors: int
    """A step that keeps more; 0 where one tensor grows."""
    shape: Many[int] = ()
    """Of the largest."""
    dtype: str = ""
    times: int = Field(default=1, exclude_if=lambda value: value == 1)
    """How many times the bytes of the tensors that the program has of the largest it keeps, as they are views of it."""
    made_at: str = ""
    """`file:line` that made the largest; empty where that is not known."""
    kept_at: str = ""
    """`file:line` of the program that writes to the owner; empty where none is found."""
    since: int
    """The first step that kept more than the one before."""
    every: int = Field(default=1, exclude_if=lambda value: value == 1)
    """Steps at most from one that keeps more to the next."""
    emptied: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The last step that left less than half of what the owner had had before, if that was more than it has now: it
    grows again, and the peak was seen. None: there is none."""
    until: int | None = None
    """The step from which on it keeps no more, for the owner has a bound (`deque(maxlen=10)`); None: none is known."""
    ends: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The last step before the program ends, or makes the owner anew (`preds = []` in the loop of its epochs); None:
    not known."""
    is_endless: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether the program's code puts more into it and nothing there bounds it, or autograd's graph alone keeps it.
    Where no end is known either, whether it goes on is not known."""

    @property
    def last(self) -> int | None:
        """The step from which on it keeps no more, whatever ends it; None: not known."""
        return min((each for each in (self.until, self.ends) if each is not None), default=None)

    @property
    def is_graph(self) -> bool:
        """Whether it is kept for a backward."""
        return self.holder.startswith(OF_GRAPH)

    @property
    def is_frames(self) -> bool:
        """Whether an exception keeps it, with the functions that it came through."""
        return self.holder.startswith(OF_FRAMES)


class Schedule(Record):
    """What a program does every so many steps, by a condition like `if step % 1000 == 0:`, or after its loop."""

    place: str
    """`file:line` of the condition, or of what follows the loop."""
    every: int | None
    """None: once its steps are over."""
    counter: str = Field(default="", exclude_if=lambda value: not value)
    """What it counts in the place of steps, as epochs: no recorded step changed it. Empty where it counts steps."""
    calls: str = Field(default="", exclude_if=lambda value: not value)
    """`file:line` where it calls a model and no step did; empty where it calls none."""


def find_large(grown: Sequence[Growth]) -> list[Growth]:
    """Those that keep a hundredth of all at least, in their order."""
    whole = sum(each.nbytes for each in grown)
    return [each for each in grown if 100 * each.nbytes >= whole]
