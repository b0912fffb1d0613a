"""Predictions of a rank against the same rank with real tensors: torch's own engine, in a world without peers.

Set aside is what oneDNN allocates within a product in bfloat16, and the other scratch that depends on the machine.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxmem
from fxmem._torch import distributed as torch_distributed
from fxmem.records.profile import Kind
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.profiler_log import WORKSPACE_KERNELS
from tests.sharded_models import COMPILED, CONFIGURATIONS, HALF, PRODUCTS, Llama, loss, tokens
from tests.simulation.recording.compiled.real import SET_ASIDE, without_kernels

pytestmark = [pytest.mark.truth, pytest.mark.usefixtures("compiler")]


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"), without_kernels():  # dynamo reads all attributes of a tensor
        yield


def measured_and_predicted(name: str) -> tuple[int, int]:
    world, rank, shard, settings = (CONFIGURATIONS | COMPILED)[name]
    whose: Any = {"ranks": world, "rank": rank, "parallelize": shard("cpu"), **settings}
    compiles = name in COMPILED
    layers = 2 if compiles else 3  # each is compiled
    whose["compile"] = "as-is" if compiles else None
    analysis = fxmem.analyze(Llama(layers), tokens(), loss=loss, target="cpu", **whose)
    with torch_distributed.group_of_its_own(), _compiling() if compiles else contextlib.nullcontext():
        torch_distributed.begin_fake_group(torch.distributed.init_process_group, world, rank)
        model = shard("cpu")(Llama(layers))
        if settings.get("mode") == "infer":
            model.eval()
        request = StepRequest(args=(tokens(),), loss=loss, target="cpu", **settings)
        set_aside = (*(SET_ASIDE if compiles else WORKSPACE_KERNELS), *(PRODUCTS if name in HALF else ()))
        measured = measure_cpu(model, request, set_aside=set_aside)
    # A mesh's ranks are on the host, whatever the device. FSDP1 has none; what it keeps between steps is the card's.
    ranks_of_the_mesh = 0 if name.startswith("fsdp1") else measured.resident_by_kind.get(Kind.BUFFER, 0)
    return measured.peak_without_kernel_scratch_bytes - ranks_of_the_mesh, analysis.peak.requested_bytes


CHEAPEST = (
    "fsdp, uneven shards, the last rank",
    "fsdp, accumulation",
    "fsdp1, bf16 with fp32 reduction",
    "fsdp1, checkpointed",
    "fsdp1, accumulation",
    "tp with sequence parallel",
    "mesh of replicate, fsdp and tp",
)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch 2.15 on views that are returned
@pytest.mark.parametrize("name", CHEAPEST)
def test_a_rank_takes_what_its_real_tensors_take(name: str) -> None:
    measured, predicted = measured_and_predicted(name)
    assert predicted == measured
