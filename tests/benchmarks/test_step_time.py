"""Estimated step times against published ones, with the shares that the catalogue has."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published.step_time import TABLES, Steps, Table, load
from fxmem.hardware.catalogue import CATALOGUE, Reached
from fxmem.hardware.step_time import step_seconds
from fxmem.records.profile import Phase
from tests.profiles import Log

pytestmark = pytest.mark.truth


def estimate(part: Steps, reached: Reached) -> np.ndarray:
    shares = (reached.products, reached.convolutions, reached.bandwidth, reached.convolution_bandwidth)
    return part.estimate(np.log([*shares, reached.launch_seconds, reached.issue_seconds]))


@pytest.fixture(scope="module")
def parts() -> list[Steps]:
    steps = load()["steps"]
    return [Steps(table, steps) for table in TABLES if table.card in CATALOGUE]


def test_the_catalogue_keeps_the_stated_errors_on_steps_that_were_not_fitted(parts: list[Steps]) -> None:
    for part in parts:
        reached = CATALOGUE[part.table.card].reached[part.table.mode]
        ratio = (estimate(part, reached) / part.measured)[~part.fitted]
        off = np.abs(ratio - 1)
        mean, median, within = {"infer_b1": (0.3, 0.16, 0.6), "infer_b128": (0.17, 0.15, 0.85)}.get(
            part.table.kind, (0.17, 0.15, 0.85) if part.table.card == "h100" else (0.1, 0.07, 0.95)
        )
        assert off.mean() < mean
        assert np.median(off) < median
        assert np.mean(off < 0.3) > within
        low, high = reached.spread
        assert np.mean((low * ratio < 1) & (high * ratio > 1)) > 0.6


def test_fitted_is_the_formula_that_is_printed() -> None:
    table = Table("made up", "rtx4090", "train", "")
    work = [[0, 0, 10**12, 10**8, 1], [1, 0, 10**12, 10**8, 2], [0, 0, 0, 10**9, 3], [0, 0, 0, 0, 4]]
    fitted = Steps(table, [{"kind": "train", "model": "any", "measured": {"made up": 1.0}, "work": work}])
    log = Log(target=CATALOGUE["rtx4090"].target)
    node = log.node("layer")
    with log.phase(Phase.FORWARD):
        for is_convolution, _, flops, moved, count in work:
            for _ in range(count):
                name = "aten.convolution.default" if is_convolution else "aten.mm.default"
                with log.op(name, node, Phase.FORWARD, flops=flops, moved_bytes=moved):
                    pass
    printed = step_seconds(log.profile())
    assert printed == pytest.approx(float(estimate(fitted, CATALOGUE["rtx4090"].reached["train"])[0]), rel=1e-3)
