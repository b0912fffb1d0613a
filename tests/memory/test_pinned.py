"""The allocator of pinned memory, beside what an H200 said (torch 2.11, `torch.cuda.host_memory_stats`)."""

from __future__ import annotations

from fxmem.memory.allocator_acts import PinnedPool

MIB = 1 << 20


def test_blocks_are_powers_of_two_and_are_used_again() -> None:
    pool, said = PinnedPool(), []
    first = pool.malloc(3_000_000)
    said.append((pool.allocated_bytes, pool.blocks))
    pool.malloc(4_000_000)
    said.append((pool.allocated_bytes, pool.blocks))
    pool.free(first)
    said.append((pool.allocated_bytes, pool.blocks))
    pool.malloc(2_500_000)
    said.append((pool.allocated_bytes, pool.blocks))
    # benchmarks/programs/card_programs/host_pinned.py, measured on an H200
    assert said == [(4_194_304, 1), (8_388_608, 2), (8_388_608, 2), (8_388_608, 2)]


def test_activations_on_the_host_take_the_same_blocks_in_each_step() -> None:
    pool = PinnedPool()
    for _ in range(3):
        blocks = [pool.malloc(8192 * 1024 * 4) for _ in range(13)] + [pool.malloc(4 * MIB) for _ in range(5)]
        for each in blocks:
            pool.free(each)
    # card_programs/host_activations.py: allocated bytes, blocks made, requests
    assert (pool.allocated_bytes, pool.blocks, pool.requests) == (457_179_136, 18, 54)


def test_statistics_have_torchs_names() -> None:
    pool = PinnedPool()
    block = pool.malloc(5)
    pool.malloc(4)
    pool.free(block)
    counts = pool.counts()
    assert (counts["allocated_bytes.current"], counts["num_host_alloc"], counts["num_host_free"]) == (12, 2, 0)
    names = ("current", "peak", "allocated", "freed")
    assert [counts[f"active_bytes.{each}"] for each in names] == [4, 12, 12, 8]
    assert [counts[f"active_requests.{each}"] for each in names] == [1, 2, 2, 1]
