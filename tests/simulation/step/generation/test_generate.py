"""A generation from a few recorded tokens is the generation that is recorded whole."""

import functools
import itertools

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fxmem import generate
from fxmem.__main__ import main
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.memory.allocator import DEFAULT_SETTINGS, trace_step
from fxmem.memory.generation import Jump, extend, find_steps
from fxmem.memory.report_reader import load_report, timeline
from fxmem.records.profile import Phase
from fxmem.simulation.step.generation import recorded_generation

pytestmark = pytest.mark.truth

SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512}
PROMPT = torch.zeros(2, 30, dtype=torch.long)
PADDED = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
PADDED["attention_mask"][0, :4] = 0


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral(window=40):
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))


def mamba():
    return MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=300, state_size=8))


@pytest.fixture
def all_recorded(monkeypatch):
    def record(model, prompt, tokens, **settings):
        with monkeypatch.context() as patched:
            patched.setattr(recorded_generation, "TRIED", ({},))
            return generate(model, prompt, tokens, **settings)

    return record


def _blocks(profile):
    """Size and address of all that the allocator hands out and takes back, in order."""
    return [(e.action, e.size, e.address) for e in trace_step(profile, DEFAULT_SETTINGS).events]


@pytest.mark.parametrize(
    ("make", "tokens", "way", "recorded_tokens"),
    [
        (llama, 16, {}, 8),
        (llama, 16, {"cache": "static"}, 9),
        (llama, 16, {"beams": 2}, 9),
        (mamba, 14, {}, 8),
        (llama, 14, {"options": {"prefill_chunk_size": 8}}, 8),
        (mistral, 21, {}, 17),
        (mistral, 30, {"cache": "sliding"}, 22),
        (functools.partial(mistral, 34), 16, {}, 11),  # its window is full at once
        (functools.partial(mistral, 50), 24, {}, 12),  # and near the end
        (mistral, 22, {"beams": 2}, 18),
    ],
)
def test_tokens_made_by_arithmetic_are_those_that_are_recorded(make, tokens, way, recorded_tokens, all_recorded):
    made = generate(make, PROMPT, tokens, **way)
    recorded = all_recorded(make, PROMPT, tokens, **way)
    assert (made.run.recorded_tokens, recorded.run.recorded_tokens) == (recorded_tokens, tokens)
    assert made.run.tokens == recorded.run.tokens
    assert [op.name for op in made.profile.ops] == [op.name for op in recorded.profile.ops]
    assert _blocks(made.profile) == _blocks(recorded.profile)
    assert made.peak.requested_bytes == recorded.peak.requested_bytes


def test_tokens_after_a_padded_prompt_are_made_a_period_at_a_time(all_recorded):
    """Its mask goes into attention, which pads the rows of it: sizes grow evenly every sixteenth token."""
    made, recorded = (each(llama, PADDED, 53, target="h100") for each in (generate, all_recorded))
    assert made.run.recorded_tokens == 37
    assert made.run.tokens == recorded.run.tokens
    assert made.run.growth_bytes is not None
    assert _blocks(made.profile) == _blocks(recorded.profile)


def test_a_long_generation_leaves_tokens_out_of_its_profile_and_not_out_of_its_numbers(monkeypatch):
    whole = generate(llama, PROMPT, 60)
    monkeypatch.setattr(recorded_generation, "MOST_STORAGES", 100)
    short = generate(llama, PROMPT, 60)
    assert len(short.profile.storages) < len(whole.profile.storages) / 4
    assert short.run == whole.run
    assert short.peak.requested_bytes == whole.peak.requested_bytes
    assert short.peak.reserved_bytes == whole.peak.reserved_bytes
    assert short.peak.by_kind == whole.peak.by_kind


def test_a_prompt_of_more_tokens_than_values_are_kept_for_takes_its_share_more():
    def run(batch):
        ids = torch.full((batch, 1024), 5)
        return generate(llama, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 8, target="h100").run

    small, medium, large = (run(batch) for batch in (512, 1024, 1536))
    for one, two, three in zip(small.tokens, medium.tokens, large.tokens, strict=True):
        assert three.requested_bytes - two.requested_bytes == two.requested_bytes - one.requested_bytes


def test_a_cache_that_grows_takes_its_bytes_for_each_token():
    run = generate(llama, PROMPT, 12).run
    keys_and_values = 2 * 2 * 2 * 16 * 4  # batch, key-value heads, head size, float32
    ids_and_mask = 2 * 2 * 8
    assert run.growth_bytes == keys_and_values + ids_and_mask
    assert generate(llama, PROMPT, 12, cache="static").run.growth_bytes == ids_and_mask
    assert [token.token for token in run.tokens] == list(range(1, 13))
    assert run.decode.token == 12


