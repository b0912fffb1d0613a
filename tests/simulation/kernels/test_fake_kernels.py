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


def counted(_: Doing, x: Tensor) -> Tensor:
    return x + sum(part.sum() for part in torch.histogram(x.detach(), 4000))


def rounded(_: Doing, x: Tensor) -> Tensor:
    zeros = torch.zeros(64, dtype=torch.int32)
    by_column = torch.fake_quantize_per_channel_affine(x, torch.ones(64), zeros, 1, -128, 127)
    return torch.fake_quantize_per_tensor_affine(by_column, 0.1, 0, -128, 127).tanh()


def warped(_: Doing, x: Tensor) -> Tensor:
    grid = torch.zeros(2, 16, 16, 2) + x[0, 0]
    return F.grid_sample(x.view(2, 4, 16, 16), grid, align_corners=False).sum()


def bags(_: Doing, x: Tensor) -> Tensor:
    return F.embedding_bag(torch.arange(4096).view(256, 16) % 32, x)


def assert_as_measured(model: nn.Module, **step: object) -> None:
    found = validate(model, X, **step)
    held = next(each for each in found.comparisons if each.quantity is Quantity.REQUESTED_WITHOUT_SCRATCH)
    assert abs(held.predicted_bytes - held.measured_bytes) <= 16, held


@pytest.mark.parametrize("function", [mixture, multi_margin, multilabel_margin, pooled, rounded, warped])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_peak_is_a_real_run_s(function: Callable[[nn.Module, Tensor], Tensor], mode: str) -> None:
    loss = {"loss": lambda out: out.square().sum(), "optimizer": "sgd"} if mode == "train" else {}
    assert_as_measured(Doing(function), mode=mode, **loss)


@pytest.mark.parametrize("function", [counted, bags])
def test_the_peak_of_inference_is_a_real_run_s(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert_as_measured(Doing(function), mode="infer")


class Attends(nn.Module):
    def __init__(self, **kept: object) -> None:
        super().__init__()
        self.attention, self.kept = nn.MultiheadAttention(64, 2, batch_first=True), kept

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 16, 64)
        return self.attention(x, x, x, **self.kept)[0]


class Encodes(nn.Module):
    def __init__(self, mask: Tensor | None = None, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, **options)
        self.layers, self.mask = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(2, 16, 64), mask=self.mask, is_causal=self.mask is not None)


@pytest.mark.parametrize(
    "make",
    [
        Attends,
        lambda: Attends(need_weights=False),
        lambda: Attends(key_padding_mask=torch.ones(2, 16) > 2),
        lambda: Attends(average_attn_weights=False),
        Encodes,
        lambda: Encodes(torch.ones(16, 16).triu(1) > 0, norm_first=True, activation="gelu"),
    ],
)
def test_attention_and_encoders_run_their_own_kernels_at_inference(make: Callable[[], nn.Module]) -> None:
    held = next(each for each in validate(make(), X, mode="infer").comparisons if each.quantity is Quantity.REQUESTED)
    assert abs(held.predicted_bytes - held.measured_bytes) <= 16, held


def test_factors_of_reflectors_have_their_sizes() -> None:
    profile = analyze(Doing(lambda _, x: torch.geqrf(x)), X, mode="infer", target="cpu").profile
    made = [storage.nbytes for storage in profile.storages if storage.birth > 0]
    assert made == [32 * 64 * 4, 32 * 64 * 4, 32 * 4]


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
