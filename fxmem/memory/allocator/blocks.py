"""The blocks that segments are cut into, and the caching allocator's pools of free ones."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from fxmem.records.units import round_up


class Range(NamedTuple):
    """Addresses reserved for an expandable segment (`ExpandableSegment`); memory stands behind its mapped blocks
    only."""

    address: int
    page: int
    """Bytes that are mapped at a time."""


class Block:
    """A piece of a segment, linked to its neighbours by address (`Block`)."""

    __slots__ = ("address", "inserted", "live", "mapped", "next", "pool", "prev", "range", "requested", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, of: Range | None = None, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.range = of
        self.mapped = mapped
        self.live = False
        self.requested = 0
        self.inserted = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        """A copy, of all blocks of its segment at once: one after another, each would be a deeper recursion."""
        first = self
        while first.prev is not None:
            first = first.prev
        before: Block | None = None
        made: list[Block] = []
        block: Block | None = first
        while block is not None:
            memo[id(block)] = own = copy.copy(block)
            own.link(before, None)
            made.append(own)
            before, block = own, block.next
        for own in made:
            own.pool = copy.deepcopy(own.pool, memo)
        found: Block = memo[id(self)]
        return found

    @property
    def split(self) -> bool:
        """Whether it is but a part of its segment."""
        return self.prev is not None or self.next is not None

    @property
    def growable_size(self) -> int:
        """Its size, with that of the unmapped addresses behind it."""
        following = self.next
        return self.size + (following.size if following is not None and not following.mapped else 0)

    def mapped_run(self) -> Iterator[Block]:
        """The mapped blocks from this one on."""
        block: Block | None = self
        while block is not None and block.mapped:
            yield block
            block = block.next

    def link(self, before: Block | None, after: Block | None) -> None:
        """Stand between these two."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """Free blocks of one stream by (size, address), unmapped ones by address (the part of a `BlockPool` that a stream
    may take from)."""

    def __init__(self, searches: Mapping[bool, int], *, stream: int, small: bool) -> None:
        self.small = small
        self.stream = stream
        self._searches = searches
        """How often blocks were searched for on all streams (`get_free_blocks_call_count`), by `small`."""
        self._order: list[tuple[int, int]] = []
        self._free: dict[int, Block] = {}
        self._unmapped_order: list[int] = []
        self._unmapped: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Take a block that is not live, where its address and size now put it."""
        if block.mapped:
            block.inserted = self._searches[self.small]
            insort(self._order, (block.size, block.address))
            self._free[block.address] = block
        else:
            insort(self._unmapped_order, block.address)
            self._unmapped[block.address] = block

    def remove(self, block: Block) -> None:
        """Remove a block, whose address and size are still those it was inserted with."""
        if block.mapped:
            del self._order[bisect_left(self._order, (block.size, block.address))]
            del self._free[block.address]
        else:
            del self._unmapped_order[bisect_left(self._unmapped_order, block.address)]
            del self._unmapped[block.address]

    def take(self, position: int) -> Block:
        """Remove the free block at a position that `first_fit` counts in."""
        return self._free.pop(self._order.pop(position)[1])

    def age(self, block: Block) -> int:
        """How often a block was searched for since this one came."""
        return self._searches[self.small] - block.inserted

    def take_first(self, size: int) -> Block | None:
        """Remove the smallest free block of at least `size`; at equal size, the lowest. None where there is none."""
        order = self._order
        position = bisect_left(order, (size, 0))
        return self._free.pop(order.pop(position)[1]) if position < len(order) else None

    def first_fit(self, size: int) -> int:
        """Position of the smallest free block of at least `size`; at equal size, of the lowest."""
        return bisect_left(self._order, (size, 0))

    def block(self, position: int) -> Block:
        """The free block at a position that `first_fit` counts in."""
        return self._free[self._order[position][1]]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Block]:
        """The free blocks as they are now, by size and address; the pool may change while they are walked."""
        return iter([self._free[address] for _, address in self._order])

    def unmapped_blocks(self) -> Iterator[Block]:
        """The unmapped blocks by address."""
        return map(self._unmapped.__getitem__, self._unmapped_order)

    @property
    def largest(self) -> int:
        """Size of the largest free block; 0 without any."""
        return self._order[-1][0] if self._order else 0


# --- where the driver places what it gives ----------------------------------------------------------------------------
# Undocumented; read from the addresses in a published snapshot of a training that holds 61 GB
# (kkaitlyn111/cs336-a2-systems, memory_files/memory_ctx128_fullstep.pickle). All but eight of its 783 segments are
# where these rules have them: 666 below the ones before, 109 in the lowest of the gaps. The eight are its first ones,
# among what was there before, and one that lies 256 MiB lower. What an H200 reserved follows from them, too
# (docs/measuring.md). Windows places each above the one before.


_SPAN: Final = 32 << 20
"""Addresses are taken in multiples of this."""
_END: Final = (1 << 47) - _SPAN  # of a process; no sum of large ranges reaches 0


class AddressSpace:
    """The addresses of one process on one card.

    What is asked for is placed in the lowest gap that is wide enough; where there is none, it begins a new span below
    all others, and what is left of the span is a gap. What is given back is a gap.

    Args:
        is_upward: whether it is placed above all others instead, where there is no gap.
    """

    def __init__(self, *, is_upward: bool = False) -> None:
        self._is_upward = is_upward
        self._lowest, self._highest = _END, _SPAN
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
        if self._is_upward:
            self._highest += nbytes
            return self._highest - nbytes
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
