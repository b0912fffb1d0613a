"""Weights as checkpoints pack them: held to what the hub counts in real checkpoints, and to sums by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.__main__ import main
from fxmem.cli.specs import build_model
from fxmem.simulation.step.given import pack_weights

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
}


def count(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def buffer_bytes(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in model.buffers())


@pytest.mark.parametrize(
    ("name", "config", "published", "elements", "bits", "scale"),
    [
        # The hub counts weights and scales alike: what it counts beyond the parameters are the scales.
        ("Qwen/Qwen3-8B", FP8, 8_191_159_296, 128 * 128, 8, 4),  # Qwen/Qwen3-8B-FP8
        ("Qwen/Qwen3-30B-A3B", FP8, 30_533_947_392, 128 * 128, 8, 4),  # Qwen/Qwen3-30B-A3B-Instruct-2507-FP8
        ("openai/gpt-oss-20b", MXFP4, 21_511_953_984, 32, 4, 1),
        ("openai/gpt-oss-120b", MXFP4, 120_412_337_472, 32, 4, 1),
    ],
)
def test_blocks_with_scales(
    name: str, config: dict[str, Any], published: int, elements: int, bits: int, scale: int
) -> None:
    model = build_model(f"hf:{name}", mode="infer").module
    scales = published - count(model)
    packed = scales * elements
    expected = 2 * (count(model) - packed) + packed * bits // 8 + scales * scale + buffer_bytes(model)
    assert pack_weights(model, config).nbytes == expected


def test_rows_with_scales() -> None:
    model = build_model("hf:meta-llama/Llama-3.1-8B", mode="infer").module
    rows = 8_031_637_504 - count(model)  # meta-llama/Llama-Guard-3-8B-INT8
    rest = 2 * 128_256 * 4096 + (2 * 32 + 1) * 4096  # embedding and head, norms
    packed = pack_weights(model, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert packed.nbytes == 2 * rest + (count(model) - rest) + 4 * rows + buffer_bytes(model)
    assert packed.method == "bitsandbytes, 8 bits"


def ct(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "matrix"),
    [
        # Of a matrix with 256 rows and 512 columns.
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 256 * 512 // 2 + 4 * 256 // 2 + 4 * 256 * 2 + 512 * 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 256 * 512 + 256 + 256 * 2 + 512 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 256 * 512 // 2 + 4 * 256 // 2 + 4 * 256 * 2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 256 * 512 // 2 + 2048 * 4 + 64),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            256 * 512 // 2 + 2048 + 8 * 4 + 1024 + 4 + 64,
        ),
        (ct("pack-quantized", num_bits=4, strategy="group", group_size=128), 256 * 512 // 2 + 256 * 4 * 2 + 16),
        (ct("float-quantized", num_bits=8, strategy="channel"), 256 * 512 + 256 * 2),
        (ct("int-quantized", num_bits=8, strategy="tensor"), 256 * 512 + 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["0"]}, 256 * 512 * 2),
        ({**ct("int-quantized", num_bits=8, strategy="tensor"), "ignore": ["re:.*0$"]}, 256 * 512 * 2),
        ({"quant_method": "aqlm"}, None),
        ({"quant_method": "gptq", "bits": "four", "group_size": 128}, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0.0}, 256 * 512 // 2 + 256 // 2 + 256 * 2 + 512 * 4),
        (ct("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group"), None),
        ({}, None),
    ],
)
def test_a_matrix_by_hand(config: dict[str, Any], matrix: int | None) -> None:
    model = nn.Sequential(nn.Linear(512, 256, dtype=torch.bfloat16, device="meta"))
    assert pack_weights(model, config).nbytes == (None if matrix is None else matrix + 256 * 2)


def test_a_generation_says_what_it_cannot_follow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hf:openai/gpt-oss-20b", "--prompt", "8", "--new", "8", "--quiet"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "packed weights (mxfp4), whose kernels no run without a card can follow" in message
    assert "the weights take 12.8 GiB (13,761,265,024 bytes); --weights bf16" in message


@pytest.mark.truth
@pytest.mark.parametrize(("kind", "smaller"), [("int8", 0.55), ("fp8", 0.55), ("nf4", 0.75)])
def test_a_generation_with_quantised_weights(kind: str, smaller: float, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "hf:LlamaForCausalLM", "--prompt", "8", "--new", "8", "--quiet", "--json", "-"]
    sizes = {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
    words += [f"--set={key}={value}" for key, value in (sizes | {"vocab_size": 512, "dtype": "bfloat16"}).items()]
    found = []
    for more in ([], ["--quantize", kind]):
        assert main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    whole, packed = (
        sum(each["nbytes"] for each in report["storages"] if each["kind"] == "parameter") for report in found
    )
    assert 0.25 * whole < packed < smaller * whole
    assert any(f"linear layers are {kind}" in each["text"] for each in found[1]["assumptions"])
