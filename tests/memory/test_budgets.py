from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.errors import UsageError
from fxmem.memory.budgets import Budget, counted_bytes, parse
from fxmem.records.profile import Peak, Phase


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (8 << 30, Budget(nbytes=8 << 30)),
        ("8589934592", Budget(nbytes=8 << 30)),
        ("8GiB", Budget(nbytes=8 << 30)),
        (" 8 gib ", Budget(nbytes=8 << 30)),
        ("1.5GB", Budget(nbytes=1_500_000_000)),
        ("1,024 B", Budget(nbytes=1024)),
        ("512_000", Budget(nbytes=512_000)),
        (0.6, Budget(fraction=0.6)),
        ("0.6", Budget(fraction=0.6)),
        ("60%", Budget(fraction=0.6)),
        ("100 %", Budget(fraction=1.0)),
        (".5", Budget(fraction=0.5)),
    ],
)
def test_a_budget_is_read_as_it_is_written(spec: Any, expected: Budget) -> None:
    assert parse(spec) == expected


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "GiB",
        "8 GiBs",
        "8G",
        "-1",
        "-3GiB",
        0,
        -5,
        0.0,
        1.5,
        "1.5",
        "120%",
        "0",
        "nan",
        float("nan"),
        True,
        None,
        "1e9",
        "0.2 B",
    ],
)
def test_what_is_no_budget_is_refused_in_one_line(spec: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a budget as bytes .*got") as refused:
        parse(spec)
    assert "\n" not in str(refused.value)


@given(st.text())
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    try:
        budget = parse(text)
    except UsageError:
        return
    assert (budget.nbytes is None) != (budget.fraction is None)


def test_a_share_is_of_what_the_allocator_hands_out_where_it_is_modelled() -> None:
    peak = Peak(
        requested_bytes=1000, allocated_bytes=1024, reserved_bytes=2 << 20, phase=Phase.FORWARD, tick=0, by_kind={}
    )
    assert counted_bytes(peak) == 1024
    assert parse("50%").bytes_of(peak) == 512
    assert parse("50%").bytes_of(peak.model_copy(update={"allocated_bytes": None})) == 500
    assert parse("7").bytes_of(peak) == 7
