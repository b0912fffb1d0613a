"""PyTorch's CUDA caching allocator, on counters instead of memory.

Modelled: `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp` as of torch 2.11. Every method names the
function it follows, by its name in that file. Driven by the same requests, torch's own library and this one give the
same addresses and the same statistics (tests/memory/test_allocator.py keeps the library's answers).

Assumptions
- One thread. Free blocks are by stream: one that a stream has freed is never handed to another. No block waits for
  another stream when it is freed (`record_stream`), so active bytes equal allocated bytes.
- No CUDA graph, no private pool, no memory shared between processes, settings fixed for the allocator's life.
- The driver is a counter: it refuses a request exactly when the sum of what it gave would exceed `capacity_bytes`.
- Addresses. Segments and reserved ranges are where the driver of Linux was seen to place them (`AddressSpace`). Only
  their order matters: among free blocks of equal size the lowest address wins, and expandable segments grow at the
  lowest.
"""

from __future__ import annotations

import functools
from collections import Counter
from copy import copy
from typing import Final

from fxmem.errors import UsageError
from fxmem.memory.allocator.blocks import AddressSpace, Block, Pool, Range
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS, MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE, AllocatorSettings
from fxmem.memory.allocator.stats import BlockView, OutOfMemory, PoolCounts, Segment, Stat, Stats
from fxmem.records.units import round_up

_UNBOUNDED_RANGE: Final = 1 << 42


