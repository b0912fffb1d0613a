"""Ranks whose layers are compiled: predicted, and real over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

import fxmem
from fxmem.errors import UsageError
from fxmem.records.profile import Phase
from tests.sharded_models import BATCH, SEQUENCE, VOCABULARY, Llama, loss, tokens
from tests.simulation.ranks import gloo
from tests.simulation.ranks.test_truth import measured_and_predicted

pytestmark = pytest.mark.truth

MEASURED: Final = {
    "fsdp, compiled layers": 2_768_648,
    "fsdp, compiled layers, no resharding": 3_089_664,
    "fsdp, compiled checkpoints": 2_677_128,
    "ddp, compiled": 18_693_200,
    "ddp, compiled within": 18_693_200,
}
"""The peak of both of two ranks over gloo, on 2026-11-23 with torch 2.11; `FXMEM_ALL=1` measures it anew."""


@pytest.fixture(autouse=True, scope="module")
def _compiler(compiler: None) -> Iterator[None]:
    """Inductor takes the vector instructions that the CPU has, and does not try them with a C++ compiler."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": True}):
        yield


def test_a_rank_of_compiled_layers_takes_what_real_ranks_took() -> None:
    profile = gloo.predict("fsdp, compiled layers", 2, 1)
    assert gloo.last_step_bytes(profile) == MEASURED["fsdp, compiled layers"]
    made = profile.step.compiled
    assert made is not None
    assert (made.graphs, made.breaks) == (2, ())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        kernels = [op for op in profile.ops if op.phase is phase and op.name.startswith("cpp_fused")]
        by_layer = [sum(f"layers.{layer}" in profile.nodes[op.node].module for op in kernels) for layer in range(3)]
        assert by_layer[0] > 1
        assert by_layer == [len(kernels) // 3] * 3


@pytest.mark.parametrize("kind", ["fsdp, compiled checkpoints", "tp with sequence parallel, compiled layers"])
def test_a_compiled_rank_takes_what_its_real_tensors_take(kind: str) -> None:
    measured, predicted = measured_and_predicted(kind)
    assert predicted == measured


@pytest.mark.parametrize(
    "kind", ["ddp, compiled", "ddp, compiled within"] if os.environ.get("FXMEM_ALL") else ["ddp, compiled"]
)
def test_a_compiled_graph_is_split_where_a_bucket_ends(kind: str) -> None:
    """In one piece, backward would hold all gradients at once: 21,853,520 bytes."""
    profile = gloo.predict(kind, 2, 0)
    made = profile.step.compiled
    assert made is not None
    assert (made.graphs, made.breaks) == (10, ())  # five buckets of 1 MiB
    assert gloo.last_step_bytes(profile) == MEASURED[kind]


def test_a_mesh_compiles_the_blocks_and_shards_them_then() -> None:
    analysis = fxmem.analyze(Llama(), tokens(), loss=loss, target="cpu", mesh="fsdp=2", rank=0, compile=True)
    made = analysis.profile.step.compiled
    assert made is not None
    assert (made.graphs, made.breaks) == (2, ())
    logits = BATCH * SEQUENCE * VOCABULARY * 4 - 8  # which a step keeps to its end, in the place of the loss twice
    assert analysis.peak.requested_bytes == MEASURED["fsdp, compiled layers"] + logits
    texts = {each.text for each in analysis.profile.assumptions}
    assert "torch.compile on each of 3 Block, before it is sharded; the rest is eager code" in texts
    assert any("fused" in node.name and node.module == "layers.1" for node in analysis.profile.nodes)


def test_a_compiled_replica_takes_views() -> None:
    """As micro-batches are: of a fake, dynamo made fakes of the recording's."""
    with fxmem.record("h100", ranks=2, rank=0, steps=1, compile="as-is") as recorded:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(torch.compile(torch.nn.Linear(8, 4).cuda()))
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            for part in torch.zeros(64, 8, device="cuda").split(32):
                model(part).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    made = recorded.profile.step.compiled
    assert made is not None
    assert made.graphs == 2  # forward and backward


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": "tp=2"}, "expected a mesh of fsdp, alone or with replicate, with compile, got tp=2"),
        ({"mesh": "replicate=2"}, "expected a mesh of fsdp, alone or with replicate, with compile, got replicate=2"),
        ({"ranks": 2, "parallelize": lambda model: model}, "expected compile 'as-is' with parallelize"),
    ],
)
def test_what_is_not_compiled_on_ranks_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fxmem.analyze(Llama(), tokens(), target="cpu", compile=True, **given)


@pytest.mark.skipif(not os.environ.get("FXMEM_ALL"), reason="two real ranks compile for a minute")
def test_real_ranks_of_compiled_layers_take_what_is_predicted(tmp_path_factory: pytest.TempPathFactory) -> None:
    measured = gloo.measure(tmp_path_factory.mktemp("ranks"), *((kind, 2) for kind in MEASURED))
    for (kind, world, rank), nbytes in measured.items():
        real, predicted = gloo.compare(kind, world, rank, nbytes)
        assert predicted == MEASURED[kind]
        assert abs(predicted - real) <= gloo.NUMBER
