"""What is in reference cycles when a step is over: only Python's garbage collector frees it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from fxmem._torch import common as torch_common
from fxmem.records.units import format_bytes
from fxmem.simulation.card.card_memory import LiveBytes


class Cycles:
    """Frees what is in reference cycles after each round, and counts it.

    Python collects after so many objects, which are not those of a real run. Where the program has switched that off,
    nothing is freed here either.

    Args:
        live: the bytes that are alive.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.are_freed = True
        """Whether the program lets Python collect."""
        self.most_bytes = 0
        """Freed at once."""

    def collect(self) -> None:
        """A round is over."""
        if self.are_freed:
            before = self._live.now
            gc.collect()
            self.most_bytes = max(self.most_bytes, before - self._live.now)

    def explain(self, peak_bytes: int) -> Iterator[str]:
        """Say what is taken for granted where it may move a peak by a hundredth."""
        if 100 * self.most_bytes >= peak_bytes:
            yield (
                f"{format_bytes(self.most_bytes)} that a step leaves in reference cycles (an object whose hook or "
                "closure leads to it) are freed when it is over; Python's collector may come some steps later, each "
                "of which adds as much"
            )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the program switches the collector on and off for `collect` alone: it is off throughout."""

        def switch(*, on: bool) -> None:
            self.are_freed = on

        with (
            torch_common.wrap(gc, "disable", lambda _: switch(on=False), here=True),
            torch_common.wrap(gc, "enable", lambda _: switch(on=True), here=True),
            torch_common.wrap(gc, "isenabled", lambda _: self.are_freed, here=True),
        ):
            yield
