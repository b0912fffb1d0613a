"""Changes whose proof needs a package or a stand-in, and what the step does anyway: held against real CPU runs."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
import types
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim import Optimizer

import fxmem
from fxmem import analyze
from fxmem.records.profile import Phase
from fxmem.records.validation import Measurement
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.whatif.advice.changes import find_changes
from fxmem.whatif.advice.variant import NotApplicableError, Outcome, Variant, analyse_way

SMALL = 1e-3


def made(analysis: Analysis, key: str) -> Outcome:
    change = next(each for each in find_changes(analysis) if each.key == key)
    return analyse_way(change.make(Variant(analysis.model, analysis.request, environ={}), analysis))


def reason(analysis: Analysis, key: str) -> str:
    with pytest.raises(NotApplicableError) as caught:
        made(analysis, key)
    return str(caught.value)


def measured(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **step: Any
) -> Measurement:
    return measure_cpu(
        copy.deepcopy(model),
        StepRequest(
            args=inputs,
            kwargs=kwargs or {},
            **step,
        ),
    )


class AdamW8bit(Optimizer):
    """AdamW whose two states take a byte for each number, one scale for a parameter; a stand-in for the packages'."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state[f"{name}_scale"] = torch.zeros(1, device=parameter.device)
            update = parameter.grad
            for name, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
                whole = (state[name].float() - 128).mul_(state[f"{name}_scale"]).lerp_(parameter.grad**power, 0.1)
                scale = whole.abs().amax().div_(127)
                state[name].copy_(whole.div(scale).round_().add_(128))
                state[f"{name}_scale"].copy_(scale)
                update = whole if power == 1 else update.div_(whole.sqrt_().add_(1e-8))
            parameter.add_(update, alpha=-1e-3)


class AdamWWithZeros(torch.optim.AdamW):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class Wide(nn.Module):
    """Weights that outweigh activations at a small batch, and are outweighed at a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_one_kernel_for_attention_is_worth_what_a_real_run_says() -> None:
    sizes = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(
        **sizes, attn_implementation="eager", attn_pdrop=0.0
    )  # with dropout the CPU has no such kernel
    model, ids = transformers.GPT2Model(config), torch.zeros(2, 256, dtype=torch.int64)
    analysis = analyze(model, {"input_ids": ids}, target="cpu")
    assert analysis.peak.requested_bytes == pytest.approx(
        measured(model, (), {"input_ids": ids}).peak_without_scratch_bytes, rel=SMALL
    )
    changed = made(analysis, "sdpa")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    real = measured(model, (), {"input_ids": ids}).peak_without_scratch_bytes
    assert real < 0.8 * analysis.peak.requested_bytes
    assert changed.peak.requested_bytes == pytest.approx(real, rel=SMALL)


def test_eight_bits_of_state_are_worth_what_a_real_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    package, inner = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.optim")
    inner.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", inner)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "bitsandbytes" else find(name, *rest)
    )
    model, x = Wide(), torch.randn(16, 256)
    analysis = analyze(model, x, target="cpu")
    changed = made(analysis, "bitsandbytes-8bit")
    real = measured(model, (x,), optimizer=AdamW8bit).peak_without_scratch_bytes
    assert real < 0.8 * analysis.peak.requested_bytes
    assert changed.peak.requested_bytes == pytest.approx(real, rel=SMALL)


@pytest.mark.truth
@pytest.mark.parametrize("rows", [16, 16_384])
def test_zeroed_gradients_cost_what_is_said_of_them(rows: int) -> None:
    model, x = Wide(), torch.randn(rows, 256)
    analysis = analyze(model, x, target="cpu")
    said = re.search(
        r"with set_to_none=False its peak is .* \(([\d,]+) bytes\) higher|its peak is the same without",
        reason(analysis, "set-to-none"),
    )
    assert said is not None
    more = int((said[1] or "0").replace(",", ""))
    real = measured(model, (x,), optimizer=AdamWWithZeros).peak_without_scratch_bytes
    assert analysis.peak.requested_bytes + more == pytest.approx(real, rel=SMALL)
    assert (more > 0) == (rows > 16)


def test_a_forward_with_gradients_costs_what_is_said_of_it() -> None:
    model, x = Wide(), torch.randn(4096, 256)
    analysis = analyze(model, x, target="cpu", mode="infer", keep_outputs=False)
    said = re.search(r"without them forward takes .* \(([\d,]+) bytes\) more", reason(analysis, "no-grad"))
    assert said is not None
    real = measured(model, (x,), optimizer=None, keep_outputs=False).peak_by_phase[Phase.FORWARD]
    assert analysis.peak.requested_bytes + int(said[1].replace(",", "")) == pytest.approx(real, rel=SMALL)
    frozen = analyze(Wide().requires_grad_(False), x, target="cpu", mode="infer")
    assert reason(frozen, "no-grad").endswith("inference_mode takes the same memory")


@pytest.mark.truth
def test_what_the_step_does_anyway_stands_in_the_advice() -> None:
    found = {
        mode: fxmem.advise(analyze(Wide(), torch.zeros(64, 256), target="cpu", mode=mode), plans=False)
        for mode in ("train", "infer")
    }  # type: ignore[arg-type]
    keys = {mode: {each.key for each in advice.refused} for mode, advice in found.items()}
    assert "set-to-none" in keys["train"] - keys["infer"]
    assert "no-grad" in keys["infer"] - keys["train"]
    assert not [
        change
        for change in find_changes(analyze(Wide(), torch.zeros(4, 256), target="cpu", optimizer=None))
        if change.key == "set-to-none"
    ]
