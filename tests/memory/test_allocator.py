"""The caching allocator: cases to check with a pencil, torch's own answers, and what must hold for any order of
requests."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.errors import ExceededError, UsageError
from fxmem.hardware import catalogue
from fxmem.memory.allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    complete_timeline,
    levels,
    replay,
)
from fxmem.memory.allocator.blocks import AddressSpace
from fxmem.memory.allocator.stats import BlockView
from fxmem.memory.liveness import timeline
from fxmem.records.profile import Kind, Node, Op, Phase, Profile, Storage, Target
from fxmem.show.facts import plans_facts
from tests.profiles import CPU, TINY_CARD, Log, make_profile, profiles, small_profile

MIB = 1 << 20
NO_LIMIT = Target(name="any", device="cuda")


def sizes_of(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Of each segment, the smallest first, each block's size and whether it is handed out."""
    return [
        [(block.size, block.requested_bytes is not None) for block in segment.blocks]
        for segment in sorted(allocator.snapshot(), key=lambda segment: segment.size)
    ]


# --- where the driver places segments ---------------------------------------------------------------------------------


def test_segments_are_placed_in_the_lowest_gap_else_below_all_others() -> None:
    space = AddressSpace()
    first = space.take(20 * MIB)
    taken = [first - space.take(mib * MIB) >> 20 for mib in (20, 100, 158, 26, 12, 32)]
    # 20: a span of 32 below. 100: one of 128. 158: of 160. 26: behind the 100. 12: behind the lower of the 20s. 32: its
    # own span, for nothing is wider than the 12 behind the first.
    assert taken == [32, 160, 320, 60, 12, 352]
    space.give_back(first - (160 << 20), 100 * MIB)
    assert first - space.take(99 * MIB) >> 20 == 162  # what was given back, and the 2 behind the 158
    assert first - space.take(2 * MIB) >> 20 == 63  # of the 3 that are left of it


def test_what_is_given_back_joins_the_gaps_beside_it() -> None:
    space = AddressSpace()
    addresses = [space.take(20 * MIB) for _ in range(3)]  # with 12 MiB behind each
    for address in (addresses[2], addresses[0], addresses[1]):
        space.give_back(address, 20 * MIB)
    assert space.take(96 * MIB) == addresses[2]


def test_upward_segments_lie_one_above_the_other() -> None:
    space = AddressSpace(is_upward=True)
    first = space.take(20 * MIB)
    assert [space.take(mib * MIB) - first >> 20 for mib in (2, 100)] == [20, 22]
    space.give_back(first, 20 * MIB)
    assert space.take(12 * MIB) == first


def test_where_it_is_not_known_how_the_driver_places_segments_reserved_is_a_range() -> None:
    # Of two free blocks of 30 MiB one is half of a segment of 60: which is lower decides whether that is whole again.
    log = Log(target=TINY_CARD.model_copy(update={"memory_bytes": 1024 * MIB}))
    node = log.node("layer")
    with log.phase(Phase.FORWARD), log.op("aten.mm.default", node, Phase.FORWARD):
        alone = log.allocate(30 * MIB, Kind.TEMPORARY)
        log.free(log.allocate(60 * MIB, Kind.TEMPORARY))
        halves = [log.allocate(30 * MIB, Kind.TEMPORARY) for _ in range(2)]
        log.free(halves[1], alone)
        stays = log.allocate(30 * MIB, Kind.TEMPORARY)
        log.free(halves[0])
        log.free(log.allocate(60 * MIB, Kind.TEMPORARY), stays)
    profile = log.profile()
    peak = complete_timeline(profile, {}).peak
    assert peak.upward is not None
    assert (peak.reserved_bytes, peak.upward.reserved_bytes, peak.upward.fits) == (150 * MIB, 90 * MIB, True)
    (fact,) = plans_facts(profile, peak)
    assert fact.text == "90.0 MiB to 150.0 MiB reserved, as the driver places them: not seen on this card"
    small = profile.model_copy(update={"target": TINY_CARD.model_copy(update={"memory_bytes": 100 * MIB})})
    peak = complete_timeline(small, {}).peak
    assert (peak.fits, peak.upward and peak.upward.fits) == (False, True)
    (fact,) = plans_facts(small, peak)
    assert fact.text.endswith("not seen on this card; with each above the one before it fits")
    assert complete_timeline(profile, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).peak.upward is None
    known = profile.model_copy(update={"target": catalogue.target("h200")})
    assert complete_timeline(known, {}).peak.upward is None


# --- blocks and segments, by hand ---------------------------------------------------------------------------------


def test_a_morning_of_requests() -> None:
    """Every rule of the default settings once; the comments are the sums."""
    allocator = CachingAllocator()
    a = allocator.malloc(3)  # 512, the smallest block, cut from a segment of 2 MiB
    b = allocator.malloc(MIB)  # still small: the second block of that segment
    assert sizes_of(allocator) == [[(512, True), (MIB, True), (MIB - 512, False)]]

    c = allocator.malloc(MIB + 1)  # 1 MiB + 512 is large, cut from a segment of 20 MiB: 19 MiB - 512 remain
    d = allocator.malloc(7 * MIB + 13)  # 7 MiB + 512, from the remainder: 12 MiB - 1024 remain
    e = allocator.malloc(11 * MIB + 17)  # 11 MiB + 512 fits; the 1 MiB - 1536 left over is too little to split off
    assert sizes_of(allocator)[-1] == [(MIB + 512, True), (7 * MIB + 512, True), (12 * MIB - 1024, True)]

    f = allocator.malloc(13 * MIB + 19)  # from 10 MiB on a segment of its own, rounded up to 14 MiB, not split either
    assert sizes_of(allocator)[1] == [(14 * MIB, True)]

    stats = allocator.stats()
    assert stats.requested_bytes.current == 3 + MIB + (MIB + 1) + (7 * MIB + 13) + (11 * MIB + 17) + (13 * MIB + 19)
    assert stats.allocated_bytes.current == 512 + MIB + 20 * MIB + 14 * MIB
    assert stats.reserved_bytes.current == 2 * MIB + 20 * MIB + 14 * MIB
    assert (stats.segments, stats.alloc_retries, stats.ooms) == (3, 0, 0)

    allocator.free(c)
    allocator.free(e)  # the block between them is in use: nothing to merge with
    assert [block for block in sizes_of(allocator)[-1] if not block[1]] == [
        (MIB + 512, False),
        (12 * MIB - 1024, False),
    ]
    allocator.free(d)  # now one piece
    assert sizes_of(allocator)[-1] == [(20 * MIB, False)]
    assert allocator.malloc(19 * MIB) == c  # exactly 1 MiB is left over: more than 1 MiB would have been split off
    assert sizes_of(allocator)[-1] == [(20 * MIB, True)]

    for address in (a, b, c, f):
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == 36 * MIB  # kept for the next requests
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.snapshot() == ()
    assert allocator.stats().reserved_bytes.peak == 36 * MIB


def test_a_segment_of_its_own_from_10_mib_on() -> None:
    allocator = CachingAllocator()
    allocator.malloc(10 * MIB)
    allocator.malloc(10 * MIB - 512)
    assert sizes_of(allocator) == [[(10 * MIB, True)], [(10 * MIB - 512, True), (10 * MIB + 512, False)]]


