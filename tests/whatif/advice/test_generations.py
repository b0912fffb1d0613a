"""Changes to a generation, and what each frees."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem
from fxmem.__main__ import main
from fxmem.hardware import catalogue
from fxmem.records.advice import Advice
from fxmem.simulation.step.given import quantize_weights
from fxmem.whatif.advice.changes import GenerationBench
from fxmem.whatif.advice.variant import NotApplicableError

SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 2000, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def generation():
    ids = torch.ones(8, 60, dtype=torch.long)
    prompt = {"input_ids": ids, "attention_mask": ids}
    return fxmem.generate(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), prompt, 2, beams=2, target="a100-40gb")


@pytest.mark.truth
def test_each_change_is_worth_what_its_own_analysis_says(generation):
    advice = fxmem.advise(generation)
    found = {each.key: each for each in advice.suggestions}
    assert found["greedy"].peak == generation.vary(beams=1).peak
    assert found["greedy"].effect == "output"
    assert found["greedy"].saved_bytes == generation.peak.counted_bytes - found["greedy"].peak.counted_bytes > 0
    halves = fxmem.generate(
        LlamaForCausalLM(LlamaConfig(**SIZES)).half(), generation.request.kwargs, 2, beams=2, target="a100-40gb"
    )
    assert found["fp16-weights"].peak.allocated_bytes == halves.peak.allocated_bytes
    with torch.device("meta"):
        packed = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    quantize_weights(packed, "int4")
    assert found["int4-weights"].peak.allocated_bytes == generation.vary(packed).peak.allocated_bytes
    refused = {each.key for each in advice.refused}
    assert {"static-cache", "offloaded-cache", "int8-weights"} <= {*found, *refused}


def test_int4_weights_are_for_cards_with_their_kernel(generation):
    bench = GenerationBench(generation.move(catalogue.target("t4")))
    change = next(each for each in bench.changes() if each.key == "int4-weights")
    with pytest.raises(NotApplicableError, match=r"compute capability 8\.0"):
        change.make(bench.start, bench.step)


def test_a_prefill_by_hand_needs_the_logits_of_the_last_position_alone():
    ids = torch.ones(8, 60, dtype=torch.long)
    given = {"input_ids": ids}
    analysis = fxmem.analyze(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), given, mode="infer", target="t4")
    found = {each.key: each for each in fxmem.advise(analysis, quick=True).suggestions}
    last = fxmem.analyze(analysis.model, given | {"logits_to_keep": 1}, mode="infer", target="t4")
    assert found["last-logits"].peak == last.peak
    assert found["last-logits"].saved_bytes == analysis.peak.counted_bytes - last.peak.counted_bytes > 0
    assert "last-logits" not in {each.key for each in fxmem.advise(last, quick=True).suggestions}


def test_changes_together_keep_a_budget(generation):
    budget = generation.vary(beams=1).peak.reserved_bytes
    advice = fxmem.advise(generation, budget, quick=True)
    together = advice.together
    assert together is None or together.peak.allocated_bytes <= budget
    smaller = fxmem.advise(generation, "1KiB", quick=True)
    assert smaller.together is None


def test_the_command_advises_on_a_generation(capsys, tmp_path):
    model = ["hf:LlamaForCausalLM", *(word for key, value in SIZES.items() for word in ("--set", f"{key}={value}"))]
    asked = [*model, "--mode", "generate", "--prompt", "30", "--new", "2", "--target", "t4", "--quick", "--quiet"]
    written = tmp_path / "advice.json"
    assert main(["advise", *asked, "--json", str(written)]) == 0
    assert Advice.model_validate_json(written.read_text()).step.generation.new_tokens == 2
    assert "bf16 weights" in capsys.readouterr().out
    assert main(["advise", *model, "--new", "3"]) == 2
    assert "add --mode generate" in capsys.readouterr().err
