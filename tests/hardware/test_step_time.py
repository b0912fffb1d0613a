"""Rates of cards, and the estimated time of a step."""

from __future__ import annotations

import pytest

from fxmem.hardware.catalogue import CATALOGUE, host_bytes_per_second
from fxmem.hardware.step_time import estimate, step_seconds, time_assumption
from fxmem.records.profile import Kind, Phase, Profile, RecomputedOp, TensorInfo
from tests.profiles import CPU, Log

RATES = {name: card.rates for name, card in CATALOGUE.items() if card.rates is not None}


def test_every_card_of_the_catalogue_has_rates_and_no_other() -> None:
    assert set(RATES) == {name for name, card in CATALOGUE.items() if card.target.device == "cuda"}


@pytest.mark.parametrize("name", RATES)
def test_bandwidth_is_two_transfers_a_clock_over_whole_chips(name: str) -> None:
    mhz = CATALOGUE[name].memory_clock_mhz
    chip = 128 if mhz < 4500 else 4  # bytes: a stack of HBM, a chip of GDDR
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


def test_bfloat16_products_have_no_rate_where_tensor_cores_have_none() -> None:
    products, sums = ("aten.mm.default", 10**9, 10**6), ("aten.add.Tensor", 10**6, 10**6)
    assert estimate(log_of("t4", products, dtype="bfloat16")) is None
    assert estimate(log_of("t4", products, dtype="float16")) is not None
    assert estimate(log_of("t4", sums, dtype="bfloat16")) is not None
    assert estimate(log_of("l4", products, dtype="bfloat16")) is not None


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


def test_an_op_computes_in_what_it_makes_and_not_in_what_a_layer_of_several_returns() -> None:
    def seconds(dtype: str) -> float:
        log = Log(target=CATALOGUE["h100"].target)
        node = log.node("encoder", outputs=(TensorInfo(shape=(1,), dtype="float32"),))
        with log.phase(Phase.FORWARD), log.op("aten.mm.default", node, Phase.FORWARD, flops=10**12, moved_bytes=8):
            log.allocate(8, Kind.TEMPORARY, dtype=dtype)
        return step_seconds(log.profile()) or 0

    for dtype in ("float32", "bfloat16"):
        assert seconds(dtype) == step_seconds(log_of("h100", ("aten.mm.default", 10**12, 8), dtype=dtype))


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


GB = 10**9


def log_of_copies(*ops: tuple[Phase, int, int]) -> Profile:
    """On an RTX 4090, whose link carries 26 GB a second: ops by phase, bytes moved by the card, and bytes copied."""
    log = Log(target=CATALOGUE["rtx4090"].target)
    node = log.node("layer", outputs=(TensorInfo(shape=(1,), dtype="float32"),))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        with log.phase(phase):
            for _, moved, copied in (each for each in ops if each[0] is phase):
                fields = {"host_bytes": copied, "stream": 1} if copied else {}
                with log.op("aten.add.Tensor", node, phase, flops=0, moved_bytes=moved, **fields):
                    pass
    return log.profile()


def seconds(*ops: tuple[Phase, int, int]) -> float:
    found = step_seconds(log_of_copies(*ops))
    assert found is not None
    return found


SENT, FETCHED = (Phase.FORWARD, 0, 26 * GB), (Phase.BACKWARD, 0, 26 * GB)
"""Copies of one second."""
WORK, WORK_BACK = (Phase.FORWARD, 3000 * GB, 0), (Phase.BACKWARD, 3000 * GB, 0)
"""Several seconds of the card's own."""


def test_copies_to_the_host_cost_nothing_beside_longer_work() -> None:
    assert seconds(SENT, WORK, SENT, WORK) == pytest.approx(seconds(WORK, WORK), rel=1e-3)


@pytest.mark.parametrize("copy", [SENT, FETCHED])
def test_a_third_copy_waits_for_the_first(copy: tuple[Phase, int, int]) -> None:
    work = (copy[0], 3000 * GB, 0)
    taken = seconds(work)
    assert seconds(copy, copy, work) == pytest.approx(taken, rel=1e-3)
    assert seconds(copy, copy, copy, work) == pytest.approx(taken + 1, rel=1e-3)
    assert seconds(copy, work, copy, work, copy, work) == pytest.approx(3 * taken, rel=1e-3)


def test_copies_that_a_profile_is_without_take_what_they_do_in_it() -> None:
    with_them = log_of_copies(WORK, SENT, WORK, SENT, WORK, SENT, WORK, FETCHED, WORK_BACK, FETCHED, WORK_BACK)
    without = log_of_copies(WORK, WORK, WORK, WORK, WORK_BACK, WORK_BACK)
    copied = {1: [26 * GB], 2: [26 * GB], 3: [26 * GB], 4: [26 * GB], 5: [26 * GB]}
    assert step_seconds(without, copied=copied) == pytest.approx(step_seconds(with_them), rel=1e-6)


def test_the_link_to_the_host_is_known_for_every_card() -> None:
    found = {name: host_bytes_per_second(card.target) for name, card in CATALOGUE.items()}
    assert found.pop("cpu") is None
    assert all(found.values())
    assert found["t4"] < found["a100"] < found["h100"] < found["gh200"]  # type: ignore[operator]