def test_best_fit_then_lowest_address() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(nbytes * MIB) for nbytes in (30, 22, 22))
    for address in (second, third, first):
        allocator.free(address)
    # 22 MiB is closer than 30, and of two equal ones the lower wins, which is the younger.
    assert allocator.malloc(21 * MIB) == third
    assert allocator.malloc(21 * MIB) == second
    assert allocator.malloc(21 * MIB) == first


def test_small_requests_never_take_large_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(700)
    assert sizes_of(allocator) == [[(1024, True), (2 * MIB - 1024, False)], [(20 * MIB, False)]]


def test_a_block_stays_with_the_stream_that_it_was_allocated_on() -> None:
    """`get_free_block` and `BlockComparatorSize` of torch's allocator: blocks are sorted by stream first."""
    allocator = CachingAllocator()
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    second = allocator.malloc(30 * MIB, stream=3)
    assert second != first
    assert allocator.reserved_bytes == 60 * MIB
    small, other = allocator.malloc(512, stream=3), allocator.malloc(512)
    assert allocator.reserved_bytes == 64 * MIB  # a small segment each
    assert sorted((segment.size, segment.stream) for segment in allocator.snapshot()) == [
        (2 * MIB, 0), (2 * MIB, 3), (30 * MIB, 0), (30 * MIB, 3),
    ]  # fmt: skip
    for address in (second, small, other):
        allocator.free(address)
    assert allocator.malloc(29 * MIB) == first
    assert allocator.malloc(29 * MIB, stream=3) == second
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB


def test_what_one_stream_has_cached_goes_back_for_another() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(30 * MIB, stream=1))
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.stats().alloc_retries == 1


def test_pages_of_an_expandable_segment_are_one_streams() -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string("expandable_segments:True"), device_bytes=1 << 30)
    first = allocator.malloc(20 * MIB)
    second = allocator.malloc(20 * MIB, stream=1)
    allocator.free(first)
    assert allocator.malloc(40 * MIB) == first  # it grows where it is, by a page of 20 MiB
    assert first - second >= 1 << 30
    assert allocator.reserved_bytes == 60 * MIB


def test_a_segment_of_many_blocks_is_copied() -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string("expandable_segments:True"), device_bytes=8 << 30)
    addresses = [allocator.malloc(2 * MIB) for _ in range(2000)]
    copied, before = copy.deepcopy(allocator), sizes_of(allocator)
    assert sizes_of(copied) == before
    for address in addresses:
        copied.free(address)
    assert (sizes_of(allocator), copied.allocated_bytes) == (before, 0)


def test_blocks_that_wait_for_a_stream_give_a_range() -> None:
    log = Log(target=NO_LIMIT)
    node = log.node("layer")
    with log.phase(Phase.FORWARD), log.op("aten.mm.default", node, Phase.FORWARD):
        used = log.allocate(20 * MIB, Kind.TEMPORARY)
        log.free(used)
        log.free(log.allocate(20 * MIB, Kind.TEMPORARY))
    profile = log.profile()
    storages = tuple(
        each.model_copy(update={"used_on": (1,)}) if index == used else each
        for index, each in enumerate(profile.storages)
    )
    peak = complete_timeline(profile.model_copy(update={"storages": storages}), {}).peak
    assert (peak.reserved_bytes, peak.reserved_high_bytes) == (20 * MIB, 40 * MIB)
    assert complete_timeline(profile, {}).peak.reserved_high_bytes is None


def test_the_plans_of_each_cudnn_that_stands_for_the_targets_are_replayed() -> None:
    # A workspace of 40, 60 or 0 MiB beside a result of 50 MiB, on a card of 100 MiB.
    log = Log(target=TINY_CARD.model_copy(update={"memory_bytes": 100 * MIB}), cudnns=("9.8.0", "9.10.2", "9.19.0"))
    node = log.node("conv")
    with log.phase(Phase.FORWARD), log.op("aten.convolution.default", node, Phase.FORWARD):
        result = log.allocate(50 * MIB, Kind.TEMPORARY)
        workspace = log.allocate(40 * MIB, Kind.WORKSPACE)
        log.free(workspace)
        log.free(result)
    profile = log.profile()

    def take(nbytes: int, *others: int) -> Profile:
        changed = {"nbytes": nbytes * MIB, "other_bytes": tuple(each * MIB for each in others)}
        return profile.model_copy(
            update={"storages": (profile.storages[0], profile.storages[1].model_copy(update=changed))}
        )

    peak = complete_timeline(take(40, 60, 0), {}).peak
    assert (peak.reserved_bytes, peak.fits) == (90 * MIB, True)
    found = [(each.cudnn, each.reserved_bytes, each.fits) for each in peak.by_cudnn]
    assert found == [("9.8.0", 90 * MIB, True), ("9.10.2", 110 * MIB, False), ("9.19.0", 50 * MIB, True)]
    (fact,) = plans_facts(profile, peak)
    assert fact.text == (
        "50.0 MiB to 170.0 MiB reserved with the plans of cuDNN 9.8.0, 9.10.2, 9.19.0: fits with 9.8.0, 9.19.0 only"
    )
    assert complete_timeline(take(0, 60, 0), {}).peak.allocated_bytes == 50 * MIB
    alone = profile.model_copy(update={"cudnns": ()})
    assert complete_timeline(alone, {}).peak.by_cudnn == ()


def test_a_convolution_takes_the_next_plan_that_finds_room_and_keeps_to_it() -> None:
    # Three results of 50 MiB, two by one convolution whose plans have workspaces of 40, 30 and 0 MiB, on a card
    # of 170 MiB: beside the second there is room for 40, beside the third for 20.
    log = Log(target=TINY_CARD.model_copy(update={"memory_bytes": 170 * MIB}))
    node = log.node("conv")
    with log.phase(Phase.FORWARD), log.op("aten.convolution.default", node, Phase.FORWARD):
        results = [log.allocate(50 * MIB, Kind.TEMPORARY)]
        for _ in range(2):
            results.append(log.allocate(50 * MIB, Kind.TEMPORARY))
            log.free(log.allocate(40 * MIB, Kind.WORKSPACE))
        for result in results:
            log.free(result)
    profile = log.profile()

    def with_plans(*smaller: int) -> Profile:
        plans = tuple(each * MIB for each in smaller)
        storages = (
            each.model_copy(update={"smaller_bytes": plans}) if each.kind is Kind.WORKSPACE else each
            for each in profile.storages
        )
        return profile.model_copy(update={"storages": tuple(storages)})

    peak = complete_timeline(with_plans(30, 0), {}).peak
    assert (peak.fits, peak.smaller_plans) == (True, 1)
    assert (peak.allocated_bytes, peak.reserved_bytes) == (150 * MIB, 150 * MIB)  # from the second step on without any
    (fact,) = plans_facts(profile, peak)
    assert fact.text == (
        "fits as torch takes plans of cuDNN with a smaller workspace for 1 kind of convolution, for want of room"
    )
    first = replay(with_plans(30, 0), capacity_bytes=170 * MIB, max_steps=1)
    assert (first.allocated_bytes, first.smaller_plans) == (150 * MIB, 1)
    assert replay(with_plans(30, 15), capacity_bytes=170 * MIB).reserved_bytes == 166 * MIB
    for plans in ((), (30,)):
        peak = complete_timeline(with_plans(*plans), {}).peak
        assert (peak.fits, peak.smaller_plans) == (False, 0)
    roomy = with_plans(30, 0).model_copy(update={"target": TINY_CARD.model_copy(update={"memory_bytes": 200 * MIB})})
    peak = complete_timeline(roomy, {}).peak
    assert (peak.allocated_bytes, peak.smaller_plans) == (190 * MIB, 0)


