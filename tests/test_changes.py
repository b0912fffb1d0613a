"""Changes to a step: what each promises is held against real CPU runs of the changed program."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxmem import _changes, analyze
from fxmem._changes import Change, NotToBeHadError, Outcome, Variant, changes_for, outcome
from fxmem.analysis import Analysis
from fxmem.measuring import measure_cpu

SMALL = 1e-3


class Mlp(nn.Module):
    """Activations of which all but the first may run in place: its input is kept by what made it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.kept, self.one, self.two, self.three = nn.ReLU(), nn.LeakyReLU(), nn.LeakyReLU(), nn.LeakyReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.kept(torch.exp(self.a(x)))
        for activation in (self.one, self.two, self.three):
            x = activation(self.b(x))
        return self.c(x)


class Speaker(nn.Module):
    """Logits, a loss over them, and an output that holds both."""

    def __init__(self, vocabulary: int = 3000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()), "logits": logits}


def by_key(analysis: Analysis) -> dict[str, Change]:
    return {change.key: change for change in changes_for(analysis)}


def made(analysis: Analysis, key: str) -> Outcome:
    return outcome(by_key(analysis)[key].make(Variant(analysis.model, analysis.call, dict(os.environ)), analysis))


def measured(model: nn.Module, x: torch.Tensor, **step: object) -> int:
    settings = {"mode": "train", "loss": None, "optimizer": "adamw", "precision": None, **step}
    return measure_cpu(copy.deepcopy(model), (x,), {}, **settings).peak_without_scratch_bytes


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    model(x).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_activations_are_put_in_place_where_autograd_allows_it() -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(512, 64)
    analysis = analyze(model, x, target="cpu")
    changed = made(analysis, "inplace")
    modules = dict(changed.variant.model.named_modules())
    assert [name for name in ("kept", "one", "two", "three") if modules[name].inplace] == ["one", "two", "three"]
    assert not model.one.inplace
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes
    model.one.inplace = model.two.inplace = model.three.inplace = True
    assert changed.peak.requested_bytes == pytest.approx(measured(model, x), rel=SMALL)
    plain = Mlp()
    plain.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), gradients(plain, x), strict=True))
    model.kept.inplace = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, x)


@pytest.mark.parametrize(("key", "optimizer"), [("sgd-optimizer", "sgd"), ("sgd-momentum-optimizer", "sgd-momentum"), ("adafactor-optimizer", "adafactor")])
def test_another_optimizer_is_worth_what_a_real_run_says(key: str, optimizer: str) -> None:
    model, x = Mlp(), torch.randn(16, 64)
    changed = made(analyze(model, x, target="cpu"), key)
    assert changed.peak.requested_bytes == pytest.approx(measured(model, x, optimizer=optimizer), rel=SMALL)


def test_bfloat16_weights_are_worth_what_a_real_run_says() -> None:
    model, x = Mlp(), torch.randn(512, 64)
    changed = made(analyze(model, x, target="cpu"), "bf16-weights")
    assert model.a.weight.dtype is torch.float32
    assert changed.peak.requested_bytes == pytest.approx(measured(model.to(torch.bfloat16), x.bfloat16()), rel=SMALL)


def test_autocast_is_worth_what_a_real_run_says() -> None:
    model, x = Mlp(), torch.randn(2048, 64)
    changed = made(analyze(model, x, target="cpu"), "bf16-autocast")
    assert changed.peak.requested_bytes == pytest.approx(measured(model, x, precision="bf16"), rel=SMALL)


def test_letting_go_of_an_output_is_worth_what_a_real_run_says() -> None:
    class OnlyTheLoss(Speaker):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(ids)["loss"]

    ids = torch.randint(0, 3000, (4, 64))
    analysis = analyze(Speaker(), ids, target="cpu", loss=lambda out: out["loss"])
    release = [change for change in changes_for(analysis) if change.key == "release:head"]
    assert len(release) == 1
    assert "logits = self.head" in release[0].code
    changed = outcome(release[0].make(Variant(analysis.model, analysis.call, {}), analysis))
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes - 2_000_000
    assert changed.peak.requested_bytes == pytest.approx(measured(OnlyTheLoss(), ids), rel=SMALL)


def test_cross_entropy_in_chunks_is_the_same_loss_and_leaves_torch_as_it_was() -> None:
    before = F.cross_entropy
    analysis = analyze(Speaker(), torch.randint(0, 3000, (4, 64)), target="cpu", loss=lambda out: out["loss"])
    changed = made(analysis, "chunked-loss")
    assert F.cross_entropy is before
    assert changed.peak.requested_bytes < analysis.peak.requested_bytes
    logits, labels = torch.randn(64, 50, dtype=torch.float64, requires_grad=True), torch.randint(0, 50, (64,))
    labels[3] = -100
    expected = F.cross_entropy(logits, labels)
    wanted = torch.autograd.grad(expected, logits)[0]
    with _changes._cross_entropy_in_chunks():
        loss = F.cross_entropy(logits, labels)
        smoothed = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert torch.allclose(torch.autograd.grad(loss, logits)[0], wanted, rtol=1e-12)
    assert torch.equal(smoothed, F.cross_entropy(logits, labels, label_smoothing=0.1))


def test_channels_last_is_for_convolutions_and_changes_no_tensor_of_the_users() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    analysis = analyze(model, torch.randn(2, 3, 16, 16), target="h100")
    assert made(analysis, "channels-last").variant.call.args[0].is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()
    with pytest.raises(NotToBeHadError, match="no convolutions"):
        made(analyze(Mlp(), torch.randn(2, 64), target="h100"), "channels-last")


def test_a_change_that_is_there_already_is_not_offered_twice() -> None:
    analysis = analyze(Mlp(), torch.randn(2, 64), target="cpu", precision="bf16")
    for key in ("bf16-autocast", "bf16-weights"):
        with pytest.raises(NotToBeHadError, match="already"):
            made(analysis, key)
    assert "expandable-segments" not in by_key(analysis)
    assert not [key for key in by_key(analyze(Mlp(), torch.randn(2, 64), target="cpu", optimizer=None)) if "optimizer" in key]
