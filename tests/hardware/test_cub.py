"""CUB's temporary storage, as an H200's allocator was asked for it."""

from __future__ import annotations

import pytest

from fxmem.hardware.context import radix_sort_bytes


@pytest.mark.parametrize(
    ("count", "key", "value", "bits", "nbytes"),
    [
        (3280, 8, 8, None, 70_655),
        (4096, 8, 8, None, 83_455),
        (10_240, 8, 8, None, 183_807),
        (1 << 20, 8, 8, None, 17_027_583),
        (1 << 20, 8, 8, 10, 17_015_295),
        (1 << 20, 8, 8, 43, 17_023_487),
        (20_000, 4, 8, 31, 252_927),
        (100_000, 4, 8, None, 1_228_287),
        (512_000, 4, 8, None, 6_251_007),
        (1 << 20, 8, 0, None, 8_592_895),
        (15, 4, 8, None, 1),
    ],
)
def test_sorts_of_an_h200(count: int, key: int, value: int, bits: int | None, nbytes: int) -> None:
    assert radix_sort_bytes(count, key, value, bits) == nbytes


def test_what_was_not_measured_is_unknown() -> None:
    assert radix_sort_bytes(1 << 20, 2, 8) is None
