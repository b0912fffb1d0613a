"""Programs that a card has run, recorded: what its allocator reported in the end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

import fxmem
from tests.benchmarks import on_measured_release

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu/h100-compiled-generated-2026-11-22.json.gz"


@on_measured_release
def test_a_model_made_on_the_card_and_cast_there_is_met_to_the_byte() -> None:
    """Its float32 weights leave segments behind, which count for the process and split what the steps allocate."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    with fxmem.record("h100") as recorded:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
            ids = torch.randint(0, 1000, (4, 1024))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        printed = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    measured = json.loads(gzip.decompress(RESULTS.read_bytes()))["results"]["eager/train/hf-llama"]["peak"]
    assert printed == (measured["allocated"], measured["reserved"])
    assert recorded.peak.requested_bytes == measured["requested"]
    # The report's are those of a loop of this round, which begins with cuBLAS's workspaces in place.
    for mine, real in zip((recorded.peak.allocated_bytes, recorded.peak.reserved_bytes), printed, strict=True):
        assert mine is not None
        assert abs(mine / real - 1) < 0.0003
