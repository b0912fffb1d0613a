"""Parts of pipelines that are quantised while they are loaded: their bytes are those that the libraries make."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem

pytestmark = pytest.mark.truth
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
OPTIONS = {"nf4": FOUR, "nf4-twice": {**FOUR, "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True}}


def count_packed(model: nn.Module, options: dict[str, Any]) -> int:
    """The bytes of a model whose linear layers bitsandbytes itself packs on the host."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = {each.weight: each for each in model.modules() if isinstance(each, nn.Linear)}
    total = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each not in linear)
    for weight in linear:
        if "load_in_8bit" in options:
            packed = bnb.nn.Int8Params(weight.detach().clone(), requires_grad=False).to("cpu")
            parts = [packed.data, packed.SCB]
        else:
            twice = options.get("bnb_4bit_use_double_quant", False)
            packed = bnb.nn.Params4bit(weight.detach().clone(), False, compress_statistics=twice, quant_type="nf4")
            packed = packed.to("cpu")
            state = packed.quant_state
            inner = [state.offset, state.state2.absmax, state.state2.code] if twice else []
            parts = [packed.data, state.absmax, state.code, *inner]
        total += sum(each.untyped_storage().nbytes() for each in parts)
    return total


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_denoiser_takes_what_bitsandbytes_packs(kind: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 4, "attention_head_dim": 64, "joint_attention_dim": 96, "pooled_projection_dim": 80}
    layers = {"num_layers": 1, "num_single_layers": 2, "axes_dims_rope": (16, 24, 24)}
    with warnings.catch_warnings(action="ignore"):
        model = diffusers.FluxTransformer2DModel(**sizes, **layers).to(torch.bfloat16)
        model.save_pretrained(tmp_path)
        with fxmem.record("rtx4090") as run:
            config = diffusers.BitsAndBytesConfig(**OPTIONS[kind])
            settings = {"torch_dtype": torch.bfloat16, "quantization_config": config}
            loaded = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, **settings)
            found = torch.cuda.memory_stats()["requested_bytes.all.current"]
        assert loaded.device.type == "cuda"
        assert run.peak.requested_bytes >= found
        own = found - count_packed(model, OPTIONS[kind])
        assert own in ((0, 1024) if "twice" in kind else (0,))  # a map that the library keeps, once for a process