def test_no_bytes_no_block() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.snapshot() == ()


@pytest.mark.parametrize(
    "call", [lambda a: a.free(4096), lambda a: [a.free(x) for x in [a.malloc(1)] * 2], lambda a: a.malloc(-1)]
)
def test_misuse_is_refused(call: Any) -> None:
    with pytest.raises(UsageError, match="expects"):
        call(CachingAllocator())


def test_snapshot_says_what_was_requested() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(700)
    (segment,) = allocator.snapshot()
    assert segment.blocks == (
        BlockView(address=address, size=1024, requested_bytes=700),
        BlockView(address=address + 1024, size=2 * MIB - 1024, requested_bytes=None),
    )
    assert (segment.address, segment.size, segment.large, segment.expandable) == (address, 2 * MIB, False, False)


def test_peaks_begin_anew() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(3 * MIB))
    allocator.reset_peak_stats()
    stats = allocator.stats()
    assert stats.requested_bytes.peak == stats.allocated_bytes.peak == 0
    assert stats.reserved_bytes.peak == 20 * MIB


# --- a driver with limits -----------------------------------------------------------------------------------------


def test_cached_segments_go_back_before_a_request_fails() -> None:
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    allocator.free(allocator.malloc(31 * MIB))  # a segment of 32 MiB, cached
    kept = allocator.malloc(12 * MIB)  # a piece of it
    allocator.free(kept)
    allocator.malloc(33 * MIB)  # 34 MiB more than the driver has left, until the cached 32 MiB are given back
    assert sizes_of(allocator) == [[(34 * MIB, True)]]
    stats = allocator.stats()
    assert (stats.alloc_retries, stats.ooms, stats.segments) == (1, 0, 1)


def test_out_of_memory_says_what_was_there() -> None:
    allocator = CachingAllocator(capacity_bytes=60 * MIB)
    allocator.malloc(31 * MIB)  # 32 MiB: the 1 MiB left over stays in the block
    allocator.malloc(2 * MIB)  # cut from 20 MiB, of which 18 MiB stay free
    with pytest.raises(
        OutOfMemory, match=r"out of memory: 19,922,944 bytes asked for \(20,971,520 from the driver\), 8,388,608 free"
    ) as caught:
        allocator.malloc(19 * MIB)
    error = caught.value
    assert isinstance(error, ExceededError)
    assert (error.asked_bytes, error.segment_bytes, error.free_bytes) == (19 * MIB, 20 * MIB, (60 - 52) * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (34 * MIB, 52 * MIB)
    assert error.largest_free_block_bytes == 18 * MIB
    assert (allocator.stats().ooms, allocator.stats().alloc_retries) == (1, 1)
    allocator.malloc(18 * MIB)  # it can be caught, and something smaller tried
    assert allocator.allocated_bytes == allocator.reserved_bytes == 52 * MIB


# --- what each setting changes ------------------------------------------------------------------------------------


def test_oversize_blocks_are_kept_whole() -> None:
    plain, limited = CachingAllocator(), CachingAllocator(AllocatorSettings.from_string("max_split_size_mb:20"))
    for allocator in (plain, limited):
        allocator.free(allocator.malloc(30 * MIB))
        allocator.malloc(12 * MIB)
    assert sizes_of(plain) == [[(12 * MIB, True), (18 * MIB, False)]]
    assert sizes_of(limited) == [[(12 * MIB, True)], [(30 * MIB, False)]]
    limited.malloc(20 * MIB)  # itself oversize, and 10 MiB are wasted, less than the 20 MiB allowed: taken whole
    assert sizes_of(limited) == [[(12 * MIB, True)], [(30 * MIB, True)]]


def test_a_split_limit_of_a_segment_defeats_the_cache() -> None:
    """PyTorch accepts 20, and then a segment of 20 MiB, once free again, is oversize itself: no smaller request gets
    it."""
    allocator = CachingAllocator(AllocatorSettings.from_string("max_split_size_mb:20"))
    for _ in range(3):
        allocator.free(allocator.malloc(2 * MIB))
    assert sizes_of(allocator) == [[(20 * MIB, False)]] * 3


@pytest.mark.parametrize(
    ("rounding", "asked", "taken"), [(20, 40, False), (21, 40, True), (40, 20, False), (41, 20, True)]
)
def test_how_much_an_oversize_request_may_waste(rounding: int, asked: int, taken: bool) -> None:
    """Of 60 MiB, 40 waste 20: less than 21, not less than 20. 20 are just oversize, and waste 40."""
    allocator = CachingAllocator(
        AllocatorSettings.from_string(f"max_split_size_mb:20,max_non_split_rounding_mb:{rounding}")
    )
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(asked * MIB)
    kept = [[(60 * MIB, True)]] if taken else [[(asked * MIB, True)], [(60 * MIB, False)]]
    assert sizes_of(allocator) == kept


@pytest.mark.parametrize(
    ("cached", "asked", "left"),
    [
        ((40, 30, 22), 50, [22, 50]),  # none is large enough: the largest go first, 40 + 30 are enough
        ((70,), 45, [46]),  # large enough, and not handed out because 25 MiB would be wasted: it goes
        ((40, 20, 20), 60, [20, 60]),  # 20 is oversize, and 40 + 20 are just enough
        ((50, 45), 26, [26, 50]),  # both would waste too much: the smaller goes
    ],
)
def test_oversize_blocks_go_back_before_everything_does(cached: tuple[int, ...], asked: int, left: list[int]) -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string("max_split_size_mb:20"), capacity_bytes=100 * MIB)
    for address in [allocator.malloc(mib * MIB) for mib in cached]:
        allocator.free(address)
    allocator.malloc(asked * MIB)
    assert [sum(size for size, _ in blocks) for blocks in sizes_of(allocator)] == [mib * MIB for mib in left]
    assert allocator.stats().alloc_retries == 0


def test_large_segment_size() -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string("large_segment_size_mb:12"))
    allocator.malloc(3 * MIB)
    assert sizes_of(allocator) == [[(3 * MIB, True), (9 * MIB, False)]]


