"""Ranks whose layers are compiled: predicted, and real over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem.records.profile import Phase
from tests.sharded_models import COMPILED
from tests.simulation.ranks import gloo

MEASURED: Final = {
    "fsdp, compiled layers": 2_768_648,
    "fsdp, compiled layers, no resharding": 3_089_664,
    "fsdp, compiled checkpoints": 2_677_128,
}
"""The peak of both of two ranks over gloo, on 2026-11-23 with torch 2.11; `FXMEM_ALL=1` measures it anew."""


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> Iterator[None]:
    """Inductor takes the vector instructions that the CPU has, and does not try them with a C++ compiler."""
    torch_dynamo.load_compiler()
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": True}):
        yield


@pytest.mark.parametrize("kind", ["fsdp, compiled layers", "fsdp, compiled checkpoints"])
def test_a_rank_of_compiled_layers_takes_what_real_ranks_took(kind: str) -> None:
    recorded = gloo.predict(kind, 2, 1)
    assert recorded.rounds[-1].requested_bytes == MEASURED[kind]
    profile = recorded.profile
    made = profile.step.compiled
    assert made is not None
    assert (made.graphs, made.breaks) == (2, ())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        kernels = [op for op in profile.ops if op.phase is phase and op.name.startswith("cpp_fused")]
        by_layer = [sum(f"layers.{layer}" in profile.nodes[op.node].module for op in kernels) for layer in range(3)]
        assert by_layer[0] > 1
        assert by_layer == [len(kernels) // 3] * 3


@pytest.mark.skipif(not os.environ.get("FXMEM_ALL"), reason="two real ranks compile for a minute")
def test_real_ranks_of_compiled_layers_take_what_is_predicted(tmp_path_factory: pytest.TempPathFactory) -> None:
    measured = gloo.measure(tmp_path_factory.mktemp("ranks"), 2, *COMPILED)
    assert {kind: nbytes for (kind, _), nbytes in measured.items()} == MEASURED
    for (kind, rank), nbytes in measured.items():
        assert gloo.predict(kind, 2, rank).rounds[-1].requested_bytes == nbytes
