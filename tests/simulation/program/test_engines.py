"""vLLM in the process that trains: awake it has its share of the card, asleep nothing."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxmem
from fxmem.errors import AnalysisError
from fxmem.records.parts import EngineUse
from fxmem.records.profile import Phase
from fxmem.show.run_facts import program_facts

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 1024}
BLOCK = 16 * 2 * 2 * 2 * 16 * 2  # tokens, layers, keys and values, heads, their size, bytes
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> str:
    LlamaConfig(**SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    return str(tmp_path)


def start(folder: str, **settings: Any) -> Any:
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(folder, max_num_batched_tokens=256, max_num_seqs=8, **{"gpu_memory_utilization": 0.5, **settings})


def train(folder: str, *, level: int, steps: int = 2, oom: str = "raise", **settings: Any) -> Any:
    """Steps as TRL makes them: the engine sleeps where it does not generate."""
    with fxmem.record("rtx3080", steps=steps, out_of_memory=oom) as run:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        assert StructuredOutputsParams(regex=None).regex is None
        with pytest.raises(ImportError):
            from vllm import _custom_ops  # noqa: F401 - which libraries look for
        policy = LlamaForCausalLM(LlamaConfig(**SIZES)).cuda()
        optimizer = torch.optim.AdamW(policy.parameters())
        llm = start(folder, enable_sleep_mode=level > 0, **settings)
        if level:
            llm.sleep(level=level)
        while True:
            torch.cuda.empty_cache()
            if level:
                llm.wake_up(tags=["weights"])
            engine = llm.llm_engine.model_executor.driver_worker.model_runner.model
            assert len(engine.load_weights(policy.named_parameters())) == len(list(policy.parameters()))
            if level:
                llm.wake_up(tags=["kv_cache"])
            prompts = [{"prompt_token_ids": [5] * 30}] * 4
            made = llm.generate(prompts, sampling_params=SamplingParams(n=2, max_tokens=20, logprobs=0))
            if level:
                llm.sleep(level=level)
            outputs = [each for request in made for each in request.outputs]
            assert len(outputs) == 8
            assert all(len(each.token_ids) == len(each.logprobs) == 20 for each in outputs)
            ids = torch.tensor([[5] * 30 + each.token_ids for each in outputs]).cuda()
            policy(ids).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


def engine_of(run: Any) -> EngineUse:
    (engine,) = run.program.engines
    return engine


def test_an_engine_has_its_share_awake_and_nothing_asleep(folder: str) -> None:
    run = train(folder, level=2)
    engine = engine_of(run)
    total = run.profile.target.memory_bytes
    share = math.ceil(total / 2)
    assert engine.kv_bytes % BLOCK == 0
    assert share - BLOCK < engine.weights_bytes + engine.profile_peak_bytes + engine.kv_bytes <= share
    assert engine.start_free_bytes < total
    assert (engine.level, engine.sleeps) == (2, 3)
    parts = {each.title: each for each in run.rounds[1].parts}
    assert parts["rollout of vllm"].requested_bytes > engine.kv_bytes
    # Weights alone wake before they are written.
    assert parts["sync of vllm"].requested_bytes < 32 * MIB
    assert parts["backward"].reserved_bytes < 64 * MIB
    assert run.rounds[0].phase is run.rounds[1].phase is Phase.ROLLOUT
    kinds = {each.name: each.kind for each in run.profile.storages if "kv_cache" in each.name}
    assert kinds == {"vllm.kv_cache_0": "buffer", "vllm.kv_cache_1": "buffer"}
    shown = {each.label: each.text for each in program_facts(run.profile)}
    assert "gpu_memory_utilization 0.5" in shown["Engine"]
    assert [each.topic for each in run.profile.assumptions].count("engine") == 2
    assert any("beside torch's allocator" in each.what for each in run.profile.unknowns)
    assert importlib.util.find_spec("vllm") is None
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)


def test_an_engine_that_cannot_sleep_has_its_share_throughout(folder: str) -> None:
    run = train(folder, level=0)
    parts = {each.title: each for each in run.rounds[1].parts}
    assert parts["backward"].requested_bytes > engine_of(run).kv_bytes
    assert engine_of(run).sleeps == 0


def test_the_largest_share_is_the_largest_that_runs(folder: str) -> None:
    most = engine_of(train(folder, level=2)).most_utilization
    assert most is not None
    assert train(folder, level=2, gpu_memory_utilization=most).shortage == ""
    more = train(folder, level=2, gpu_memory_utilization=most + 0.004, oom="continue")
    assert "runs out" in more.shortage
    assert engine_of(more).most_utilization == most


def test_weights_that_sleep_at_level_1_are_pinned(folder: str) -> None:
    # Of the weights, 300 x 64 of two bytes is the largest.
    assert train(folder, level=1).host.pinned_bytes >= train(folder, level=2).host.pinned_bytes + 65536


def test_an_engine_starts_only_where_its_share_is_free(folder: str) -> None:
    with fxmem.record("rtx3080") as run:
        filler = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            start(folder)
        del filler
        with pytest.raises(ValueError, match=r"expected a larger gpu_memory_utilization than 0\.0001"):
            start(folder, gpu_memory_utilization=0.0001)
        assert start(folder, kv_cache_memory_bytes=3 * BLOCK, max_model_len=32).apply_model(lambda model: 3) == [3]
    assert engine_of(run).kv_bytes == 3 * BLOCK


def test_waking_takes_nothing_that_the_allocator_has_cached(folder: str) -> None:
    """As cuMemCreate, which fails where an allocation of torch would free its cache and try again."""
    with fxmem.record("rtx3080"):
        llm = start(folder, enable_sleep_mode=True)
        llm.sleep()
        idle = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
        del idle
        with pytest.raises(torch.cuda.OutOfMemoryError):
            llm.wake_up()
        torch.cuda.empty_cache()
        llm.wake_up()
        assert len(llm.generate([5, 6])) == 1


def test_what_is_not_followed_is_refused(folder: str) -> None:
    with fxmem.record("rtx3080"):
        with pytest.raises(AnalysisError, match=r"test_engines\.py:\d+ has tensor_parallel_size=2"):
            start(folder, tensor_parallel_size=2)
        llm = start(folder, enable_sleep_mode=True)
        llm.sleep()
        with pytest.raises(AnalysisError, match="finds its weights and kv_cache asleep"):
            llm.generate([[5, 6]])
        llm.wake_up()
        (request,) = llm.generate([5, 6])
        assert len(request.outputs[0].token_ids) == 16
        with pytest.raises(AnalysisError, match=r"\(reload_weights, sleep, wake_up\); got 'save'"):
            llm.collective_rpc("save")
        assert llm.collective_rpc("reload_weights") == [None]
