"""Models that decide by their data, decided by a real run: against real steps on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.validation import Quantity
from fxmem.show import text


class Experts(nn.Module):
    """Rows go to one of four experts, in a loop over those that any row goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, count in enumerate(chosen.bincount(minlength=4).tolist()):
            if not count:
                continue
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return out


class Branches(nn.Module):
    """Keeps one more result where the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * self.weight
        return out.exp().exp() if x.sum() > 0 else out


class Loops(nn.Module):
    """Runs until a number is large enough, and picks by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        while float(total) < 3:
            x = self.line(x).relu() + 0.1
            total = total + 1
        return x[x.sum(1) > x.sum(1).median()]


def rows(count: int = 200) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (Experts, rows()),
        (Branches, torch.ones(1000)),
        (Branches, -torch.ones(1000)),
        (Loops, torch.ones(100, 32) * torch.arange(100)[:, None]),
    ],
)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_peak_is_that_of_a_real_step(build: type[nn.Module], x: torch.Tensor, mode: Any) -> None:
    torch.manual_seed(7)
    verdict = fxmem.validate(
        build(), x, mode=mode, values="real", optimizer=None
    )  # an optimizer would change what is read
    by_quantity = {each.quantity: each for each in verdict.comparisons}
    found = by_quantity[Quantity.REQUESTED_WITHOUT_SCRATCH]
    assert abs(found.predicted_bytes - found.measured_bytes) <= 16  # of scalars


def test_made_up_values_are_the_same_in_the_prediction_and_in_the_run() -> None:
    class Weighs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x * self.weight
            return out.exp().exp() if self.weight.sum() > 500 else out

    x = torch.empty(1000, device="meta")
    found = fxmem.validate(Weighs, x, values="real", optimizer=None).comparisons[-1]
    assert abs(found.predicted_bytes - found.measured_bytes) <= 16


def test_values_say_what_they_are_of() -> None:
    with pytest.raises(AnalysisError, match="values='real'"):
        fxmem.analyze(Experts(), rows(), target="cpu")
    model = Experts()
    before = [parameter.clone() for parameter in model.parameters()], torch.random.get_rng_state()
    analysis = fxmem.analyze(model, rows(), target="h100", values="real")
    said = [each.text for each in analysis.profile.assumptions if each.topic == "values"]
    said_first, _, _ = said[0].partition(";")
    assert said_first == "what depends on data is decided by one real run on the CPU, for this batch alone (x 200x64)"
    assert f"Note        {said_first}" in text.overview(analysis.profile, analysis.timeline, width=200)
    assert all(map(torch.equal, before[0], model.parameters()))
    assert torch.equal(before[1], torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.device("meta"):
        made_up = fxmem.analyze(Experts(), torch.empty(200, 64), target="cpu", values="real")
    assert made_up.peak.requested_bytes > 0


def test_real_runs_that_fail() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not on this machine")

    with pytest.raises(AnalysisError, match="the model on real values raised ValueError: not on this machine"):
        fxmem.analyze(Fails(), rows(), target="cpu", values="real")
    with pytest.raises(UsageError, match="expected values 'bound' or 'real', got 'true'"):
        fxmem.analyze(Experts(), rows(), target="cpu", values="true")  # type: ignore[arg-type]
