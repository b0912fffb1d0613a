"""The blocks that segments are cut into, and the caching allocator's pools of free ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import NamedTuple


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
