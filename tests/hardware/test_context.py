"""What a process takes of a card beside the allocator: published sizes, and the range they give each card."""

from __future__ import annotations

import pytest

from fxmem.errors import UsageError
from fxmem.hardware import catalogue, context
from fxmem.hardware.catalogue import target
from fxmem.hardware.context import (
    ContextSize,
    context_range,
    explain_room,
    give_room,
    known_context_sizes,
    nccl_range,
    process_range,
    room_bytes,
)
from fxmem.memory.allocator import complete_timeline
from fxmem.records.profile import ProcessBytes, Target
from fxmem.show.facts import fits, peak_facts
from tests.profiles import small_profile

MIB = 1 << 20
CARDS = [name for name in catalogue.names() if name != "cpu"]


def capability(card: str) -> tuple[int, int] | None:
    """The catalogue's, None for a card that it does not have."""
    try:
        return target(card).capability
    except UsageError:
        return None


def test_every_context_size_has_a_source_and_its_cards_capability() -> None:
    rows = known_context_sizes()
    assert len(rows) > 80
    for row in rows:
        assert row.source
        assert 100 * MIB < row.nbytes < 4 << 30
        assert row.margin < row.nbytes / (2 if row.ranks else 4)
        assert bool(row.ranks) <= (row.state == "process group")
        assert capability(row.card) in (None, row.capability)
    assert len({row.model_dump_json() for row in rows}) == len(rows)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_of_the_catalogue_has_a_range(name: str) -> None:
    found = context_range(target(name))
    assert found is not None
    assert 100 * MIB <= found.low < found.high < 900 * MIB  # 858 of a program on an H200, the most that was seen


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("t4", 100, 179),  # 115 to 164 in messages with two decimals of GiB, 134.9 measured
        ("h100", 495, 766),  # 510 when vLLM starts; 766 measured after kernels of every kind, benchmarks/results/gpu
        ("rtx4090", 435, 519),
        ("a10", 209, 435),  # loading weights alone: a card at work of the same capability bounds it from above
    ],
)
def test_ranges_are_those_of_the_published_figures(name: str, low: int, high: int) -> None:
    found = context_range(target(name))
    assert found is not None
    assert (found.low // MIB, found.high // MIB) == (low, high)


@pytest.mark.parametrize(
    ("name", "ranks", "low", "high"),
    [
        ("h100", 1, 556, 564),  # 1,174 MiB of a group of one, less a context's 610 to 614
        ("h100", 8, 880, 1084),
        ("h100", 64, 880, 1084),
        ("h200", 4, 965, 999),
        ("a100-80gb", 2, 544, 918),
        ("rtx3090", 8, 112, 226),  # no link between them
    ],
)
def test_a_communicator_is_that_of_as_many_ranks_on_such_cards(name: str, ranks: int, low: int, high: int) -> None:
    card = target(name)
    found, one = nccl_range(card.among(ranks)), process_range(card.among(ranks), 0)
    assert found is not None
    assert one is not None
    assert (found.low // MIB, found.high // MIB) == (low, high)
    assert found.grounds in one.grounds
    assert room_bytes(card.among(ranks)) == (room_bytes(card) or 0) - low * MIB
    more = process_range(card.among(ranks), 0, groups=3)
    assert more is not None
    assert (more.low, more.high) == (one.low, one.high + 2 * 688 * MIB)


def test_published_processes_of_groups_are_within_the_range() -> None:
    """Those that were measured before anything but a collective had run; torch 2.6 made more of it."""
    rows = [each for each in known_context_sizes() if each.state.startswith("process group of ") and each.torch]
    held = [
        found is not None and found.low <= each.nbytes <= found.high
        for each in rows
        for found in [process_range(target(each.card).among(int(each.state.split()[-1])), 0)]
    ]
    assert (len(held), held.count(False)) == (16, 1)


def test_windows_keeps_a_share_and_reports_the_whole_board() -> None:
    card = target("rtx3090,os=windows")
    assert (card.memory_bytes, target("rtx5090,os=windows").memory_bytes) == (24 << 30, int(31.8 * (1 << 30)))
    found = context_range(card)
    assert found is not None
    assert (found.low >> 20, found.high >> 20) == (1126, 1769)  # 24.0 less 22.7 and 22.8 GiB, and loaded kernels
    assert explain_room(card) == "22.9 GiB of 24.0 GiB: Windows and a CUDA context take 1.10 GiB or more"
    others = context_range(target("rtx4090,os=windows"))
    assert others is not None
    assert "RTX 2080 Ti" in others.grounds


def test_what_other_programs_have_is_no_room() -> None:
    card = target("rtx4090,in-use=2GiB")
    assert room_bytes(card) == (room_bytes(target("rtx4090")) or 0) - (2 << 30)
    assert process_range(card, 5) == process_range(target("rtx4090"), 5)
    assert explain_room(card).endswith("a CUDA context takes 435.0 MiB or more, other programs have 2.00 GiB")
    assert room_bytes(give_room(card, 7)) == 7
    cpu = target("cpu").among(8)
    assert (cpu.ranks, process_range(cpu, 0)) == (0, None)


def row(card: str, nbytes: int, state: str = "working", margin: int = 0) -> ContextSize:
    return ContextSize(
        card=card, capability=target(card).capability or (0, 0), state=state, nbytes=nbytes, margin=margin, source="-"
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        row("NVIDIA H200", 500, margin=7),
        row("NVIDIA H200", 450, "bare"),
        row("NVIDIA H200", 2000, "process group of 8"),
        row("NVIDIA H200", 3000, "eager loading"),
        row("NVIDIA L4", 100, "bare"),
        row("NVIDIA L40S", 300),
    )
    monkeypatch.setattr(context, "known_context_sizes", lambda: rows)


@pytest.mark.parametrize(
    ("name", "low", "high", "count"),
    [
        ("h200", 450, 507, 2),
        ("gh200", 450, 507, 2),
        ("h100-pcie", 450, 507, 2),
        ("l4", 100, 300, 2),
        ("l40s", 300, 300, 1),
    ],
)
def test_one_process_on_one_card_counts(measured: None, name: str, low: int, high: int, count: int) -> None:
    found = context_range(target(name))
    assert found is not None
    assert (found.low, found.high) == (low, high)
    assert found.grounds.startswith(f"{count} published measurement")


def test_where_nothing_is_known_the_process_is_unknown(measured: None) -> None:
    for unknown in (target("b200"), target("cpu"), Target(name="mine", device="cuda", capability=(13, 0))):
        assert context_range(unknown) is None
    assert context_range(Target(name="mine", device="cuda", capability=(9, 0))) is not None
    assert complete_timeline(small_profile(target=target("b200")), {}).peak.process_bytes is None
    assert explain_room(target("b200")).endswith(": what a CUDA context takes of it is not known")
    assert explain_room(target("cpu")) == ""


def test_the_process_is_what_is_reserved_and_the_context(measured: None) -> None:
    profile = small_profile(target=target("h200"), torch_version="2.11.0")
    peak = complete_timeline(profile, {}).peak
    assert peak.reserved_bytes is not None
    grounds = "2 published measurements on NVIDIA H200, +/- 25 %"
    assert peak.process_bytes == ProcessBytes(
        low=peak.reserved_bytes + 450 * 3 // 4, high=peak.reserved_bytes + 507 * 5 // 4, grounds=grounds
    )
    (said,) = (fact.text for fact in peak_facts(profile, peak) if fact.key == "process")
    assert said.endswith(f"a range: {grounds}")
    assert "a CUDA context takes 450 B or more; other processes are not counted" in fits(profile, peak)[1]


def test_the_room_is_what_the_smallest_context_leaves(measured: None) -> None:
    card = target("h200").model_copy(update={"memory_bytes": 1000})
    assert room_bytes(card) == 550
    assert explain_room(card) == "550 B of 1000 B: a CUDA context takes 450 B or more"
    assert give_room(card, 549).memory_bytes == 999
    assert room_bytes(card.model_copy(update={"memory_bytes": None})) is None
    small = card.model_copy(update={"memory_bytes": 450})
    assert (room_bytes(small), room_bytes(target("cpu"))) == (450, None)
    assert explain_room(small) == "450 B of 450 B: a CUDA context takes 450 B or more and leaves nothing"


@pytest.mark.parametrize(("measured_bytes", "nearest"), [(5, 10), (15, 15), (25, 20)])
def test_a_range_is_compared_by_its_nearest_number(measured_bytes: int, nearest: int) -> None:
    assert ProcessBytes(low=10, high=20, grounds="").nearest(measured_bytes) == nearest
