"""The largest batch, the longest context and the cards of a generation."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem
from fxmem.__main__ import main
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import give_room
from fxmem.records.fits import Fits
from fxmem.show.text.fits import fits_table

SIZES = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 300, "max_position_embeddings": 512}
NEW = 2
CARD = catalogue.target("t4")


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def prompt(batch, length):
    ids = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids.clone()}


def within(memory, inputs):
    card = give_room(CARD, memory)
    return fxmem.generate(llama, inputs, NEW, target=card).run


@pytest.fixture(scope="module")
def whole():
    return fxmem.generate(llama, prompt(64, 40), NEW, target=CARD)


@pytest.mark.truth
def test_the_largest_batch_runs_to_its_last_token_and_the_next_does_not():
    memory = 33 << 20
    curve = fxmem.max_batch(llama, prompt(20, 40), mode="generate", new_tokens=NEW, target=CARD, budget=memory)
    largest = curve.largest
    found, over = within(memory, prompt(largest, 40)), within(memory, prompt(largest + 1, 40))
    assert (found.fits, over.fits) == (True, False)
    assert curve.at_largest.alloc_retries == found.alloc_retries
    assert curve.next_above.obstacle == f"It runs out at token {over.last_token_that_fits + 1} of {NEW}"
    assert all(point.time is None for point in curve.points)
    text = fits_table(curve)
    assert f"generate: {NEW} new tokens, dynamic cache" in text
    assert "Retries" in text
    assert "runs to its last token" in " ".join(text.split())


@pytest.mark.truth
def test_the_longest_context_is_the_prompt_and_the_new_tokens():
    memory = 30 << 20
    asked = {"mode": "generate", "new_tokens": NEW, "target": CARD, "budget": memory}
    curve = fxmem.max_batch(llama, prompt(16, 100), dim="context", **asked)
    assert curve.space.dim == "context"
    assert curve.space.resized == ("input_ids:1", "attention_mask:1")
    assert within(memory, prompt(16, curve.largest - NEW)).fits
    assert within(memory, prompt(16, curve.largest - NEW + 1)).fits is False
    with pytest.raises(AnalysisError, match=f"a context of {NEW} has no room"):
        fxmem.max_batch(llama, prompt(16, 100), dim="context", limit=NEW, **asked)


def test_a_generation_on_another_card_is_the_one_that_is_analysed_there(whole):
    tight = max(token.allocated_bytes for token in whole.run.tokens) + (4 << 20)
    card = give_room(CARD, tight).model_copy(update={"name": "small"})
    moved, made = whole.move(card), whole.vary(target=card)
    assert moved.run == made.run
    assert moved.peak == made.peak
    assert moved.profile.target == card
    assert whole.within(tight, card) == (made.peak, made.run.alloc_retries)
    rounded = whole.move(CARD, {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:2"})
    assert rounded.peak.allocated_bytes > whole.peak.allocated_bytes
    assert rounded.peak.requested_bytes == whole.peak.requested_bytes


def test_cards_that_a_generation_fits(whole):
    fits = fxmem.cards(llama, prompt(64, 40), mode="generate", new_tokens=NEW, names=["t4"])
    (card,) = fits.points
    assert (card.fits, card.reserved_bytes, card.alloc_retries) == (True, whole.peak.reserved_bytes, 0)
    assert "a generation by itself" in fits_table(fits)
    assert not whole.within(whole.peak.allocated_bytes - 1).peak.fits


def test_what_is_not_of_a_generation_is_refused(capsys):
    with pytest.raises(UsageError, match="mode='generate'"):
        fxmem.max_batch(torch.nn.Linear(3, 3), torch.ones(2, 3), dim="context")
    with pytest.raises(UsageError, match="goal memory for a generation"):
        fxmem.max_batch(llama, prompt(1, 4), mode="generate", new_tokens=2, goal="throughput")
    with pytest.raises(UsageError, match="expected the inputs of a model"):
        fxmem.max_batch(lambda size: None, mode="generate")
    for words, expected in (
        (["--prompt", "3"], "add --mode generate"),
        (["--mode", "generate", "--loss", "ce"], "no part of a generation"),
        (["--mode", "generate", "--beams", "0"], "--beams of at least 1"),
        (["--mode", "generate", "--batch", "0"], "--batch of at least 1"),
        (["--mode", "generate", "--goal", "throughput"], "without --goal throughput"),
        (["--dim", "context"], "--dim seq"),
    ):
        assert main(["max-batch", "hf:LlamaForCausalLM", *words]) == 2
        assert expected in capsys.readouterr().err


def test_the_commands_say_what_the_functions_do(capsys, tmp_path):
    model = ["hf:LlamaForCausalLM", *(word for key, value in SIZES.items() for word in ("--set", f"{key}={value}"))]
    asked = [*model, "--mode", "generate", "--batch", "2", "--prompt", "40", "--new", "2", "--quiet"]
    written = tmp_path / "found.json"
    given = ["--budget", "40MiB", "--limit", "2", "--target", "t4", "--json", str(written)]
    assert main(["max-batch", *asked, *given]) == 0
    assert Fits.model_validate_json(written.read_text()).step.generation.new_tokens == 2
    assert main(["cards", *asked, "--only", "t4", "--cache", "static", "--json", str(written)]) == 0
    assert Fits.model_validate_json(written.read_text()).step.generation.cache == "static"
    assert "static cache" in capsys.readouterr().out
