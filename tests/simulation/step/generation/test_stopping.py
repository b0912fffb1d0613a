"""`generate` as it is: no sequence ends before the last token."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import stopping_criteria
from transformers.generation import utils as loops

from fxmem import analyze, record
from fxmem.errors import AnalysisError
from fxmem.records.profile import Kind
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu

ENDS = "no sequence ends before the last token"


class Generate(nn.Module):
    def __init__(self, model, **settings):
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, input_ids):
        return self.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **self.settings)


def llama():
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 3000,
    }
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=64, **sizes)).eval()


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 50, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams that stop early": {"do_sample": False, "num_beams": 2, "early_stopping": True, "num_return_sequences": 2},
    "a static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.truth
@pytest.mark.parametrize("way", WAYS)
def test_a_generation_that_no_sequence_ends_is_predicted(way):
    torch.manual_seed(0)
    model = Generate(llama(), max_new_tokens=5, **WAYS[way])
    ids = torch.randint(3, 300, (2, 7))
    found = analyze(model, ids, mode="infer", target="cpu")
    assert [a.text.startswith(ENDS) for a in found.profile.assumptions if a.topic == "generation"] == [True]
    request = StepRequest(args=(ids,), mode="infer", target="cpu")
    measured = measure_cpu(model, request, steps=2)
    assert found.peak.requested_bytes == measured.peak_without_scratch_bytes


def test_the_loops_are_put_back():
    own = [vars(stopping_criteria.EosTokenCriteria)["__call__"], dict(vars(loops.GenerationMixin))]
    analyze(Generate(llama(), max_new_tokens=2), torch.zeros(1, 4, dtype=torch.long), mode="infer", target="cpu")
    assert [vars(stopping_criteria.EosTokenCriteria)["__call__"], dict(vars(loops.GenerationMixin))] == own


def test_a_criterion_of_ones_own_that_reads_a_token_is_still_refused():
    class Reads(stopping_criteria.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids[0, -1].item() > 5, dtype=torch.bool)

    model = Generate(llama(), max_new_tokens=2, stopping_criteria=[Reads()])
    with pytest.raises(AnalysisError, match="item"):
        analyze(model, torch.zeros(1, 4, dtype=torch.long), mode="infer", target="cpu")


def test_a_program_generates_when_it_is_recorded():
    with record("h100") as recorded:
        model = llama().cuda()
        ids = torch.randint(0, 300, (2, 7)).cuda()
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert made.shape == (2, 11)
    assert any(a.text.startswith(ENDS) for a in recorded.profile.assumptions)


def test_a_copy_of_what_holds_known_numbers_is_made_within_a_step():
    class Copies(nn.Module):
        def forward(self, x):
            mask = torch.ones(3, dtype=torch.long)
            settings = copy.deepcopy({"mask": mask, "real": 2})
            assert bool((settings["mask"] == 1).all())
            assert settings["mask"] is not mask
            return x * settings["mask"]

    found = analyze(Copies(), torch.zeros(4, 3), mode="infer", target="cpu")
    assert found.peak.by_kind[Kind.TEMPORARY] == 4 * 3 * 4 + 2 * 3 * 8


def test_a_model_that_drafts_says_what_is_assumed():
    class Assisted(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.assistant = llama(), llama()

        def forward(self, input_ids):
            return self.model.generate(input_ids, assistant_model=self.assistant, max_new_tokens=2, do_sample=False)

    found = analyze(Assisted(), torch.full((1, 7), 5), mode="infer", target="cpu")
    texts = [a.text for a in found.profile.assumptions if a.topic == "generation"]
    assert [text.startswith(("an assistant's drafts", ENDS)) for text in texts] == [True, True]
