"""`PYTORCH_CUDA_ALLOC_CONF`: the settings of PyTorch's CUDA caching allocator, and the sizes that follow from them.

Source: `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp` as of torch 2.11; the size rules are those
of `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field

from fxmem.errors import UsageError
from fxmem.records.profile import Record
from fxmem.records.units import round_up

MIB: Final = 1 << 20
MIN_BLOCK: Final = 512
"""Every block is a multiple of this (`kMinBlockSize`)."""
SMALL_SIZE: Final = 1 * MIB
"""Largest block of the small pool (`kSmallSize`)."""
SMALL_SEGMENT: Final = 2 * MIB
"""Segment of the small pool (`kSmallBuffer`)."""
LARGE_SEGMENT: Final = 20 * MIB
"""Segment that blocks of 1 to 10 MiB are cut from, unless `large_segment_size_mb` says otherwise."""
MIN_LARGE_ALLOC: Final = 10 * MIB
"""From here on a block gets a segment of its own (`kMinLargeAlloc`)."""
ROUND_LARGE: Final = 2 * MIB
"""Such a segment is a multiple of this (`kRoundLarge`)."""

_INTERVALS: Final = 16


class AllocatorSettings(Record):
    """The part of `PYTORCH_CUDA_ALLOC_CONF` that decides where device memory goes. The defaults are PyTorch's."""

    max_split_bytes: Annotated[int, Field(gt=0)] | None = None
    """Free blocks of this size and above ("oversize") serve only oversize requests and are never split. None: no such
    limit."""
    max_non_split_rounding_bytes: Annotated[int, Field(gt=0)] = LARGE_SEGMENT
    """An oversize request takes an oversize block only if less than this is wasted."""
    large_segment_bytes: Annotated[int, Field(gt=MIN_LARGE_ALLOC)] = LARGE_SEGMENT
    """Segment for blocks of 1 to 10 MiB, and page of the large pool's expandable segment."""
    garbage_collection_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the allowed memory above which unused cached segments are given back early. PyTorch collects only
    where `per_process_memory_fraction` limits the memory; without such a limit this has no effect."""
    roundup_power2_divisions: Annotated[tuple[int, ...], Field(min_length=_INTERVALS, max_length=_INTERVALS)] = (
        0,
    ) * _INTERVALS
    """Steps per power of two that sizes round up to, for sizes from 1 MiB, 2 MiB, … 32 GiB; below and above, the first
    and the last apply. Powers of 2; 0 or 1: plain multiples of 512 bytes."""
    expandable_segments: bool = False
    """One range of addresses per pool, mapped page by page, instead of many segments."""
    per_process_memory_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the device's memory the process allows itself; 1: no limit of its own."""
    segments_upward: bool = False
    """Not PyTorch's but the driver's: whether it places each segment above the one before (`AddressSpace`)."""

    @classmethod
    def from_string(cls, text: str) -> AllocatorSettings:
        """Parse `PYTORCH_CUDA_ALLOC_CONF`, e.g. `max_split_size_mb:128,expandable_segments:True`.

        Spaces do not count, the last of repeated keys counts, and keys that do not move device memory (`pinned_*`, …)
        are accepted and ignored. A value PyTorch would misread silently (`128MB` as 128) is refused.

        Raises: `UsageError` for an unknown key or a value PyTorch refuses, with PyTorch's own limit.
        Source: `AcceleratorAllocatorConfig::parseArgs`, `CUDAAllocatorConfig::parseArgs`.
        """
        values = dict(_entries("".join(text.split())))
        for key in values:
            if key not in _KNOWN_KEYS:
                raise _error(f"unknown key {key!r}; PyTorch 2.11 knows {', '.join(sorted(_KNOWN_KEYS))}")
        if values.get("backend", "native") != "native":
            raise _error(f"only backend:native is modelled, got backend:{values['backend']}")
        large_mib = _mib("large_segment_size_mb", values.get("large_segment_size_mb", "20"), MIN_LARGE_ALLOC // MIB + 1)
        fields: dict[str, object] = dict.fromkeys(
            ("large_segment_bytes", "max_non_split_rounding_bytes"), large_mib * MIB
        )
        for key, field in (
            ("max_split_size_mb", "max_split_bytes"),
            ("max_non_split_rounding_mb", "max_non_split_rounding_bytes"),
        ):
            if key in values:
                fields[field] = _mib(key, values[key], large_mib) * MIB
        for key in ("garbage_collection_threshold", "per_process_memory_fraction"):
            if key in values:
                fields[key] = _fraction(key, values[key], open_ended=key == "garbage_collection_threshold")
        if "roundup_power2_divisions" in values:
            fields["roundup_power2_divisions"] = _divisions(values["roundup_power2_divisions"])
        if (value := values.get("expandable_segments", "False")) not in ("True", "False"):
            raise _error(f"expandable_segments takes True or False, in this spelling; got {value!r}")
        fields["expandable_segments"] = value == "True"
        return cls.model_validate(fields)

    def round_size(self, nbytes: int) -> int:
        """Size of the block for a request of `nbytes` > 0. A free block that is not split may be larger.

        Source: `round_size`, `roundup_power2_next_division`, `AcceleratorAllocatorConfig::roundup_power2_divisions`.
        """
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        floor = 1 << (nbytes.bit_length() - 1)
        return round_up(nbytes, max(MIN_BLOCK, floor // divisions) if divisions > 1 else MIN_BLOCK)

    def segment_size(self, size: int) -> int:
        """Bytes requested from the driver for a block of `size` that no free block serves. Source:
        `get_allocation_size`."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        return self.large_segment_bytes if size < MIN_LARGE_ALLOC else round_up(size, ROUND_LARGE)


DEFAULT_SETTINGS: Final = AllocatorSettings()
"""What PyTorch does when `PYTORCH_CUDA_ALLOC_CONF` is not set."""

_KNOWN_KEYS: Final = frozenset(
    """
    backend expandable_segments garbage_collection_threshold graph_capture_record_stream_reuse large_segment_size_mb
    max_non_split_rounding_mb max_split_size_mb per_process_memory_fraction pinned_num_register_threads
    pinned_reserve_segment_size_mb pinned_use_background_threads pinned_use_cuda_host_register
    pinned_use_hip_host_register release_lock_on_cudamalloc release_lock_on_hipmalloc roundup_power2_divisions
    """.split()
)

_ENTRY: Final = re.compile(r"(?P<key>[^,:\[\]]+):(?P<value>\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


def _error(text: str) -> UsageError:
    return UsageError(f"allocator settings: {text}")


def _entries(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _ENTRY.match(text, position)
        if match is None:
            raise _error(f"expected key:value, separated by commas, got {text[position:]!r} in {text!r}")
        yield match["key"], match["value"]
        position = match.end()


def _mib(key: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise _error(f"{key} takes a whole number of MiB, and PyTorch refuses less than {least}; got {value!r}")
    return int(value)


def _fraction(key: str, value: str, *, open_ended: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0 < number < 1 if open_ended else 0 <= number <= 1):
        raise _error(f"{key} takes a number in {'(0.0, 1.0)' if open_ended else '[0.0, 1.0]'}; got {value!r}")
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """`4`, or `[64:8,256:4,>:1]`: from 64 MiB on 8, from 256 MiB on 4, above 1.

    As in PyTorch the first entry also counts for everything below it, `>` for everything above the entry before it, and
    an interval that no entry names is not rounded: `128:` in the example.

    Source: `AcceleratorAllocatorConfig::parseRoundUpPower2Divisions`.
    """
    if not value.startswith("["):
        return (_power_of_two(value, "a number of divisions"),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = 0
    for position, entry in enumerate(value[1:-1].split(",")):
        boundary, colon, count = entry.partition(":")
        if not colon:
            raise _error(f"roundup_power2_divisions expects MIB:DIVISIONS, got {entry!r} in {value!r}")
        number = 0 if count == "0" else _power_of_two(count, "a number of divisions, or 0 for none")
        if boundary == ">":
            divisions[last + 1 :] = [number] * (_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(boundary, "an interval in MiB").bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            divisions[:last] = [number] * last
        divisions[last] = number
    return tuple(divisions)


def _power_of_two(text: str, what: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise _error(f"roundup_power2_divisions takes a power of 2 as {what}; got {text!r}")
    return int(text)
