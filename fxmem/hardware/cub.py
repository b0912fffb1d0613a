"""What CUB, NVIDIA's library of parallel primitives, takes for itself.

Read off an H200's allocator (torch 2.11, CUDA 13.0), 130 sorts of 3,280 to 1,048,576 items, all to the byte
(`benchmarks/programs/card_runs.py`: `script/lengths`, `script/read_backs`). Other architectures share the formula; the
items of a block are theirs, which moves a kilobyte for each block.
"""

from __future__ import annotations

from math import ceil

SCAN_BYTES = 1279
"""Temporary storage of a scan of 3,280 to 11,200 items, and of what is built on one; those of more are not known and
taken to be the same."""
_ALIGNMENT = 256
_BINS = 256
"""Of a digit of eight bits, one pass for each digit."""
_SINGLE_BLOCK_BYTES = 256 * 9 * 8
"""Keys, or values where these are larger, that one block sorts without temporary storage."""
_ITEMS = {(8, 8): 4608, (4, 8): 5376, (8, 0): 5760}
"""Items of a block by bytes of a key and of a value."""


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int = 0, bits: int | None = None) -> int | None:
    """Temporary storage of `cub::DeviceRadixSort` with one sweep (`SortPairs`, `SortKeys`): keys and values a second
    time, a histogram of 8-byte counts for each pass, what blocks tell each other, and room for alignment.

    Args:
        count: items.
        key_bytes: of a key.
        value_bytes: of a value; 0 sorts keys alone.
        bits: of a key that are sorted by; None for all.

    Returns:
        Bytes; None for sizes that were not measured.
    """
    if count * max(key_bytes, value_bytes) <= _SINGLE_BLOCK_BYTES:
        return 1
    items = _ITEMS.get((key_bytes, value_bytes))
    if items is None:
        return None
    passes = ceil((8 * key_bytes if bits is None else bits) / 8)
    twice = sum(_align(count * each) for each in (key_bytes, value_bytes))
    return _ALIGNMENT - 1 + twice + passes * _BINS * 8 + _ALIGNMENT + ceil(count / items) * _BINS * 4


def _align(nbytes: int) -> int:
    return ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
