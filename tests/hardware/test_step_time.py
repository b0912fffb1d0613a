"""Rates of cards, and the estimated time of a step."""

from __future__ import annotations

import pytest

from fxmem.hardware.cards import CATALOGUE
from fxmem.hardware.step_time import estimate, step_seconds, time_assumption
from fxmem.records.profile import Phase, Profile, RecomputedOp, TensorInfo
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


def log_of(name: str, *ops: tuple[str, int, int | None], dtype: str = "float32") -> Profile:
    """A forward of one node: its ops by name, FLOPs and bytes moved."""
    log = Log(target=CATALOGUE[name].target if name in CATALOGUE else CPU)
    node = log.node("layer", outputs=(TensorInfo(shape=(1,), dtype=dtype),))
    with log.phase(Phase.FORWARD):
        for op, flops, moved in ops:
            with log.op(op, node, Phase.FORWARD, flops=flops, moved_bytes=moved):
                pass
    return log.profile()


@pytest.mark.parametrize(
    ("op", "dtype", "share", "rate"),
    [
        ("aten.mm.default", "float32", "products", "fp32"),
        ("aten.mm.default", "bfloat16", "products", "half"),
        ("aten.convolution.default", "float32", "convolutions", "tf32"),
        ("aten.convolution_backward.default", "float16", "convolutions", "half"),
    ],
)
def test_an_op_takes_the_longer_of_its_arithmetic_and_its_traffic(op: str, dtype: str, share: str, rate: str) -> None:
    card = CATALOGUE["h100"]
    reached, rates = card.reached["train"], RATES["h100"]
    bandwidth = reached.convolution_bandwidth if "convolution" in op else reached.bandwidth
    around = step_seconds(log_of("h100", (op, 8, 8), dtype=dtype)) or 0
    arithmetic = step_seconds(log_of("h100", (op, 10**12, 8), dtype=dtype))
    traffic = step_seconds(log_of("h100", (op, 8, 10**9), dtype=dtype))
    assert arithmetic == pytest.approx(10**12 / (getattr(reached, share) * getattr(rates, rate)) + around)
    assert traffic == pytest.approx(10**9 / (bandwidth * rates.bandwidth) + around)


def test_ops_run_one_after_another_and_no_faster_than_python_issues_them() -> None:
    one = ("aten.relu.default", 0, 10**10)
    alone = step_seconds(log_of("h100", one)) or 0
    assert step_seconds(log_of("h100", one, one)) == pytest.approx(2 * alone, rel=0.01)
    small = ("aten.relu.default", 0, 8)
    many = step_seconds(log_of("h100", *[small] * 1000)) or 0
    assert many > 1000 * CATALOGUE["h100"].reached["train"].launch_seconds
    assert many == pytest.approx(2 * (step_seconds(log_of("h100", *[small] * 500)) or 0), rel=0.01)


def test_what_python_takes_for_a_plan_counts_where_the_card_waits() -> None:
    small = ("aten.relu.default", 0, 8)
    plain = log_of("h100", *[small] * 100)
    again = plain.model_copy(
        update={"recomputed_ops": tuple(RecomputedOp(op=op, read_bytes=8) for op in range(50, 60))}
    )
    seconds = step_seconds(plain) or 0
    assert (step_seconds(again) or 0) == pytest.approx(1.7 * seconds, rel=0.01)
    assert (step_seconds(again, taped=True) or 0) == pytest.approx(5 * seconds, rel=0.01)
    large = log_of("h100", *[("aten.relu.default", 0, 10**10)] * 10)
    assert step_seconds(large, taped=True) == pytest.approx(step_seconds(large), rel=0.02)


@pytest.mark.parametrize("name", RATES)
def test_the_interval_is_around_the_estimate(name: str) -> None:
    time = estimate(log_of(name, ("aten.relu.default", 0, 10**9)))
    assert time is not None
    assert time.low_seconds < time.seconds < time.high_seconds
    assert all(0.2 < reached.bandwidth < 1.1 for reached in CATALOGUE[name].reached.values())


def test_no_estimate_without_rates_or_with_bytes_unknown() -> None:
    step = log_of("cpu").step
    assert estimate(log_of("cpu", ("aten.relu.default", 0, 8))) is None
    assert estimate(log_of("h100", ("aten.relu.default", 0, None))) is None
    assert time_assumption(CPU, step) is None
    assert time_assumption(CATALOGUE["h100"].target, step)