@pytest.mark.parametrize(
    ("text", "nbytes", "size"),
    [
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("", 5 * MIB + 1, 5 * MIB + 512),
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:4", 2049, 2560),  # 2048 / 4 = 512
        ("roundup_power2_divisions:4", 1200, 1536),  # a quarter of 1024 would be less than 512: plain rounding
        ("roundup_power2_divisions:4", 5 * MIB + 1, 6 * MIB),
        ("roundup_power2_divisions:4", 8 * MIB, 8 * MIB),
        ("roundup_power2_divisions:1", 5 * MIB + 1, 5 * MIB + 512),
        (
            "roundup_power2_divisions:[64:8,256:4,>:2]",
            MIB + 1,
            MIB + MIB // 8,
        ),  # the first entry holds below it as well
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 100 * MIB, 104 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 130 * MIB + 1, 130 * MIB + 512),  # 128 MiB is named by no entry
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 300 * MIB, 320 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 600 * MIB, 768 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 100 << 30, 128 << 30),  # the last interval has no end
        ("roundup_power2_divisions:[>:4]", 5 * MIB + 1, 6 * MIB),
        ("roundup_power2_divisions:[>:4]", MIB + 1, MIB + 512),
        ("roundup_power2_divisions:[131072:2]", 40 << 30, 48 << 30),  # beyond the table: its last entry
    ],
)
def test_round_size(text: str, nbytes: int, size: int) -> None:
    assert AllocatorSettings.from_string(text).round_size(nbytes) == size


def test_memory_fraction() -> None:
    allocator = CachingAllocator(
        AllocatorSettings(per_process_memory_fraction=0.5), capacity_bytes=90 * MIB, device_bytes=100 * MIB
    )
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(51 * MIB)
    assert caught.value.free_bytes == 50 * MIB
    allocator.malloc(50 * MIB)
    with pytest.raises(UsageError, match="memory of the device"):
        CachingAllocator(AllocatorSettings(per_process_memory_fraction=0.5))


@pytest.mark.parametrize(
    ("threshold", "retries", "segments"),
    [("garbage_collection_threshold:0.5,", 0, [40, 50]), ("garbage_collection_threshold:0.8,", 1, [50]), ("", 1, [50])],
)
def test_garbage_collection_takes_the_oldest(threshold: str, retries: int, segments: list[int]) -> None:
    """100 MiB, of which 90 are allowed. When 50 MiB are asked for, 30 + 40 are cached: over half of 90, not over 0.8 of
    it.

    The 30 were in the cache for 2 searches, the 40 for 1. Above the average of 1.5 are the 30, and 40 + 50 is allowed.
    Without collection 70 + 50 is too much, and everything goes.
    """
    allocator = CachingAllocator(
        AllocatorSettings.from_string(f"{threshold}per_process_memory_fraction:0.9"), capacity_bytes=100 * MIB
    )
    for mib in (30, 40, 50):
        allocator.free(allocator.malloc(mib * MIB))
    assert [sum(size for size, _ in blocks) for blocks in sizes_of(allocator)] == [mib * MIB for mib in segments]
    assert allocator.stats().alloc_retries == retries


def test_garbage_collection_stops_at_the_threshold() -> None:
    """160 MiB are allowed, 70 are cached, and the threshold is 40: the older 30 are just enough."""
    allocator = CachingAllocator(
        AllocatorSettings.from_string("garbage_collection_threshold:0.25,per_process_memory_fraction:0.5"),
        capacity_bytes=320 * MIB,
    )
    for mib in (30, 40, 50):
        allocator.free(allocator.malloc(mib * MIB))
    assert sizes_of(allocator) == [[(40 * MIB, False)], [(50 * MIB, False)]]


def test_expandable_segments_grow_and_shrink_in_place() -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string("expandable_segments:True"), capacity_bytes=100 * MIB)
    first = allocator.malloc(25 * MIB)  # two pages of 20 MiB
    assert sizes_of(allocator) == [[(25 * MIB, True), (15 * MIB, False)]]
    allocator.malloc(20 * MIB)  # the 15 MiB left over and one more page
    assert sizes_of(allocator) == [[(25 * MIB, True), (20 * MIB, True), (15 * MIB, False)]]
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.stats().segments == 0  # as PyTorch counts

    allocator.free(first)
    allocator.empty_cache()  # of the free 25 and 15 MiB only the first page is wholly free
    assert sizes_of(allocator) == [[(5 * MIB, False), (20 * MIB, True), (15 * MIB, False)]]
    assert allocator.snapshot()[0].address == first + 20 * MIB
    assert allocator.reserved_bytes == 40 * MIB

    assert (
        allocator.malloc(25 * MIB) == first
    )  # the lowest place with room: the page that went, and just the 5 MiB after it
    assert sizes_of(allocator) == [[(25 * MIB, True), (20 * MIB, True), (15 * MIB, False)]]


