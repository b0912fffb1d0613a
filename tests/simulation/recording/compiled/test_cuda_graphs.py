"""CUDA graphs: the pool that they share, and what torch's own code takes on a stand-in for a card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.releases.cuda_graphs import predict
from fxmem.memory.allocator import replay
from fxmem.records.profile import Kind
from fxmem.records.units import GRAPH_INPUT, GRAPH_POOL
from tests.profiles import small_profile

MEASURED = Path(__file__).parents[4] / "benchmarks" / "results" / "cuda-graphs-2026-11-23.md"


def measured(name: str) -> tuple[int, int]:
    """Allocated and reserved bytes of a step on the stand-in."""
    row = next(line for line in MEASURED.read_text().splitlines() if line.startswith(f"| {name} |"))
    allocated, _, reserved, _ = (int(cell.replace(",", "")) for cell in re.findall(r"[-\d,]+(?= \|)", row)[-4:])
    return allocated, reserved


@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="measured with the wheel of 2.11")
@pytest.mark.parametrize("name", ["two wide layers", "a narrow layer"])
def test_a_predicted_step_is_that_of_torchs_own_graphs_and_allocator(name: str) -> None:
    assert predict(name) == measured(name)


def test_what_graphs_allocate_is_in_their_pool_and_copies_come_in_the_step_that_records() -> None:
    x = torch.zeros(2048, 64)
    analysis = fxmem.analyze(nn.Linear(64, 64), x, target="h100", compile="reduce-overhead", optimizer="sgd")
    profile, made = analysis.profile, analysis.profile.step.compiled
    assert made is not None
    assert (made.graphs, made.cuda_graphs, made.cuda_graph_skips) == (2, 2, ())
    pools = {kind: {each.stream == GRAPH_POOL for each in profile.storages if each.kind is kind} for kind in Kind}
    assert pools[Kind.PARAMETER] == pools[Kind.INPUT] == {False}
    assert pools[Kind.GRADIENT] == pools[Kind.SAVED] == {True}
    copies = [each for each in profile.storages if each.name == GRAPH_INPUT]
    assert x.nbytes in {each.nbytes for each in copies}
    assert {each.stream for each in copies} == {GRAPH_POOL}
    workspaces = [each for each in profile.storages if each.name == "cuBLAS workspace, CUDA graphs"]
    assert all(each.birth > 0 and each.death < profile.ticks for each in workspaces)
    assert "the CUDA graphs themselves" in str([each.what for each in profile.unknowns])


def test_a_graph_that_inductor_does_not_record_is_said() -> None:
    counts = torch.zeros(8)

    class Counting(nn.Module):
        """Adds to an input, which keeps no place."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    analysis = fxmem.analyze(Counting(), counts, mode="infer", target="h100", compile="reduce-overhead")
    made = analysis.profile.step.compiled
    assert made is not None
    assert made.cuda_graphs == 0
    assert made.cuda_graph_skips
    assert {each.stream for each in analysis.profile.storages} == {0}
    assert "graphs without a CUDA graph" in str([each.text for each in analysis.profile.assumptions])


def test_the_first_step_of_a_loop_copies_no_input_of_a_graph() -> None:
    profile = small_profile()
    born = next(i for i, each in enumerate(profile.storages) if each.birth > 0)
    storages = list(profile.storages)
    storages[born] = storages[born].model_copy(update={"name": GRAPH_INPUT, "nbytes": 1 << 30})
    large = profile.model_copy(update={"storages": tuple(storages)})
    first, later = replay(large, max_steps=1), replay(large)
    assert first.allocated_bytes is not None
    assert later.allocated_bytes is not None
    assert first.allocated_bytes < 1 << 30 < later.allocated_bytes
