"""How recomputing values changes the bytes alive at each tick of a step.

A value that is not recomputed stays alive until backward last needs it. One that is recomputed dies after its last
reader in forward, and is alive again from the tick before backward first needs it until the last. A value that backward
needs at one tick only is *transient*: it exists while others are recomputed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fxmem.planning.lookups import Floats, Ints


class ValueLife(NamedTuple):
    """A value in the unplanned step."""

    nbytes: float
    flow_end: int
    """Tick at which its last reader in forward has run."""
    death: int
    """Tick at which its storage is freed."""
    saved: bool
    """Whether autograd saves it."""


class ValueUse(NamedTuple):
    """What backward needs a value for."""

    recomputed: bool
    """Whether the call that makes it is recomputed."""
    first: int
    """Tick at which backward first needs it."""
    last: int
    """Tick at which backward last needs it."""


class LiveChanges:
    """The bytes by which a planned step differs from the unplanned one.

    Args:
        lives: of all values.
        change: by tick, how many bytes more are alive from it on; two entries more than ticks.
        transient: by tick, the transient values.
        transient_bytes: by tick, the most bytes of those.
    """

    def __init__(
        self, lives: Sequence[ValueLife], change: Floats, transient: dict[int, frozenset[int]], transient_bytes: Floats
    ) -> None:
        self._lives = lives
        self._change, self._transient, self._transient_bytes = change, transient, transient_bytes
        self._touched: set[int] = set()

    @classmethod
    def empty(cls, lives: Sequence[ValueLife], ticks: int) -> LiveChanges:
        """Return no change over so many ticks."""
        return cls(lives, np.zeros(ticks + 2), {}, np.zeros(ticks))

    def copy(self) -> LiveChanges:
        """Return a copy that changes by itself."""
        return LiveChanges(self._lives, self._change.copy(), self._transient.copy(), self._transient_bytes.copy())

    def count(self, value: int, use: ValueUse, sign: float) -> None:
        """Add the bytes of a value that backward needs; with a sign of -1 remove them."""
        recomputed, first, last = use
        nbytes, flow_end, death, saved = self._lives[value]
        nbytes *= sign
        if not nbytes:
            return
        if not recomputed:
            self.shift(death if saved else flow_end, last, nbytes)
            return
        if saved:
            self.shift(flow_end, death, -nbytes)
        if last > first:
            self.shift(max(first - 1, 0), last, nbytes)
        else:
            self._touched.add(first)
            group = self._transient.get(first, frozenset())
            self._transient[first] = group | {value} if sign > 0 else group - {value}

    def shift(self, begin: int, end: int, nbytes: float) -> None:
        """Add bytes that are alive from one tick until another, if that is later."""
        if end > begin:
            self._change[begin] += nbytes
            self._change[end] -= nbytes

    def shift_all(self, begins: Ints, ends: Ints, nbytes: Floats) -> None:
        """As `shift`, for one of each."""
        later = np.where(ends > begins, nbytes, 0.0)
        ticks = len(self._change)
        self._change += np.bincount(begins, later, ticks) - np.bincount(ends, later, ticks)

    def settle(self, most: Callable[[Sequence[int]], float]) -> None:
        """Count the transient values anew where `count` changed them.

        Args:
            most: gives the most bytes that transient values of one tick, ascending, have together.
        """
        for tick in self._touched:
            self._transient_bytes[self._before(tick)] = most(sorted(self._transient[tick]))
        self._touched.clear()

    def raise_transient(self, tick: int, nbytes: float) -> None:
        """Count at least so many bytes of transient values at a tick."""
        at = self._before(tick)
        self._transient_bytes[at] = max(self._transient_bytes[at], nbytes)

    def _before(self, tick: int) -> int:
        return min(max(tick - 1, 0), len(self._transient_bytes) - 1)

    def apply(self, live: Floats) -> Floats:
        """Return the bytes alive by tick, from those of the unplanned step."""
        alive: Floats = live + np.cumsum(self._change)[: len(live)] + self._transient_bytes
        return alive