def test_a_long_generation_with_a_window_is_made_by_arithmetic_on_both_sides(monkeypatch):
    whole = generate(mistral, PROMPT, 300)
    assert whole.run.recorded_tokens == 21
    assert whole.run.growth_bytes is None  # it grows until the window is full
    grown = [after.requested_bytes - now.requested_bytes for now, after in itertools.pairwise(whole.run.tokens)]
    assert set(grown[20:-1]) == {2 * 2 * 8}  # ids and mask alone
    monkeypatch.setattr(recorded_generation, "MOST_STORAGES", 100)
    short = generate(mistral, PROMPT, 300)
    assert len(short.profile.storages) < len(whole.profile.storages) / 4
    assert (short.run, short.peak.requested_bytes) == (whole.run, whole.peak.requested_bytes)
    nodes = len(short.profile.nodes)
    assert all(index < nodes for node in short.profile.nodes for index in node.inputs)
    assert all(call.first_node <= call.last_node < nodes for call in short.profile.calls)


def test_what_keeps_something_of_each_step_is_recorded_whole():
    kept = generate(llama, PROMPT, 20, options={"return_dict_in_generate": True, "output_scores": True})
    assert kept.run.recorded_tokens == 20
    assert any(each.text.startswith("every token was recorded: ") for each in kept.profile.assumptions)


def test_at_which_token_it_runs_out(monkeypatch):
    def wide():
        return LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 512, "num_attention_heads": 8}))

    whole = generate(wide, torch.zeros(64, 4, dtype=torch.long), 60).run
    assert whole.last_token_that_fits is None
    reserved = [token.reserved_bytes for token in whole.tokens]
    assert reserved[0] < reserved[-1]
    card = catalogue.target("h100").model_copy(update={"memory_bytes": reserved[0] + (2 << 20)})
    found = generate(wide, torch.zeros(64, 4, dtype=torch.long), 60, target=card)
    assert found.peak.fits is False
    assert 1 <= found.run.last_token_that_fits < 60
    assert f"token {found.run.last_token_that_fits + 1} of 60" in found.peak.shortage
    assert f"runs out at token {found.run.last_token_that_fits + 1} of 60" in found.table()


def test_a_decoder_behind_an_encoder_needs_no_first_token():
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": 300}
    run = generate(lambda: T5ForConditionalGeneration(T5Config(**sizes)), PROMPT, 60).run
    assert run.recorded_tokens == 36  # rows of its mask are padded to sixteen
    assert run.growth_bytes == 2 * 2 * 32 * 4 + 2 * 8  # keys and values of the decoder alone, and ids


def test_what_cannot_be_generated_is_refused():
    with pytest.raises(UsageError, match="generate"):
        generate(lambda: torch.nn.Linear(3, 3), PROMPT, 4)
    with pytest.raises(UsageError, match="sliding window"):
        generate(llama, PROMPT, 4, cache="sliding")
    with pytest.raises(UsageError, match="expected a cache of"):
        generate(llama, PROMPT, 4, cache="paged")
    with pytest.raises(UsageError, match="at least 1 new token"):
        generate(llama, PROMPT, 0)


def test_steps_that_differ_are_found():
    recorded = generate(llama, PROMPT, 9).profile
    with pytest.raises(AnalysisError, match="not called once"):
        find_steps(recorded, "nothing")
    steps = find_steps(recorded, "model")
    begins = [op.begin for op in recorded.ops]
    first, end, later = map(begins.index, steps.begins[2:5])
    assert end - first == later - end
    with pytest.raises(AnalysisError, match="grow evenly from token to token"):
        extend(steps, [Jump(first, end, 1, 4, {})])  # nothing is left out there
    with pytest.raises(AnalysisError, match="the same operators"):
        extend(steps, [Jump(first + 1, end, 1, 4, {})])


def test_the_command_writes_a_report_that_is_read_again(capsys, tmp_path):
    written = tmp_path / "report.json"
    settings = [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]
    words = ["hf:LlamaForCausalLM", *settings, "--batch", "2", "--prompt", "30", "--new", "20", "--weights", "bf16"]
    assert main(["generate", *words, "--json", str(written), "--quiet"]) == 0
    table = capsys.readouterr().out
    assert "20 new tokens, dynamic cache; 8 recorded" in table
    report = load_report(written)
    assert [span.phase for span in report.phases] == [Phase.PREFILL, Phase.DECODE]
    assert report.step.generation.new_tokens == 20
    assert timeline(report).peak == report.peak
    for words in (["show"], ["show", "--by", "line"], ["show", "--by", "layer"]):
        assert main([*words, str(written)]) == 0, words
    assert main(["graph", "--by", "time", str(written), "-o", str(tmp_path / "timeline.svg")]) == 0
    assert main(["report", str(written), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["generate", "torchvision:resnet18", "--quiet"]) == 2


def test_a_model_that_takes_images_too_is_given_a_prompt_of_text(capsys):
    sizes = {"text_config.num_hidden_layers": 1, "text_config.vocab_size": 400, "vision_config.num_hidden_layers": 1}
    given = [each for name, value in sizes.items() for each in ("--set", f"{name}={value}")]
    command = ["generate", "hf:LlavaForConditionalGeneration", *given, "--new", "2", "--target", "cpu", "--quiet"]
    assert main([*command, "--prompt", "8", "--full"]) == 0
    assert "the prompt is text alone" in " ".join(capsys.readouterr().out.split())
    assert main(command) == 2
    assert "its inputs cannot be known" in capsys.readouterr().err
