"""Operators for which torch has no kernel on FakeTensors, or one that refuses more: held against real CPU runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxmem import analyze
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate

X = torch.ones(32, 64)


class Doing(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first = function, nn.Linear(64, 64)
        self.experts = nn.Parameter(torch.ones(2, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def mixture(module: Doing, x: Tensor) -> Tensor:
    return torch._grouped_mm(x, module.experts, offs=torch.tensor([8, 32], dtype=torch.int32, device=x.device))


def multi_margin(_: Doing, x: Tensor) -> Tensor:
    return F.multi_margin_loss(x, torch.zeros(32, dtype=torch.long, device=x.device))


def multilabel_margin(_: Doing, x: Tensor) -> Tensor:
    return F.multilabel_margin_loss(x, torch.zeros(32, 64, dtype=torch.long, device=x.device))


def pooled(_: Doing, x: Tensor) -> Tensor:
    return F.max_pool1d(x.tanh(), 2)


def assert_as_measured(model: nn.Module, **step: object) -> None:
    found = validate(model, X, **step)
    held = next(each for each in found.comparisons if each.quantity is Quantity.REQUESTED_WITHOUT_SCRATCH)
    assert abs(held.predicted_bytes - held.measured_bytes) <= 16, held


@pytest.mark.parametrize("function", [mixture, multi_margin, multilabel_margin, pooled])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_peak_is_a_real_run_s(function: Callable[[nn.Module, Tensor], Tensor], mode: str) -> None:
    loss = {"loss": lambda out: out.square().sum(), "optimizer": "sgd"} if mode == "train" else {}
    assert_as_measured(Doing(function), mode=mode, **loss)


@pytest.mark.parametrize("optimizer", ["sgd:fused", "sgd:fused,momentum=0.9", "adagrad:fused"])
def test_fused_optimizers_on_the_cpu(optimizer: str) -> None:
    assert_as_measured(nn.Linear(64, 64), loss=lambda out: out.square().sum(), optimizer=optimizer)


@pytest.mark.parametrize("function", [mixture, multi_margin, multilabel_margin])
def test_a_card_runs_them_too(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    profile = analyze(Doing(function), X, target="h100", optimizer="sgd:fused").profile
    assert "aten._fused_sgd_.default" in {op.name for op in profile.ops}


def test_windows_without_a_gap_are_taken_to_be_such() -> None:
    def sound(_: Doing, x: Tensor) -> Tensor:
        return torch.istft(torch.complex(x.t(), x.t())[:33], 64, window=torch.ones(64, device=x.device))

    for target in ("cpu", "h100"):
        profile = analyze(Doing(sound), X, mode="infer", target=target).profile
        assert "aten.unfold_backward.default" in {op.name for op in profile.ops}


def test_an_encoder_computes_every_token_where_a_real_run_leaves_padding_out() -> None:
    class Padded(nn.TransformerEncoder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, src_key_padding_mask=torch.zeros(2, 16, dtype=torch.bool, device=x.device))

    model = Padded(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), 1)
    profile = analyze(model, X.view(2, 16, 64), mode="infer", target="cpu").profile
    assert any("nested tensors of an encoder: every token" in each.text for each in profile.assumptions)