def test_a_memory_fraction_bounds_expandable_segments_by_what_is_asked() -> None:
    """`alloc_block` compares what is reserved and the request's own segment; pages are mapped after that."""
    settings = AllocatorSettings.from_string("expandable_segments:True,per_process_memory_fraction:0.5")
    allocator = CachingAllocator(settings, capacity_bytes=100 * MIB)
    allocator.malloc(25 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(16 * MIB)  # one more than the 15 MiB that are there
    allocator.malloc(15 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    tight = CachingAllocator(settings, capacity_bytes=100 * MIB)
    tight.malloc(45 * MIB)
    assert tight.reserved_bytes == 60 * MIB  # of the 50 MiB that it may have


def test_room_to_grow_is_kept_for_last() -> None:
    """12 MiB fit more closely into the last 15 MiB, but those can grow: the 18 MiB in the middle serve them."""
    allocator = CachingAllocator(AllocatorSettings.from_string("expandable_segments:True"), capacity_bytes=100 * MIB)
    hole = [allocator.malloc(mib * MIB) for mib in (5, 18, 2)][1]
    allocator.free(hole)
    assert sizes_of(allocator) == [[(5 * MIB, True), (18 * MIB, False), (2 * MIB, True), (15 * MIB, False)]]
    assert allocator.malloc(12 * MIB) == hole


def test_pages_move_where_segments_are_stuck() -> None:
    """18 MiB in use pin a whole segment of 60 MiB, of an expandable one only a page: 45 MiB more fit into 100 or do
    not."""

    def pinned(text: str) -> CachingAllocator:
        allocator = CachingAllocator(AllocatorSettings.from_string(text), capacity_bytes=100 * MIB)
        big, small = allocator.malloc(60 * MIB), allocator.malloc(40 * MIB)
        allocator.free(big)
        allocator.malloc(18 * MIB)
        allocator.free(small)
        return allocator

    with pytest.raises(OutOfMemory):
        pinned("").malloc(45 * MIB)
    movable = pinned("expandable_segments:True")
    movable.malloc(45 * MIB)
    assert movable.allocated_bytes == 63 * MIB


# --- the settings' language ---------------------------------------------------------------------------------------


def test_settings_from_string() -> None:
    assert AllocatorSettings.from_string("") == AllocatorSettings()
    parsed = AllocatorSettings.from_string(
        "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8,"
        "per_process_memory_fraction:0.9,backend:native,pinned_num_register_threads:8,"
    )
    assert parsed == AllocatorSettings(
        max_split_bytes=128 * MIB,
        expandable_segments=True,
        garbage_collection_threshold=0.8,
        per_process_memory_fraction=0.9,
    )
    assert AllocatorSettings.from_string("max_split_size_mb:64,max_split_size_mb:128").max_split_bytes == 128 * MIB
    assert AllocatorSettings.from_string("large_segment_size_mb:32").max_non_split_rounding_bytes == 32 * MIB
    assert AllocatorSettings.from_string("roundup_power2_divisions:[1:2,4:0,8:4]").roundup_power2_divisions == (
        2,
        0,
        0,
        4,
        *[0] * 12,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_mb:128", "unknown key 'max_split_mb'; PyTorch 2.11 knows backend, expandable_segments, "),
        ("expandable_segments", "expected key:value"),
        ("max_split_size_mb:64;expandable_segments:True", "expected key:value"),
        ("max_split_size_mb:19", "refuses less than 20; got '19'"),
        ("max_split_size_mb:20,large_segment_size_mb:24", "refuses less than 24; got '20'"),
        ("max_split_size_mb:128MB", "whole number of MiB"),
        ("max_non_split_rounding_mb:5", "refuses less than 20"),
        ("large_segment_size_mb:10", "refuses less than 11"),
        ("garbage_collection_threshold:1", r"number in \(0.0, 1.0\); got '1'"),
        ("garbage_collection_threshold:high", r"number in \(0.0, 1.0\); got 'high'"),
        ("per_process_memory_fraction:1.5", r"number in \[0.0, 1.0\]; got '1.5'"),
        ("expandable_segments:true", "True or False, in this spelling; got 'true'"),
        ("backend:cudaMallocAsync", "only backend:native is modelled"),
        ("roundup_power2_divisions:3", "power of 2 as a number of divisions; got '3'"),
        ("roundup_power2_divisions:[64:3]", "power of 2 as a number of divisions, or 0 for none; got '3'"),
        ("roundup_power2_divisions:[100:4]", "power of 2 as an interval in MiB; got '100'"),
        ("roundup_power2_divisions:[64]", "expects MIB:DIVISIONS, got '64'"),
    ],
)
def test_settings_that_pytorch_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AllocatorSettings.from_string(text)


# --- torch's own answers ------------------------------------------------------------------------------------------


def requests(seed: int, count: int) -> Iterator[tuple[str, int, int]]:
    """`("malloc", id, nbytes)`, `("free", id, 0)` and a rare `("empty", 0, 0)`, from a generator that never changes."""
    state, made = seed, 0
    live: list[int] = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        dice, pick, exponent, fraction = state >> 57, state >> 40 & 0xFFFF, state >> 32 & 0x1F, state >> 12 & 0xFFFFF
        if dice == 0:
            yield "empty", 0, 0
        elif dice < 66 or not live:
            nbytes = 1 << min(exponent, 27)
            yield "malloc", made, nbytes + (nbytes * fraction >> 20)
            live.append(made)
            made += 1
        else:
            yield "free", live.pop(pick % len(live)), 0


def stream_of(name: int, streams: int) -> int:
    """On which of so many streams an allocation is made; 0 is the default one."""
    return (name * 2654435761 >> 16) % streams


def answers(allocator: CachingAllocator, seed: int, count: int, streams: int = 1) -> Iterator[str]:
    """One line per request: the address, the bytes requested, allocated and reserved, and the three counts."""
    held: dict[int, int] = {}
    for verb, name, nbytes in requests(seed, count):
        head = verb
        if verb == "malloc":
            try:
                held[name] = allocator.malloc(nbytes, stream=stream_of(name, streams))
                head = str(held[name])
            except OutOfMemory:
                head = "oom"
        elif verb == "free":
            allocator.free(held.pop(name, 0))
        else:
            allocator.empty_cache()
        stats = allocator.stats()
        yield (
            f"{head} {stats.requested_bytes.current} {stats.allocated_bytes.current} {stats.reserved_bytes.current}"
            f" {stats.segments} {stats.alloc_retries} {stats.ooms}"
        )


TORCH_ANSWERS = [
    ("", 1048576, 1, 1, (3457934063, 3459475456, 4387241984, 0, 0, "f631cd44caa587b5")),
    ("", 1048576, 1, 4, (3457934063, 3459555840, 6585057280, 0, 0, "6f923fc5a79b0ff1")),
    ("", 900, 2, 1, (919988233, 922596864, 943718400, 202, 197, "38f125a5fd0f69a9")),
    ("", 900, 2, 4, (905970371, 907638784, 943718400, 248, 211, "621e056f8f46840b")),
    ("expandable_segments:True", 1048576, 3, 1, (3364553755, 3364567040, 3550478336, 0, 0, "5fa6f5849cc0c4b4")),
    ("expandable_segments:True", 1048576, 3, 4, (3364553755, 3364567040, 3890216960, 0, 0, "19efcf57cfe9644c")),
    ("expandable_segments:True", 900, 4, 1, (881855968, 881876480, 931135488, 246, 229, "fd59b6fecdbb6e28")),
    ("expandable_segments:True", 900, 4, 4, (886133729, 886151168, 935329792, 279, 242, "485e3192532c3408")),
    ("max_split_size_mb:32", 700, 5, 1, (717974640, 729441280, 734003200, 231, 203, "c9bd21e16afe5e84")),
    ("max_split_size_mb:32", 700, 5, 4, (701706806, 707490816, 734003200, 277, 211, "bc7e5582f3fed752")),
    (
        "max_split_size_mb:20,max_non_split_rounding_mb:40,expandable_segments:True",
        700,
        6,
        1,
        (690218481, 690224640, 723517440, 224, 197, "69529ff4f5cba29c"),
    ),
    (
        "max_split_size_mb:20,max_non_split_rounding_mb:40,expandable_segments:True",
        700,
        6,
        4,
        (666265667, 666271744, 727711744, 254, 204, "43e565247b024756"),
    ),
    (
        "roundup_power2_divisions:[64:8,256:4,>:2]",
        1048576,
        7,
        1,
        (6676925986, 6721439744, 8206155776, 0, 0, "10ccbd6ff303077e"),
    ),
    (
        "roundup_power2_divisions:[64:8,256:4,>:2]",
        1048576,
        7,
        4,
        (6676925986, 6719479808, 9628024832, 0, 0, "2d685637d2b56c6b"),
    ),
    (
        "roundup_power2_divisions:4,large_segment_size_mb:48",
        800,
        8,
        1,
        (731197160, 788917760, 838860800, 246, 242, "d4ad744f868415aa"),
    ),
    (
        "roundup_power2_divisions:4,large_segment_size_mb:48",
        800,
        8,
        4,
        (687806509, 752037888, 838860800, 303, 288, "4c8de690d7c2d07d"),
    ),
    (
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
        1200,
        9,
        1,
        (984617565, 985929728, 1006632960, 239, 239, "1ef000d13d7c0d2b"),
    ),
    (
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
        1200,
        9,
        4,
        (895549458, 897762304, 1006632960, 259, 259, "f11811f9eed671b8"),
    ),
    (
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,max_split_size_mb:64,large_segment_size_mb:30,roundup_power2_divisions:16",
        1000,
        10,
        1,
        (912854507, 937277952, 943718400, 193, 193, "6441f289a087337e"),
    ),
    (
        "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,max_split_size_mb:64,large_segment_size_mb:30,roundup_power2_divisions:16",
        1000,
        10,
        4,
        (900173068, 917527552, 943718400, 192, 192, "740c269320265b69"),
    ),
]
"""Settings, device, seed and streams; what libc10_cuda.so of torch 2.11.0+cu130 answered to `requests` (`make
releases`): peaks of requested, allocated and reserved bytes, retries, failures, and the SHA-256 of all lines of
`answers`, addresses included.

The library ran without a GPU: cudaMalloc, cudaFree, cuMemCreate, cuMemMap and their like were replaced by a counter
that refuses beyond the device's memory and places what it grants the way `fxmem.memory.allocator` says it does.
"""


@pytest.mark.parametrize(("text", "device_mib", "seed", "streams", "expected"), TORCH_ANSWERS)
def test_torch_answers_the_same(
    text: str, device_mib: int, seed: int, streams: int, expected: tuple[int, int, int, int, int, str]
) -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string(text), capacity_bytes=device_mib * MIB)
    digest = hashlib.sha256()
    for line in answers(allocator, seed, 3000, streams):
        digest.update(line.encode() + b"\n")
    stats = allocator.stats()
    peaks = (
        stats.requested_bytes.peak,
        stats.allocated_bytes.peak,
        stats.reserved_bytes.peak,
        stats.alloc_retries,
        stats.ooms,
    )
    assert (*peaks, digest.hexdigest()[:16]) == expected


