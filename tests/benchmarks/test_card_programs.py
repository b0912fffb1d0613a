"""Programs that a card has run, recorded: what its allocator reported in the end."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

import fxmem
from benchmarks.accuracy.compiled import TRUTH, build
from tests.benchmarks import on_measured_release


@pytest.mark.truth
@on_measured_release
def test_a_model_made_on_the_card_and_cast_there_is_met_to_the_byte() -> None:
    """Its float32 weights leave segments behind, which count for the process and split what the steps allocate."""
    with fxmem.record("h100") as recorded:
        with torch.device("cuda"):
            model, batch = build("hf-llama")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        printed = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    measured = json.loads(gzip.decompress(TRUTH.read_bytes()))["results"]["eager/train/hf-llama"]["peak"]
    assert printed == (measured["allocated"], measured["reserved"])
    assert recorded.peak.requested_bytes == measured["requested"]
    # The report's are those of a loop of this round, which begins with cuBLAS's workspaces in place.
    for mine, real in zip((recorded.peak.allocated_bytes, recorded.peak.reserved_bytes), printed, strict=True):
        assert mine is not None
        assert abs(mine / real - 1) < 0.0003
