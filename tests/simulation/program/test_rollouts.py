"""`generate` within a program: the tokens in the middle, made by arithmetic, are those that run one by one."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import fxmem
from fxmem.memory.generation import LoopEvent, LoopSteps
from fxmem.records.profile import Phase
from fxmem.show.run_facts import program_facts
from fxmem.simulation.program import RecordedProgram
from fxmem.simulation.run.decode_loops import _Loop

SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=48))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=300, state_size=8))


def generate(make: Any, new_tokens: int, calls: int = 1, **options: Any) -> Any:
    """What the card says after each call and a forward of what it made, with the record."""
    found: list[Any] = []
    with fxmem.record("h100", out_of_memory="continue") as run:
        model = make().cuda().eval()
        prompt = torch.randint(3, 300, (2, 30))
        given = {"input_ids": prompt.cuda(), "attention_mask": torch.ones_like(prompt).cuda()}
        for _ in range(calls):
            made = model.generate(**given, max_new_tokens=new_tokens, pad_token_id=0, **options)
            ids = made if isinstance(made, torch.Tensor) else made.sequences
            cache = None if isinstance(made, torch.Tensor) else made.past_key_values
            shapes = [tuple(each.keys.shape) for each in cache.layers] if cache else []
            found += [tuple(ids.shape), shapes, torch.cuda.memory_stats()]
        model(ids)
        found.append(torch.cuda.memory_stats())
    return found, run


def describe(run: RecordedProgram) -> list[str]:
    return [each.text for each in run.profile.assumptions if each.topic == "generation" and "generate at" in each.text]


def compare(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> str:
    found, made = generate(*args, **options)
    with monkeypatch.context() as patched:
        patched.setattr(_Loop, "end_step", lambda *_: None)
        expected, recorded = generate(*args, **options)
    assert found == expected
    drop = {"operators"}
    assert [each.model_dump(exclude=drop) for each in made.rounds] == [
        each.model_dump(exclude=drop) for each in recorded.rounds
    ]
    assert made.peak.requested_bytes == recorded.peak.requested_bytes
    assert (made.peak.allocated_bytes, made.peak.reserved_bytes) == (
        recorded.peak.allocated_bytes,
        recorded.peak.reserved_bytes,
    )
    assert describe(recorded) == []
    (line,) = describe(made)
    assert "are made by arithmetic; those that ran after them are as they say" in line
    return line


@pytest.mark.truth
@pytest.mark.parametrize(
    ("make", "new_tokens", "calls", "options"),
    [
        (llama, 34, 1, {"num_beams": 3, "do_sample": False, "repetition_penalty": 1.2}),
        (llama, 34, 2, {"cache_implementation": "static", "disable_compile": True, "do_sample": False}),
        (llama, 40, 2, {"min_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": 5}),
        (mistral, 56, 1, {"do_sample": True}),  # its window is full on the way
        (mamba, 34, 1, {"do_sample": True}),
    ],
)
def test_tokens_in_the_middle_are_those_that_run(
    monkeypatch: pytest.MonkeyPatch, make: Any, new_tokens: int, calls: int, options: dict[str, Any]
) -> None:
    """Every count of `torch.cuda.memory_stats` included: what was allocated, and what became of the blocks."""
    compare(monkeypatch, make, new_tokens, calls=calls, **options)


@pytest.mark.truth
def test_steps_that_look_even_but_are_not_far_ahead_are_compared_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer whose length is a multiple of 16: of three steps none shows it."""
    forward = LlamaAttention.forward

    def pad(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        length = past_key_values.get_seq_length() if past_key_values is not None else 0
        torch.empty(-(-length // 16) * 16 << 10, device="cuda")
        return forward(self, *args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", pad)
    line = compare(monkeypatch, llama, 90, do_sample=False)
    assert "16 of 89 decode steps" in line  # a period of 16


def test_a_program_generates_most_of_its_tokens_by_arithmetic() -> None:
    found, run = generate(llama, 40, calls=2, do_sample=False)
    assert found[0] == (2, 70)
    (line,) = describe(run)
    assert line.partition(": ")[2] == (
        "64 of 78 decode steps are made by arithmetic; those that ran after them are as they say"
    )


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.truth
def test_what_sees_every_token_gets_every_token() -> None:
    seen: list[int] = []
    streamer = types.SimpleNamespace(put=lambda ids: seen.append(ids.numel()), end=lambda: None)
    _, run = generate(llama, 40, do_sample=False, streamer=streamer)
    assert len(seen) == 41
    assert "runs token by token: it streams tokens to a SimpleNamespace" in describe(run)[0]
    _, run = generate(llama, 40, do_sample=False, logits_processor=LogitsProcessorList([Own()]))
    assert "runs token by token: a logits processor of the program's own, Own" in describe(run)[0]


@pytest.mark.truth
def test_the_card_runs_out_within_the_tokens_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[str, int, int]:
        with fxmem.record("rtx3080") as recorded:
            model = llama().cuda().eval()
            filler = torch.empty(torch.cuda.mem_get_info()[0] - (60 << 20), dtype=torch.uint8, device="cuda")
            ids = torch.full((512, 64), 5, device="cuda")
            with pytest.raises(torch.cuda.OutOfMemoryError) as error:
                model.generate(ids, max_new_tokens=2000, do_sample=False, pad_token_id=0)
            left = torch.cuda.memory_reserved()
            words = str(error.value).partition(" GPU 0")[0]
            del error, filler
        return words, left, recorded.rounds[-1].requested_bytes

    made = run()
    with monkeypatch.context() as patched:
        patched.setattr(_Loop, "end_step", lambda *_: None)
        assert made == run()


def test_an_iteration_has_phases_with_peaks_of_their_own() -> None:
    with fxmem.record("h100", steps=1) as run:
        policy, reference = llama().cuda(), llama().cuda().eval()
        optimizer = torch.optim.AdamW(policy.parameters())
        for _ in range(2):
            ids = policy.generate(torch.full((2, 20), 5, device="cuda"), max_new_tokens=3, pad_token_id=0)
            with torch.no_grad():
                theirs = reference(ids).logits
            loss = (policy(ids).logits - theirs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    parts = run.rounds[0].parts
    assert [each.title for each in parts if each.phase is not Phase.FORWARD or each.model] == [
        "rollout of policy",
        "forward without gradients of reference",
        "forward of policy",
        "backward",
        "optimizer",
    ]
    assert max(each.requested_bytes for each in parts) == run.rounds[0].requested_bytes
    assert max(each.allocated_bytes for each in parts) == run.rounds[0].allocated_bytes
    by_title = {each.title: each.requested_bytes for each in parts}
    assert by_title["forward of policy"] > by_title["forward without gradients of reference"]
    shown = [each.text for each in program_facts(run.profile)]
    assert any(each.startswith("rollout of policy: ") for each in shown)


def test_steps_are_even_only_where_every_multiple_of_a_padding_was_crossed() -> None:
    steps = LoopSteps()
    for number in range(16):
        steps.add(number, [LoopEvent((number, "a"), 16 * number), LoopEvent((number, "a"), None)], ("op",), 3, 5)
        assert steps.find_even() is None
    steps.add(16, [LoopEvent((16, "a"), 256), LoopEvent((16, "a"), None)], ("op",), 3, 5)
    even = steps.find_even()
    assert even is not None
    assert even.period == 1
    assert [each[0] for each in even.sizes(3)] == [[272], [288], [304]]
    assert even.sum_flops(3) == 9

    padded = LoopSteps()
    for number in range(24):
        size = -(-number // 8) * 8
        padded.add(number, [LoopEvent((number, "a"), size), LoopEvent((number, "a"), None)], ("op",), number, 5)
    even = padded.find_even()
    assert even is not None
    assert even.period == 8
    assert [step[0] for copy in even.sizes(1) for step in copy] == [24, 32, 32, 32, 32, 32, 32, 32]
    assert even.sum_flops(1) == sum(range(24, 32))


def test_generate_may_be_the_first_call_of_a_model_that_is_made_on_the_card() -> None:
    with fxmem.record("h100") as run:
        with torch.device("cuda"):
            model = llama().eval()
        ids = model.generate(torch.full((2, 20), 5, device="cuda"), max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert ids.shape == (2, 50)
    assert "decode steps are made by arithmetic" in describe(run)[0]
