"""Rates of cards, and the least time of a step."""

from __future__ import annotations

import pytest

from fxmem.hardware.cards import CATALOGUE
from fxmem.hardware.roofline import step_seconds
from fxmem.records.profile import Kind, Phase, RecomputedOp, RestoredTensor
from tests.profiles import CPU, Log

RATES = {name: card.rates for name, card in CATALOGUE.items() if card.rates is not None}


def test_every_card_of_the_catalogue_has_rates_and_no_other() -> None:
    assert set(RATES) == {name for name, card in CATALOGUE.items() if card.target.device == "cuda"}


@pytest.mark.parametrize("name", RATES)
def test_bandwidth_is_two_transfers_a_clock_over_whole_chips(name: str) -> None:
    mhz = CATALOGUE[name].memory_clock_mhz
    chip = 128 if mhz < 4500 else 8  # bytes: a stack of HBM, two chips of GDDR
    chips = RATES[name].bandwidth / (2 * mhz * 1e6 * chip)
    assert chips == pytest.approx(round(chips), rel=0.04)


@pytest.mark.parametrize("name", RATES)
def test_float32_is_two_operations_a_clock_of_every_core(name: str) -> None:
    card, cores = CATALOGUE[name], {(7, 0): 64, (7, 5): 64, (8, 0): 64}
    rate = 2 * card.multi_processors * cores.get(card.target.capability or (0, 0), 128) * card.sm_clock_mhz * 1e6
    assert 0.8 < RATES[name].fp32 / rate < 1.15


def test_tensor_cores_are_not_slower_than_the_others() -> None:
    assert all(rates.fp32 <= rates.tf32 <= rates.half for rates in RATES.values())


def step(name: str, *, flops: int) -> float | None:
    log = Log(target=CATALOGUE[name].target if name in CATALOGUE else CPU)
    node = log.node("linear")
    with log.phase(Phase.FORWARD), log.op("aten.mm.default", node, Phase.FORWARD, flops=flops):
        log.allocate(1_000_000, Kind.OUTPUT)
    return step_seconds(log.profile())


def test_a_node_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    assert step("h100", flops=0) == pytest.approx(1_000_000 / 3.35e12)
    assert step("h100", flops=67 * 10**9) == pytest.approx(1e-3)


def test_what_is_made_again_reads_and_writes_and_is_read() -> None:
    log = Log(target=CATALOGUE["h100"].target)
    node = log.node("relu")
    with log.phase(Phase.FORWARD), log.op("aten.relu.default", node, Phase.FORWARD):
        log.allocate(1_000_000, Kind.OUTPUT)
    with log.phase(Phase.BACKWARD):
        with log.op("aten.relu.default", node, Phase.BACKWARD):
            log.allocate(1_000_000, Kind.TEMPORARY)
        with log.op("aten.threshold_backward.default", node, Phase.BACKWARD):
            log.allocate(1_000_000, Kind.TEMPORARY)
    once = log.profile()
    made_again = {
        "recomputed_ops": (RecomputedOp(op=1, read_bytes=500_000),),
        "restored": (RestoredTensor(node=node, storage=1),),
    }
    again = once.model_copy(update=made_again)
    assert step_seconds(once) == pytest.approx(3_000_000 / 3.35e12)
    assert step_seconds(again) == pytest.approx((1_000_000 + 1_500_000 + 1_000_000 + 1_000_000) / 3.35e12)


def test_no_estimate_without_rates() -> None:
    assert step("cpu", flops=1) is None
