"""Where the driver of Linux places what it gives.

Undocumented; read from the addresses in a published snapshot of a training that holds 61 GB
(kkaitlyn111/cs336-a2-systems, memory_files/memory_ctx128_fullstep.pickle). All but eight of its 783 segments are where
these rules have them: 666 below the ones before, 109 in the lowest of the gaps. The eight are its first ones, among
what was there before, and one that lies 256 MiB lower. What an H200 reserved follows from them, too
(docs/measuring.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from fxmem.records.units import round_up

_SPAN: Final = 32 << 20
"""Addresses are taken in multiples of this."""
_END: Final = (1 << 47) - _SPAN  # of a process; no sum of large ranges reaches 0


class AddressSpace:
    """The addresses of one process on one card.

    What is asked for is placed in the lowest gap that is wide enough; where there is none, it begins a new span below
    all others, and what is left of the span is a gap. What is given back is a gap.
    """

    def __init__(self) -> None:
        self._lowest = _END
        self._gaps: list[tuple[int, int]] = []
        """Address and bytes, in order."""
        self._widest = 0
        """No gap is wider."""

    def take(self, nbytes: int) -> int:
        """Return the address of so many bytes."""
        if nbytes <= self._widest:
            for place, (address, size) in enumerate(self._gaps):
                if size >= nbytes:
                    self._gaps[place : place + 1] = [(address + nbytes, size - nbytes)] if size > nbytes else []
                    return address
            self._widest = max((size for _, size in self._gaps), default=0)
        span = round_up(nbytes, _SPAN)
        self._lowest -= span
        if span > nbytes:
            self.give_back(self._lowest + nbytes, span - nbytes)
        return self._lowest

    def give_back(self, address: int, nbytes: int) -> None:
        """Take back what was placed there."""
        place = bisect_left(self._gaps, (address, 0))
        if place < len(self._gaps) and self._gaps[place][0] == address + nbytes:
            nbytes += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == address:
            address, before = self._gaps.pop(place - 1)
            nbytes += before
        insort(self._gaps, (address, nbytes))
        self._widest = max(self._widest, nbytes)
