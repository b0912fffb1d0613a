"""How long a program's tensors live, held to real runs on the CPU to the byte."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem._torch import kernels as torch_kernels
from fxmem.validation.measure_cpu import quiet_profiler, without_garbage
from fxmem.validation.profiler_log import live_bytes, read_events
from fxmem.validation.validate import validate

LARGE = 64, 1024


class SharedStorage(nn.Module):
    """Reads a storage by another tensor, after its buffer has got a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(128, 512))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.empty(0)
        shared.set_(self.table.untyped_storage(), 0, (128, 512), (512, 1))
        self.table.data = self.table.data * 1.0
        return x @ shared


class GivenAway(nn.Module):
    """Gives a temporary to a function of torch in Python, which frees it as it assigns to its argument."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(LARGE))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "gaussian_nll_loss":
            return F.gaussian_nll_loss(self.scale, x, (x * x).detach() + 0.1, full=True)
        return torch.stft(input=self.scale * x, n_fft=32, hop_length=512, return_complex=True).abs().sum()


def test_a_shared_storage_is_freed_with_its_last_tensor() -> None:
    found = validate(SharedStorage, torch.randn(300, 128), mode="infer", tolerance=0)
    assert found.within_tolerance


@pytest.mark.parametrize("name", ["gaussian_nll_loss", "stft"])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_function_frees_the_argument_it_assigns_to(name: str, mode: str) -> None:
    options = {"loss": torch.sum, "optimizer": None} if mode == "train" else {}
    found = validate(functools.partial(GivenAway, name), torch.randn(LARGE), mode=mode, tolerance=2e-5, **options)
    assert found.within_tolerance


@pytest.mark.usefixtures("others_frozen")
@pytest.mark.parametrize("use_reentrant", [pytest.param(False, marks=pytest.mark.truth), True])
def test_a_program_keeps_the_generators_state_of_each_region(use_reentrant: bool) -> None:
    def train() -> None:
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        optimizer = torch.optim.SGD(blocks.parameters(), momentum=0.9)
        for _ in range(3):
            x = torch.randn(30, 32, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()

    train()  # torch imports what it needs
    with without_garbage(), quiet_profiler(), torch_kernels.profiler() as profiled:
        train()
    with fxmem.record("cpu") as recorded:
        train()
    assert max(each.requested_bytes for each in recorded.rounds) == max(live_bytes(0, read_events(profiled), {}))


@pytest.fixture
def scripted() -> Iterator[Any]:
    """A function that TorchScript differentiates block by block."""
    with warnings.catch_warnings(action="ignore"):
        yield torch.jit.script(repeat_sine)


def repeat_sine(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x.sin() * x + 1
    return x


def calls(function: Any) -> nn.Module:
    """A module that calls a function of TorchScript, which cannot be one of its attributes: nothing copies one."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Any:
            return function(self.layer(x), 3)

    return Calls()


def test_a_scripted_function_keeps_what_it_keeps_after_its_first_runs(scripted: Any) -> None:
    batch = torch.randn(30, 32)
    found = validate(lambda: calls(scripted), batch, optimizer=None, tolerance=0)
    assert found.within_tolerance
    scripted(batch, 2)  # it learns that nothing needs a gradient
    scripted(batch, 2)
    again = fxmem.analyze(calls(scripted), batch, optimizer=None, target="cpu")
    assert again.peak.requested_bytes == found.predicted.requested_bytes
    assert scripted(batch.requires_grad_(), 2).grad_fn.name() == "AddBackward1"  # as in a new process


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.second(torch.tanh(x) * torch.sigmoid(x))


TORCHSCRIPT = [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 64))]


@pytest.mark.parametrize("make", TORCHSCRIPT, ids=["scripted", "traced"])
def test_a_module_of_torchscript_keeps_in_a_program_what_its_interpreter_keeps(make: Any) -> None:
    def train() -> Any:
        with warnings.catch_warnings(action="ignore"):
            model = make(Gated())
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            model(torch.ones(512, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with without_garbage(), quiet_profiler(), torch_kernels.profiler() as profiled:
        train()
    with fxmem.record("cpu") as recorded:
        train()
    held = max(each.requested_bytes for each in recorded.rounds)
    assert held == pytest.approx(max(live_bytes(0, read_events(profiled), {})), rel=1e-3)


def test_a_scripted_function_runs_on_a_card_more_than_once(scripted: Any) -> None:
    batch = torch.randn(30, 32)
    first, second = (fxmem.analyze(calls(scripted), batch, optimizer=None, target="h100") for _ in range(2))
    assert first.peak == second.peak
    assert any("TorchScript" in each.text for each in first.profile.assumptions)
    with fxmem.record("h100", steps=4) as recorded:
        model = calls(scripted).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(batch.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorded.rounds[2].requested_bytes == recorded.rounds[3].requested_bytes
    assert torch._C._jit_texpr_fuser_enabled()  # as it was