# --- what holds for any order of requests -------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 4 * MIB),
    st.integers(1, 80 * MIB),
    st.sampled_from([1, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]),
)
SETTINGS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:24,large_segment_size_mb:24,expandable_segments:True",
        "roundup_power2_divisions:[1:8,16:2]",
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8",
    ]
)
ACTIONS = st.lists(st.one_of(SIZES, st.floats(0, 1, exclude_max=True), st.none()), max_size=40)
"""A size asks for memory, a number below 1 says which of the live blocks goes, None empties the cache."""


def act(allocator: CachingAllocator, actions: list[int | float | None]) -> Iterator[dict[int, int]]:
    """Do it, and give the live addresses with their requests after each action. Refused requests are passed over."""
    live: dict[int, int] = {}
    for action in actions:
        if action is None:
            allocator.empty_cache()
        elif isinstance(action, int):
            try:
                address = allocator.malloc(action)
            except OutOfMemory:
                continue
            assert address not in live
            live[address] = action
        elif live:
            address = list(live)[int(action * len(live))]
            allocator.free(address)
            del live[address]
        yield live


@given(text=SETTINGS, capacity_mib=st.sampled_from([60, 150, 100_000]), actions=ACTIONS)
@settings(max_examples=150, deadline=None)
def test_blocks_tile_their_segments(text: str, capacity_mib: int, actions: list[int | float | None]) -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string(text), capacity_bytes=capacity_mib * MIB)
    for live in act(allocator, actions):
        segments = allocator.snapshot()
        end = 0
        found: dict[int, int] = {}
        for segment in segments:
            assert segment.address >= end
            end = segment.address
            for block, following in zip(segment.blocks, [*segment.blocks[1:], None], strict=True):
                assert block.address == end
                assert block.size > 0
                end += block.size
                if block.requested_bytes is None:
                    assert following is None or following.requested_bytes is not None, "free neighbours merge"
                else:
                    assert block.requested_bytes <= block.size
                    found[block.address] = block.requested_bytes
        assert found == live
        stats = allocator.stats()
        assert stats.reserved_bytes.current == sum(segment.size for segment in segments) <= capacity_mib * MIB
        handed_out = sum(
            block.size for segment in segments for block in segment.blocks if block.requested_bytes is not None
        )
        assert stats.allocated_bytes.current == stats.active_bytes.current == handed_out
        assert stats.requested_bytes.current == sum(live.values())
        assert stats.requested_bytes.current <= stats.allocated_bytes.current <= stats.reserved_bytes.current
        for stat in (stats.requested_bytes, stats.allocated_bytes, stats.reserved_bytes):
            assert stat.current <= stat.peak


@given(text=SETTINGS.filter(lambda text: "max_split" not in text), actions=ACTIONS, nbytes=SIZES)
@settings(max_examples=100, deadline=None)
def test_what_was_just_freed_comes_back(text: str, actions: list[int | float | None], nbytes: int) -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string(text), capacity_bytes=100_000 * MIB)
    for _ in act(allocator, actions):
        pass
    address = allocator.malloc(nbytes)
    before = allocator.snapshot()
    allocator.free(address)
    assert allocator.malloc(nbytes) == address
    assert allocator.snapshot() == before


@given(text=SETTINGS, actions=ACTIONS)
@settings(max_examples=100, deadline=None)
def test_nothing_is_left_when_all_is_freed(text: str, actions: list[int | float | None]) -> None:
    allocator = CachingAllocator(AllocatorSettings.from_string(text), capacity_bytes=500 * MIB)
    live: dict[int, int] = {}
    for now in act(allocator, actions):
        live = now
    for address in list(live):
        allocator.free(address)
    allocator.empty_cache()
    stats = allocator.stats()
    assert (
        stats.requested_bytes.current,
        stats.allocated_bytes.current,
        stats.reserved_bytes.current,
        stats.segments,
    ) == (0, 0, 0, 0)
    assert allocator.snapshot() == ()


# --- a step in a loop ---------------------------------------------------------------------------------------------


def pencil_profile() -> Profile:
    """A training step whose sizes (MiB, but for the output) are small primes or nearly, one event a tick."""
    log = Log(target=NO_LIMIT)
    node = log.node("fc")
    for nbytes, kind in ((3, Kind.PARAMETER), (5, Kind.OPTIMIZER_STATE), (33, Kind.INPUT)):
        log.resident(nbytes * MIB, kind)
    with log.phase(Phase.FORWARD), log.op("aten.f", node, Phase.FORWARD):
        y = log.allocate(31 * MIB, Kind.SAVED)
        log.free(log.allocate(47 * MIB, Kind.WORKSPACE))
        z = log.allocate(29 * MIB, Kind.SAVED)
        log.allocate(700, Kind.OUTPUT)
    with log.phase(Phase.BACKWARD), log.op("aten.f_backward", node, Phase.BACKWARD):
        grad = log.allocate(37 * MIB, Kind.TEMPORARY)
        log.free(z)
        grad_w = log.allocate(3 * MIB, Kind.GRADIENT)
        log.free(log.allocate(59 * MIB, Kind.WORKSPACE))
        log.free(grad, y)
    with log.phase(Phase.OPTIMIZER), log.op("aten.mul", node, Phase.OPTIMIZER):
        log.free(log.allocate(3 * MIB, Kind.TEMPORARY))
        log.free(grad_w)
    return log.profile()


