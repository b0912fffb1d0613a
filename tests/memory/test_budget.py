from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.errors import UsageError
from fxmem.memory import allocator
from fxmem.memory.budget import Budget, BudgetShare, parse_budget, parse_bytes, peak_in_room
from fxmem.records.profile import Peak, Phase, Profile
from tests.profiles import small_profile


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (8 << 30, Budget(8 << 30)),
        ("8589934592", Budget(8 << 30)),
        ("8GiB", Budget(8 << 30)),
        (" 8 gib ", Budget(8 << 30)),
        ("1.5GB", Budget(1_500_000_000)),
        ("1,024 B", Budget(1024)),
        ("512_000", Budget(512_000)),
        (0.6, BudgetShare(0.6)),
        ("0.6", BudgetShare(0.6)),
        ("60%", BudgetShare(0.6)),
        ("100 %", BudgetShare(1.0)),
        (".5", BudgetShare(0.5)),
    ],
)
def test_a_budget_is_read_as_it_is_written(spec: Any, expected: Budget | BudgetShare) -> None:
    assert parse_budget(spec) == expected


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
        parse_budget(spec)
    assert "\n" not in str(refused.value)


@given(st.text())
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    try:
        budget = parse_budget(text)
    except UsageError:
        return
    assert budget.resolve(0).nbytes > 0 if isinstance(budget, Budget) else 0 < budget.fraction <= 1
    assert parse_budget(budget) is budget


def test_a_share_is_of_what_the_allocator_hands_out_where_it_is_modelled() -> None:
    peak = Peak(
        requested_bytes=1000, allocated_bytes=1024, reserved_bytes=2 << 20, phase=Phase.FORWARD, tick=0, by_kind={}
    )
    assert peak.counted_bytes == 1024
    assert parse_budget("50%").resolve(peak.counted_bytes) == Budget(512, bounds_allocator=False)
    assert peak.model_copy(update={"allocated_bytes": None}).counted_bytes == 1000
    assert parse_budget("7 B").resolve(peak.counted_bytes) == Budget(7)


def test_a_card_bounds_a_budget_in_bytes_and_no_share() -> None:
    assert Budget(11).bound(7) == Budget(7, asked_bytes=11)
    assert Budget(7).bound(11) == Budget(7).bound(None) == Budget(7)
    assert Budget(11, bounds_allocator=False).bound(7) == Budget(11, bounds_allocator=False)


def test_a_share_is_refused_where_bytes_are_needed() -> None:
    assert parse_bytes("7 B") == Budget(7)
    with pytest.raises(UsageError, match=r"expected --budget in bytes or with a unit \(16GiB\), got '60%'"):
        parse_bytes("60%", "--budget")


@pytest.fixture
def modelled() -> tuple[Profile, Peak]:
    """A step on a card, and its peak with the allocator's bytes."""
    profile = small_profile()
    return profile, allocator.complete_timeline(profile, {}).peak


def test_a_budget_in_bytes_bounds_the_reserved_bytes_a_share_the_allocated_ones(modelled: tuple[Profile, Peak]) -> None:
    profile, peak = modelled
    reserved, allocated = peak.reserved_bytes or 0, peak.allocated_bytes or 0
    assert peak.requested_bytes < allocated < reserved
    assert Budget(reserved).keeps(profile, peak)
    assert not Budget(allocated).keeps(profile, peak)
    assert Budget(allocated, bounds_allocator=False).keeps(profile, peak)
    assert not Budget(allocated - 1, bounds_allocator=False).keeps(profile, peak)
    assert peak_in_room(profile, peak, reserved).shortage == ""
    assert "It runs out" in peak_in_room(profile, peak, allocated).shortage


def test_without_an_allocator_the_requested_bytes_are_bounded(modelled: tuple[Profile, Peak]) -> None:
    profile, peak = modelled
    peak = peak.model_copy(update={"allocated_bytes": None, "reserved_bytes": None})
    used = peak.requested_bytes
    assert Budget(used).keeps(profile, peak)
    assert not Budget(used - 1).keeps(profile, peak)
    assert peak_in_room(profile, peak, used - 3).shortage == "Its peak, in backward, is 3 B more"


@pytest.mark.parametrize("parse", [parse_budget, parse_bytes])
def test_a_few_bytes_are_taken_for_a_slip(parse: Callable[[str], object]) -> None:
    with pytest.raises(UsageError, match=r"got '24', which is 24 bytes: 24GiB\?$"):
        parse("24")
    assert parse("24 B") == Budget(24)


@pytest.mark.parametrize("size", ["16g", "16 G"])
def test_a_unit_without_its_end_is_answered_with_the_whole(size: str) -> None:
    with pytest.raises(UsageError, match=r"got '16 ?[gG]': 16 ?[gG]iB\?$"):
        parse_bytes(size)


@pytest.mark.parametrize("size", ["64GB2", "0"])
def test_no_share_is_offered_where_none_is_taken(size: str) -> None:
    with pytest.raises(UsageError, match=r"expected --host as bytes \(8589934592\) or with a unit \(8GiB, 500MB\)"):
        parse_bytes(size, "--host")
