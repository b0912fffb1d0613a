"""Two ranks over gloo, each in a process of its own, against the prediction of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
import torch

import fxmem
from fxmem.records.profile import Kind
from tests.sharded_models import Llama, loss, tokens, tp
from tests.simulation.ranks.gloo import NUMBER, compare, measure

pytestmark = pytest.mark.truth

CASES: Final = (
    *(("fsdp, accumulation", 2, 1), ("fsdp1, bf16 with fp32 reduction", 3, 2), ("fsdp x tp, checkpointed", 4, 2)),
    *(("zero-1", 2, 1), ("ddp, hook", 2, 1), ("main gradients", 2, 1)),
    *(("interleaved", 2, 1), ("experts", 2, 1), ("experts, worst", 2, 1), ("ring, alltoall", 2, 0)),
)
"""Kind, world and rank; `make -C benchmarks ranks` has many more."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int, int], int]:
    """Every rank of every kind."""
    return measure(tmp_path_factory.mktemp("ranks"), *dict.fromkeys((kind, world) for kind, world, _ in CASES))


@pytest.mark.parametrize(("kind", "world", "rank"), CASES)
def test_a_rank_takes_what_is_predicted(
    kind: str, world: int, rank: int, measured: Mapping[tuple[str, int, int], int]
) -> None:
    tolerance = (3 if kind == "ddp, hook" else 1) * NUMBER  # one for each of its buckets
    real, predicted = compare(kind, world, rank, measured[kind, world, rank], tolerance)
    assert abs(predicted - real) <= tolerance


def test_waiting_for_a_collective_makes_no_tensor() -> None:
    analysis = fxmem.analyze(Llama, tokens(), loss=loss, target="cpu", ranks=2, rank=0, parallelize=tp("cpu"))
    makers = {
        op.name
        for op in analysis.profile.ops
        for each in analysis.profile.storages
        if op.begin <= each.birth < op.end and each.kind is Kind.COMMUNICATION
    }
    assert "_c10d_functional.all_gather_into_tensor.default" in makers
    waits = [op for op in analysis.profile.ops if "wait_tensor" in op.name]
    assert waits
    assert all(op.begin == op.end for op in waits)
    assert not torch.distributed.is_initialized()