def test_a_step_with_a_pencil() -> None:
    """The segments of step 1, in MiB, and who cuts them up in step 2.

    - 20: parameter 3 and 17 free; of these the gradient takes 3, then the state 5, then the scratch of the optimizer 3
    - 34: input 33, the rest is too little to split off (so in every segment below that is larger than its first
      request)
    - 32: y 31
    - 48: workspace 47, then z 29; in step 2 z takes the 38, being closer, and grad 37 takes this one
    - 2: the output
    - 38: grad 37; in step 2 z 29
    - 60: workspace 59
    """
    result = replay(pencil_profile())
    assert result.reserved_bytes == (20 + 34 + 32 + 48 + 2 + 38 + 60) * MIB
    # while the workspace of 59 is there: parameter, state, input, y, output, grad, gradient, workspace
    assert result.requested_bytes == (3 + 5 + 33 + 31 + 37 + 3 + 59) * MIB + 700
    assert result.allocated_bytes == (3 + 5 + 34 + 32 + 37 + 3 + 60) * MIB + 1024
    assert (result.steps, result.warmup_steps, result.shortage) == (2, 1, None)

    peaks = {
        peak.phase: (peak.requested_bytes, peak.allocated_bytes, peak.active_bytes, peak.reserved_bytes)
        for peak in result.phases
    }
    forward = ((3 + 5 + 33 + 31 + 47) * MIB, (3 + 5 + 34 + 32 + 48) * MIB)
    optimizer = ((3 + 5 + 33 + 3 + 3) * MIB + 700, (3 + 5 + 34 + 3 + 3) * MIB + 1024)
    assert peaks[Phase.FORWARD] == (*forward, forward[1], 234 * MIB)
    assert peaks[Phase.BACKWARD] == (171 * MIB + 700, 174 * MIB + 1024, 174 * MIB + 1024, 234 * MIB)
    assert peaks[Phase.OPTIMIZER] == (*optimizer, optimizer[1], 234 * MIB)


def loop(*storages: tuple[int, Kind, int, int], ticks: int, names: tuple[str, ...] = (), **fields: Any) -> Profile:
    """A profile of storages (MiB, kind, birth, death)."""
    return make_profile(
        ticks=ticks,
        storages=[
            Storage(nbytes=mib * MIB, kind=kind, birth=birth, death=death, name=names[i] if names else "")
            for i, (mib, kind, birth, death) in enumerate(storages)
        ],
        **{"target": NO_LIMIT, **fields},
    )


def test_residents_are_placed_in_order() -> None:
    """A capacity of nothing refuses the first: the parameter, though the input has the lower index."""
    profile = loop(
        (30, Kind.INPUT, 0, 2),
        (40, Kind.WORKSPACE, 0, 2),
        (50, Kind.PARAMETER, 0, 2),
        (60, Kind.OPTIMIZER_STATE, 0, 2),
        ticks=2,
    )
    order = []
    for capacity in (0, 50, 80, 120):
        shortage = replay(profile, capacity_bytes=capacity * MIB).shortage
        assert shortage is not None
        assert (shortage.step, shortage.phase, shortage.op, shortage.node) == (1, None, None, None)
        order.append(profile.storages[shortage.storage].kind)
    assert order == [Kind.PARAMETER, Kind.INPUT, Kind.WORKSPACE, Kind.OPTIMIZER_STATE]


@pytest.mark.parametrize(("op", "reserved"), [(None, 132), (0, 200)])
def test_a_librarys_workspace_splits_what_is_free_when_its_first_op_runs(op: int | None, reserved: int) -> None:
    """As cuBLAS's did on an H100 in VGG-16: the next step no longer finds the 100 MiB in one piece."""
    passing = Storage(nbytes=100 * MIB, kind=Kind.WORKSPACE, birth=1, death=2)
    held = Storage(nbytes=32 * MIB, kind=Kind.WORKSPACE, birth=0, death=4, op=op)
    node = Node(name="linear", op="call_module", target="linear")
    product = Op(name="aten.mm.default", node=0, phase=Phase.FORWARD, begin=2, end=3)
    profile = make_profile(ticks=4, storages=[passing, held], nodes=[node], ops=[product], target=NO_LIMIT)
    assert replay(profile).reserved_bytes == reserved * MIB


def test_a_librarys_workspace_comes_after_the_output_and_before_the_next_operator() -> None:
    """Of 102 free MiB the output takes 30, then the workspace 32. The next output, of 70, has to be reserved, though it
    is of the same tick. Were the workspace placed after that, 134 MiB would do."""
    storages = [
        Storage(nbytes=102 * MIB, kind=Kind.TEMPORARY, birth=1, death=2),
        Storage(nbytes=30 * MIB, kind=Kind.TEMPORARY, birth=3, death=6),
        Storage(nbytes=70 * MIB, kind=Kind.TEMPORARY, birth=4, death=5),
        Storage(nbytes=32 * MIB, kind=Kind.WORKSPACE, birth=0, death=6, op=0),
    ]
    nodes = [Node(name=name, op="call_module", target=name) for name in ("first", "second")]
    ops = [Op(name="aten.mm.default", node=node, phase=Phase.FORWARD, begin=3 + node, end=4 + node) for node in (0, 1)]
    profile = make_profile(ticks=6, storages=storages, nodes=nodes, ops=ops, target=NO_LIMIT)
    assert replay(profile, max_steps=1).reserved_bytes == 172 * MIB


def training(activation: int = 40) -> Profile:
    """A parameter of 30 MiB, an activation, a gradient of 30 and optimizer state of 40, the update at ticks 5 to 8."""
    log = Log(target=NO_LIMIT)
    node = log.node("fc")
    log.resident(30 * MIB, Kind.PARAMETER, name="w")
    log.resident(40 * MIB, Kind.OPTIMIZER_STATE, name="w.exp_avg")
    with log.phase(Phase.FORWARD), log.op("aten.mm", node, Phase.FORWARD):
        y = log.allocate(activation * MIB, Kind.SAVED)
    with log.phase(Phase.BACKWARD), log.op("aten.mm_backward", node, Phase.BACKWARD):
        g = log.allocate(30 * MIB, Kind.GRADIENT, name="w")
        log.free(y)
    with log.phase(Phase.OPTIMIZER):
        log.free(g)
    return log.profile()


def test_the_first_step_makes_the_optimizer_state_after_the_gradients() -> None:
    """In step 1 the state takes the activation's segment; so step 2 needs another, and only then does the loop repeat
    itself."""
    result = replay(training())
    assert result.reserved_bytes == (30 + 40 + 30 + 40) * MIB
    assert (result.steps, result.warmup_steps) == (3, 2)
    shortage = replay(training(), capacity_bytes=99 * MIB).shortage
    assert shortage is not None
    assert (shortage.step, shortage.phase, shortage.op) == (1, Phase.BACKWARD, "aten.mm_backward")
    assert training().storages[shortage.storage].kind is Kind.GRADIENT
    shortage = replay(training(activation=10), capacity_bytes=99 * MIB).shortage
    assert shortage is not None
    assert (shortage.step, shortage.phase) == (1, Phase.OPTIMIZER)
    assert training().storages[shortage.storage].kind is Kind.OPTIMIZER_STATE


def test_shortage_of_a_later_step() -> None:
    """100 MiB hold the first step. In the second, the state is where the activation was, and the activation finds no
    place."""
    shortage = replay(training(), capacity_bytes=100 * MIB).shortage
    assert shortage is not None
    assert (shortage.step, shortage.phase, shortage.storage) == (2, Phase.FORWARD, 2)
    assert (shortage.op, shortage.node) == ("aten.mm", "fc")
    refused = shortage.refused
    assert (refused.asked_bytes, refused.segment_bytes, refused.free_bytes) == (40 * MIB, 40 * MIB, 30 * MIB)
    assert (refused.allocated_bytes, refused.reserved_bytes) == (70 * MIB, 70 * MIB)
    result = replay(training(), capacity_bytes=100 * MIB)
    assert (result.requested_bytes, result.allocated_bytes, result.reserved_bytes) == (None, None, None)
    assert (result.phases, result.warmup_steps) == ((), None)
    assert replay(training(), capacity_bytes=139 * MIB).shortage is not None
    assert replay(training(), capacity_bytes=140 * MIB).shortage is None