class CachingAllocator:
    """The allocator of one device.

    `capacity_bytes` is what the driver can give to this process (device memory less the CUDA context and everybody
    else's); None never refuses. `device_bytes` is the device's total memory, at the least the capacity, which
    `per_process_memory_fraction` and the address range of expandable segments refer to.

    Raises: `UsageError` when a memory fraction is set and the device's memory is not known.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        capacity_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        device = max((size for size in (capacity_bytes, device_bytes) if size is not None), default=None)
        self._range_bytes = _UNBOUNDED_RANGE if device is None else device + device // 8
        self._allowed: int | None = None
        if settings.per_process_memory_fraction < 1:
            if device is None:
                raise UsageError(
                    "per_process_memory_fraction needs the memory of the device; none is known: give a capacity"
                )
            self._allowed = int(settings.per_process_memory_fraction * device)
        self._collect_from: int | None = None
        """Reserved bytes beyond which unused segments are given back early."""
        if self._allowed is not None and settings.garbage_collection_threshold is not None:
            self._collect_from = int(settings.garbage_collection_threshold * self._allowed)
        self._pools: dict[tuple[bool, int], Pool] = {}
        """By whether for small blocks, and by stream."""
        self._searches: Counter[bool] = Counter()
        """How often blocks were searched for in the small pools, and in the large ones."""
        self._live: dict[int, Block] = {}
        self._requested = Stat()
        self._allocated = Stat()
        self._reserved = Stat()
        self._segments = 0
        self._retries = 0
        self._ooms = 0
        self.emptied = 0
        """How often all cached segments were given back."""
        self.counts: PoolCounts | None = None
        """What else is counted, where somebody asks; it takes time."""
        self._addresses = AddressSpace(is_upward=settings.segments_upward)
        self._round_size = functools.lru_cache(maxsize=1 << 12)(settings.round_size)
        self._takes_first = not settings.expandable_segments and settings.max_split_bytes is None
        """Whether the smallest free block that serves a request is always the one that it gets."""

    # -- the public face

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Allocate a block for `nbytes` on a stream; return its address. For no bytes it is 0 and there is no block, as
        a tensor without elements has a null pointer.

        Raises: `OutOfMemory`. The allocator stays usable, its cache emptied.
        Source: `DeviceCachingAllocator::malloc`, `NativeCachingAllocator::allocate`.
        """
        if nbytes <= 0:
            if nbytes < 0:
                raise UsageError(f"malloc expects a number of bytes, got {nbytes}")
            return 0
        size = self._round_size(nbytes)
        key = size <= SMALL_SIZE, stream
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(self._searches, small=key[0], stream=stream)
        block = self._best_fit(pool, size)
        if block is None:
            block = self._request_segment(pool, size)
        if block is None:
            self._ooms += 1
            limits = [limit for limit in (self.capacity_bytes, self._allowed) if limit is not None]
            free, segment = max(min(limits) - self.reserved_bytes, 0), self.settings.segment_size(size)
            raise OutOfMemory(nbytes, segment, free, self.allocated_bytes, self.reserved_bytes, pool.largest)
        return self._hand_out(block, size, nbytes)

    def free(self, address: int) -> None:
        """Give a block back to its pool; it merges with free neighbours. 0 is no block, and nothing happens.

        Raises: `UsageError` when no live block begins at `address`.
        Source: `DeviceCachingAllocator::free`, `free_block`.
        """
        if address == 0:
            return
        block = self._live.pop(address, None)
        if block is None:
            raise UsageError(
                f"free expects the address of a live block, got {address:#x}: freed before, or never handed out"
            )
        block.live = False
        pool = block.pool
        size, merged = block.size, 0
        self._allocated.current -= size  # what goes down is no peak
        self._requested.current -= block.requested
        if (before := block.prev) is not None and not before.live:
            self._merge(block, before)
            merged += 1
        if (after := block.next) is not None and not after.live:
            self._merge(block, after)
            merged += 1
        pool.insert(block)
        counts = self.counts
        if counts is not None:
            counts.free_block(pool.small, size, block.requested)
            if block.range is None:
                is_split = block.prev is not None or block.next is not None
                if is_split or merged:
                    counts.split(pool.small, is_split - merged, size - (0 if is_split else block.size))

    def empty_cache(self) -> None:
        """Return every segment without a live block to the driver. Expandable segments return every free page.

        Source: `emptyCache`, `release_cached_blocks`, `release_blocks`.
        """
        self.emptied += 1
        for pool in self._pools.values():
            for block in pool:
                if block.range is not None:
                    self._unmap(block)
                elif not block.split:
                    self._release(block)

    def reset_peak_stats(self) -> None:
        """Let every peak begin anew at the current value. Source: `resetPeakStats`."""
        for stat in (self._requested, self._allocated, self._reserved):
            stat.peak = stat.current
        if self.counts is not None:
            self.counts.reset_peaks()

    def stats(self) -> Stats:
        """Bytes and counts since the allocator was made. Source: `getStats`."""
        requested, allocated, reserved = copy(self._requested), copy(self._allocated), copy(self._reserved)
        return Stats(requested, allocated, allocated, reserved, self._segments, self._retries, self._ooms)

    def find_live(self, address: int) -> tuple[int, int]:
        """The bytes requested of the live block there, and its stream."""
        block = self._live[address]
        return block.requested, block.pool.stream

    def snapshot(self) -> tuple[Segment, ...]:
        """All segments in order of address; unmapped addresses are left out. Source: `snapshot`."""

        def view(block: Block) -> BlockView:
            requested = block.requested if block.live else None
            return BlockView(address=block.address, size=block.size, requested_bytes=requested)

        blocks = (*self._live.values(), *(block for pool in self._pools.values() for block in pool))
        return tuple(
            Segment(
                address=head.address,
                large=not head.pool.small,
                stream=head.pool.stream,
                expandable=head.range is not None,
                blocks=tuple(map(view, head.mapped_run())),
            )
            for head in sorted((b for b in blocks if b.prev is None or not b.prev.mapped), key=lambda b: b.address)
        )

    @property
    def requested_bytes(self) -> int:
        """Asked for and not given back, now."""
        return self._requested.current

    @property
    def allocated_bytes(self) -> int:
        """In blocks handed out, now."""
        return self._allocated.current

    @property
    def reserved_bytes(self) -> int:
        """Reserved from the driver, now."""
        return self._reserved.current

    # -- taking a block

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves `size` out of the pool. Source: `get_free_block`."""
        if self._collect_from is not None:
            self._searches[pool.small] += 1
        if self._takes_first:
            return pool.take_first(size)
        position = pool.first_fit(size)
        if position == len(pool):
            return None
        block = pool.block(position)
        # A block before unmapped addresses counts as what it could grow to, so that it is kept for last.
        while block.range is not None and position + 1 < len(pool):
            following = pool.block(position + 1)
            if following.growable_size >= block.growable_size:
                break
            block, position = following, position + 1
        limit = self.settings.max_split_bytes
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        return pool.take(position)

    def _hand_out(self, block: Block, size: int, nbytes: int) -> int:
        """Cut `size` off the front if the rest is worth keeping. Source: `should_split`, `alloc_found_block`."""
        pool, rest = block.pool, block.size - size
        if pool.small or self.settings.expandable_segments:
            split = rest >= MIN_BLOCK
        else:
            limit = self.settings.max_split_bytes
            split = rest > SMALL_SIZE and (limit is None or size < limit)
        counts = self.counts
        if counts is not None:
            counts.take_block(pool.small, size if split else block.size, nbytes)
            if block.range is None:  # source: `alloc_found_block`
                if block.prev is not None or block.next is not None:
                    counts.split(pool.small, 0 if split else -1, -(size if split else block.size))
                elif split:
                    counts.split(pool.small, 1, rest)
        if split:
            front = Block(pool, block.address, size, of=block.range)
            block.address += size
            block.size = rest
            front.link(block.prev, block)
            pool.insert(block)
            block = front
        block.live = True
        block.requested = nbytes
        address = block.address
        self._live[address] = block
        self._allocated.add(block.size)
        self._requested.add(nbytes)
        return address

    def _merge(self, block: Block, other: Block | None) -> None:
        """Absorb a free neighbour in the same state of mapping. Source: `try_merge_blocks`."""
        if other is None or other.live or other.mapped != block.mapped:
            return
        block.pool.remove(other)
        if other is block.prev:
            block.address = other.address
            block.link(other.prev, block.next)
        else:
            block.link(block.prev, other.next)
        block.size += other.size

    # -- asking the driver

    def _request_segment(self, pool: Pool, size: int) -> Block | None:
        """Ask the driver for a segment; free oversize blocks and ask; free everything and ask. The order of
        `DeviceCachingAllocator::malloc`."""
        if self._collect_from is not None:
            self._collect_garbage(self._reserved.current - self._collect_from)
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self._retries += 1
            block = self._grow(pool, size)
        return block

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` outside the pool, from new memory; None when refused. Source: `alloc_block`."""
        segment = self.settings.segment_size(size)
        if self._allowed is not None and self._reserved.current + segment > self._allowed:
            return None
        if self.settings.expandable_segments:
            return self._grow_range(pool, size)
        if not self._driver_gives(segment):
            return None
        self._segments += 1
        if self.counts is not None:
            self.counts.add_segment(segment, small=pool.small)
        return Block(pool, self._addresses.take(segment), segment)

    def _driver_gives(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self._reserved.current + nbytes > self.capacity_bytes:
            return False
        self._reserved.add(nbytes)
        return True

    def _grow_range(self, pool: Pool, size: int) -> Block | None:
        """Map pages until a free block has `size`. Source: `try_allocate_expandable_block`."""
        block = self._growth_place(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None, "a growth place has room for the request"
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _growth_place(self, pool: Pool, size: int) -> Block:
        """The lowest free and unmapped run with room for `size`, or a new range. Source: `find_expandable_block`."""
        for block in pool.unmapped_blocks():
            start = block.prev if block.prev is not None and not block.prev.live else block
            room, here = 0, start
            while room < size and not here.live:
                room += here.size
                if here.next is None:
                    break
                here = here.next
            if room >= size:
                return start
        page = SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes
        # A range as large as the request even beyond the device: the driver, not the address space, refuses it.
        nbytes = round_up(max(self._range_bytes, size), page)
        range_ = Range(self._addresses.take(nbytes), page)
        block = Block(pool, range_.address, nbytes, of=range_, mapped=False)
        pool.insert(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Put pages behind the first `nbytes` of an unmapped block, which joins its free neighbours. Source:
        `map_block`."""
        assert block.range is not None, "only expandable segments have unmapped blocks"
        mapped = round_up(nbytes, block.range.page)
        if not self._driver_gives(mapped):
            return False
        pool = block.pool
        if self.counts is not None:
            self.counts.add("reserved_bytes", mapped, small=pool.small)
        pool.remove(block)
        if mapped < block.size:
            rest = Block(pool, block.address + mapped, block.size - mapped, of=block.range, mapped=False)
            rest.link(block, block.next)
            pool.insert(rest)
            block.size = mapped
        block.mapped = True
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.insert(block)
        return True

    # -- giving memory back

    def _release(self, block: Block) -> None:
        """cudaFree of a whole free segment. Source: `release_block`."""
        block.pool.remove(block)
        self._addresses.give_back(block.address, block.size)
        self._reserved.add(-block.size)
        self._segments -= 1
        if self.counts is not None:
            self.counts.add_segment(-block.size, small=block.pool.small)

    def _unmap(self, block: Block) -> None:
        """Give the pages back that lie wholly in a free block. Source: `unmap_block`, `release_expandable_segment`."""
        assert block.range is not None, "only expandable segments are unmapped"
        base, page, pool = block.range.address, block.range.page, block.pool
        begin = base + round_up(block.address - base, page)
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            before = Block(pool, block.address, begin - block.address, of=block.range)
            before.link(block.prev, block)
            pool.insert(before)
        if end < block.address + block.size:
            after = Block(pool, end, block.address + block.size - end, of=block.range)
            after.link(block, block.next)
            pool.insert(after)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._merge(block, block.prev)
        self._merge(block, block.next)
        if block.split:
            pool.insert(block)
        self._reserved.add(begin - end)
        if self.counts is not None:
            self.counts.add("reserved_bytes", begin - end, small=pool.small)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release one oversize block that suffices, else the largest ones until they do. True if enough was freed.

        Source: `release_available_cached_blocks`.
        """
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        position = pool.first_fit(wanted)
        if position < len(pool) and (block := pool.block(position)).range is None:
            self._release(block)
            return True
        released = 0
        for block in [pool.block(i) for i in range(position - 1, -1, -1)]:
            if released >= wanted or block.size < limit:
                break
            if block.range is None:
                released += block.size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self, excess: int) -> None:
        """Give back whole large segments unused for longer than the average, until so many bytes are reclaimed.

        Source: `garbage_collect_cached_blocks`.
        """
        if excess <= 0:
            return
        unsplit = [block for (small, _), pool in self._pools.items() if not small for block in pool if not block.split]
        count, total_age = len(unsplit), sum(block.pool.age(block) for block in unsplit)
        candidates = [block for block in unsplit if block.range is None]
        reclaimed, freed = 0, True
        while reclaimed < excess and freed and count > 0:
            least_age = total_age / count
            old = [block for block in candidates if block.pool.age(block) >= least_age]
            candidates = [block for block in candidates if block.pool.age(block) < least_age]
            freed = bool(old)
            for block in old:
                reclaimed += block.size
                total_age -= block.pool.age(block)
                count -= 1
                self._release(block)
