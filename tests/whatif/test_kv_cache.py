"""What a serving engine has left for keys and values."""

import json

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import fxmem
from benchmarks.published.serving import FOLDER, GIB, predict
from fxmem.__main__ import main
from fxmem.errors import UsageError
from fxmem.hardware.releases import find_release
from fxmem.records.fits import ServeSize

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 5000, "max_position_embeddings": 512}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)


def test_the_terms_add_up_to_what_is_left():
    found = fxmem.kv_cache(llama, max_batched_tokens=256, max_seqs=128, utilization=0.5, target="l4", contexts=[100])
    with torch.device("meta"):
        model = llama()
    tensors = [*model.parameters(), *model.buffers()]
    positions = 512 * 16 * 2  # sines and cosines of half a head, in bfloat16
    assert found.weights_bytes == sum(t.numel() * t.element_size() for t in tensors) + positions
    assert found.token_bytes == 4 * 2 * 2 * 16 * 2
    assert found.block_bytes == 16 * found.token_bytes
    (other, graphs) = found.uncounted
    spent = found.weights_bytes + found.profile_peak_bytes
    assert found.kv_high_bytes == found.memory_bytes // 2 - spent - other.low_bytes
    assert found.kv_low_bytes == found.memory_bytes // 2 - spent - other.high_bytes - graphs.high_bytes
    assert found.high_blocks == found.kv_high_bytes // found.block_bytes
    assert found.high_tokens == found.high_blocks * 16
    assert found.sequences[0].blocks == 7
    assert found.sequences[0].high == found.high_blocks / 7
    eager = fxmem.kv_cache(llama, max_batched_tokens=256, max_seqs=128, utilization=0.5, target="l4", eager=True)
    assert eager.kv_low_bytes == found.kv_low_bytes + graphs.high_bytes


def test_the_sampler_sorts_the_logits_of_all_sequences():
    few, many = (fxmem.kv_cache(llama, max_batched_tokens=512, max_seqs=n, target="l4") for n in (128, 512))
    logits = 384 * 5000
    # 2 bytes, 4 in float32, 12 for the values and positions in order, 20 for what CUB keeps besides
    assert many.profile_peak_bytes - few.profile_peak_bytes == pytest.approx(logits * 38, rel=0.03)
    assert many.profile_peak_at == "aten.sort.default"


def test_a_published_start():
    case = json.loads((FOLDER / "serving.json").read_text())["starts"][0]
    found = predict(case)
    assert found.weights_bytes / GIB == pytest.approx(case["weights"], abs=0.005)
    # cuBLAS keeps 32 MiB in the torch of that start, and none in 2.15
    less = 0 if find_release(torch.__version__)[0].keeps_workspaces else 32 / 1024
    assert found.profile_peak_bytes / GIB == pytest.approx(case["peak"] - less, abs=0.01)
    assert found.kv_low_bytes / GIB < case["kv"] + less < found.kv_high_bytes / GIB


def test_layers_with_a_window_share_blocks_in_groups():
    sizes = {**SIZES, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 32}
    kinds = ["sliding_attention"] * 4 + ["full_attention"] * 2

    def gemma():
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds)).to(torch.bfloat16)

    found = fxmem.kv_cache(gemma, max_batched_tokens=64, max_seqs=8, target="l4", contexts=[1000])
    assert found.groups == 3
    assert found.block_bytes == 2 * 16 * (2 * 2 * 16 * 2)
    assert found.high_tokens == found.high_blocks // 3 * 16
    assert found.sequences[0].blocks == 63 + 2 * (6 + 1)  # 1000 tokens; twice 31 + 64 tokens and one block more


def test_what_cannot_be_served_is_refused(capsys):
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        fxmem.kv_cache(llama, utilization=90)
    with pytest.raises(UsageError, match="at least 1"):
        fxmem.kv_cache(llama, max_seqs=0)
    with pytest.raises(UsageError, match="a card whose memory is known"):
        fxmem.kv_cache(llama, target="cpu")
    with pytest.raises(UsageError, match="a decoder of transformers, got Linear"):
        fxmem.kv_cache(lambda: torch.nn.Linear(3, 3))
    with pytest.raises(UsageError, match="keep keys and values for each head"):
        fxmem.kv_cache(lambda: MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=100)))
    assert main(["kv-cache", "hf:LlamaForCausalLM", "--engine", "vlm"]) == 2
    assert "did you mean vllm?" in capsys.readouterr().err
    assert main(["kv-cache", "hf:LlamaForCausalLM", "--context", "many"]) == 2
    assert "numbers of tokens" in capsys.readouterr().err


def test_the_command_says_what_is_left_or_that_nothing_is(capsys, tmp_path):
    model = ["hf:LlamaForCausalLM", *(word for key, value in SIZES.items() for word in ("--set", f"{key}={value}"))]
    asked = [*model, "--weights", "bf16", "--max-batched-tokens", "64", "--target", "l4", "--quiet"]
    written = tmp_path / "serving.json"
    assert main(["kv-cache", *asked, "--json", str(written)]) == 0
    assert ServeSize.model_validate_json(written.read_text()).max_batched_tokens == 64
    assert "tokens at once" in capsys.readouterr().out
    assert main(["kv-cache", *asked, "--utilization", "0.001"]) == 4
    assert "the engine does not start" in capsys.readouterr().out
    # 166 MiB of 22,518 are a context's: 0.9926 of the card is free.
    assert main(["kv-cache", *asked, "--utilization", "0.992"]) == 0
    capsys.readouterr()
    assert main(["kv-cache", *asked, "--utilization", "0.993"]) == 4
    assert "expected a utilization of at most 0.992, got 0.993: vllm does not start" in capsys.readouterr().err