def test_a_gradient_carried_into_the_next_step() -> None:
    """The old gradient dies after the new one is born: from the second step on, which first has an old one, they change
    places each step, and the loop repeats after two."""
    ticks = 4
    old, new = (30, Kind.GRADIENT, 0, 2), (30, Kind.GRADIENT, 1, ticks)
    result = replay(loop(old, new, ticks=ticks))
    assert (result.requested_bytes, result.reserved_bytes) == (60 * MIB, 60 * MIB)
    assert (result.warmup_steps, result.steps) == (2, 4)
    lost = loop(old, new, ticks=ticks, names=("", "logits"))  # a name that is lost when the next step begins
    assert replay(lost) == result
    other = loop((20, *old[1:]), new, ticks=ticks)  # not the same one: one is dropped, the other made anew
    assert replay(other).reserved_bytes == 50 * MIB
    assert replay(other).warmup_steps == 1


def test_a_batch_that_dies_within_the_step_is_made_anew() -> None:
    result = replay(loop((30, Kind.INPUT, 0, 1), (40, Kind.TEMPORARY, 2, 3), ticks=4))
    assert (result.requested_bytes, result.reserved_bytes) == (40 * MIB, 70 * MIB)
    assert result.warmup_steps is not None


def test_the_cache_pays_for_a_smaller_card() -> None:
    """30 + 30, and later 55 in a segment of 56: 116 MiB, of which 60 are given back where the card has less."""
    profile = loop((30, Kind.TEMPORARY, 1, 3), (30, Kind.TEMPORARY, 2, 4), (55, Kind.TEMPORARY, 5, 6), ticks=7)
    assert replay(profile).reserved_bytes == 116 * MIB
    first = replay(profile, capacity_bytes=90 * MIB, max_steps=1)
    assert (first.steps, first.warmup_steps) == (1, None)
    assert first.reserved_bytes == 60 * MIB
    later = replay(profile, capacity_bytes=90 * MIB)
    assert later.reserved_bytes == 86 * MIB  # one of the 30 in the 56, the other beside it


def test_settings_reach_the_replay() -> None:
    profile = loop((30, Kind.TEMPORARY, 1, 2), (25, Kind.TEMPORARY, 3, 5), (4, Kind.TEMPORARY, 4, 6), ticks=7)
    plain, expandable = (
        replay(profile, settings=AllocatorSettings.from_string(text)) for text in ("", "expandable_segments:True")
    )
    assert (plain.reserved_bytes, expandable.reserved_bytes) == (30 * MIB, 40 * MIB)


def test_what_cannot_be_replayed() -> None:
    with pytest.raises(UsageError, match="'cpu'"):
        replay(small_profile(target=CPU))
    with pytest.raises(UsageError, match="max_steps"):
        replay(small_profile(), max_steps=0)


def test_a_memory_fraction_is_of_the_target() -> None:
    """The driver would give 300 MiB, more than the 234 that are needed; half of the card is 512 or 200."""
    half = AllocatorSettings(per_process_memory_fraction=0.5)
    for card_mib, fit in ((1024, True), (400, False)):
        profile = pencil_profile().model_copy(
            update={"target": TINY_CARD.model_copy(update={"memory_bytes": card_mib * MIB})}
        )
        assert (replay(profile, capacity_bytes=300 * MIB, settings=half).shortage is None) is fit


@st.composite
def logs(draw: st.DrawFn) -> Profile:
    """A step as a run would log it: one event a tick. Some residents die in it, some of what it makes survives it."""
    log = Log(target=NO_LIMIT)
    node = log.node("n")
    alive = [log.resident(draw(SIZES), draw(st.sampled_from(list(Kind)))) for _ in range(draw(st.integers(0, 4)))]
    for phase in Phase:
        with log.phase(phase), log.op("aten.f", node, phase):
            for action in draw(st.lists(st.one_of(SIZES, st.none()), max_size=8)):
                if action is not None:
                    alive.append(
                        log.allocate(action, draw(st.sampled_from([Kind.GRADIENT, Kind.OUTPUT, Kind.TEMPORARY])))
                    )
                elif alive:
                    log.free(alive.pop(draw(st.integers(0, len(alive) - 1))))
    return log.profile()


@given(profile=logs(), text=SETTINGS)
@settings(max_examples=100, deadline=None)
def test_requested_bytes_are_the_live_bytes(profile: Profile, text: str) -> None:
    """Two ways to the same number: the allocator's counter, and the sum over live ranges."""
    result = replay(profile, settings=AllocatorSettings.from_string(text), capacity_bytes=1 << 40)
    live = timeline(profile).live_bytes
    assert result.requested_bytes == max(live)
    assert result.allocated_bytes is not None
    assert result.reserved_bytes is not None
    assert result.requested_bytes <= result.allocated_bytes <= result.reserved_bytes
    for span, peak in zip(profile.phases, result.phases, strict=True):
        assert peak.requested_bytes == max(live[max(span.begin - 1, 0) : span.end])


@given(profile=profiles(), capacity=st.integers(0, 8 * MIB))
@settings(max_examples=100, deadline=None)
def test_any_profile_fits_or_says_why_not(profile: Profile, capacity: int) -> None:
    profile = profile.model_copy(update={"target": TINY_CARD})
    result = replay(profile, capacity_bytes=capacity)
    if result.shortage is None:
        assert result.reserved_bytes is not None
        assert result.reserved_bytes <= capacity
    else:
        refused = result.shortage.refused
        assert profile.storages[result.shortage.storage].nbytes == refused.asked_bytes > 0
        assert refused.segment_bytes > refused.free_bytes
    assert replay(profile, capacity_bytes=1 << 40).shortage is None


# --- over the step ---------------------------------------------------------------------------------------------------


def test_levels_are_those_of_the_blocks_by_tick() -> None:
    """30 and 14 MiB have segments of their own; 3 MiB are cut from one of 20, where 5 MiB find room too. What is freed
    stays reserved."""
    profile = loop(
        (30, Kind.PARAMETER, 0, 5),
        (14, Kind.TEMPORARY, 1, 3),
        (3, Kind.SAVED, 2, 5),
        (5, Kind.TEMPORARY, 4, 5),
        ticks=5,
    )
    held = levels(profile, AllocatorSettings())
    assert held.allocated_bytes == tuple(mib * MIB for mib in (30, 44, 47, 33, 38))
    assert held.reserved_bytes == (64 * MIB,) * 5  # as the step before left it


@given(profile=logs(), text=SETTINGS.filter(lambda text: "per_process" not in text))
@settings(max_examples=40, deadline=None)
def test_the_highest_level_is_the_peak_of_the_replay(profile: Profile, text: str) -> None:
    configured = AllocatorSettings.from_string(text)
    held, found = levels(profile, configured), replay(profile, settings=configured)
    assert len(held.allocated_bytes) == len(held.reserved_bytes) == len(timeline(profile).live_bytes)
    assert max(held.allocated_bytes, default=0) == found.allocated_bytes
    assert all(
        allocated <= reserved for allocated, reserved in zip(held.allocated_bytes, held.reserved_bytes, strict=True)
    )
