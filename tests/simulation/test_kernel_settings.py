"""Torch's switches, set for the time of an analysis: what they reach, and that they are put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem.__main__ import main
from fxmem.errors import AnalysisError
from fxmem.hardware.catalogue import target
from fxmem.hardware.workspaces import CudnnLibrary, collector
from fxmem.hardware.workspaces.cudnn_client import Workspace
from fxmem.hardware.workspaces.driverless import GUESSES
from fxmem.memory import liveness
from fxmem.records.profile import Profile, Target
from fxmem.show.facts import plans_facts
from fxmem.simulation.kernels import card_emulation, kernel_settings
from fxmem.simulation.kernels.kernel_settings import (
    KernelSettings,
    Sdpa,
    apply_settings,
    convolution_settings,
    is_deterministic,
)
from fxmem.simulation.step.analysis import analyze

H100 = target("h100")


def flags() -> tuple[object, ...]:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    sdpa = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
    )
    return (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark, deterministic, sdpa)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = flags()
    yield
    assert flags() == before


def test_none_leaves_every_flag_as_it_is() -> None:
    before = flags()
    for settings in (None, KernelSettings()):
        with apply_settings(settings):
            assert flags() == before


def test_settings_nest() -> None:
    with apply_settings(KernelSettings(allow_tf32=False, cudnn_benchmark=True, sdpa="flash")):
        assert (
            torch.backends.cudnn.allow_tf32,
            convolution_settings().allow_tf32,
            convolution_settings().benchmark,
        ) == (False, False, True)
        assert flags()[-1] == (True, False, False, False)
        inside = flags()
        with apply_settings(KernelSettings(allow_tf32=True, deterministic=True, sdpa="auto")):
            assert convolution_settings().allow_tf32
            assert (convolution_settings().deterministic, is_deterministic()) == (True, True)
            assert flags()[-1] == (True, True, True, True)
        assert flags() == inside


def test_settings_are_put_back_when_something_raises() -> None:
    before = flags()
    with (
        pytest.raises(ValueError, match="no"),
        apply_settings(KernelSettings(allow_tf32=False, cudnn_benchmark=True, sdpa="math", deterministic=True)),
    ):
        raise ValueError("no")
    assert flags() == before


def test_a_program_that_sets_precisions_by_operator_is_understood() -> None:
    """Reading `torch.backends.cudnn.allow_tf32` raises then."""
    conv = torch.backends.cudnn.conv
    before, conv.fp32_precision = conv.fp32_precision, "ieee"
    try:
        assert not convolution_settings().allow_tf32
        with apply_settings(KernelSettings(allow_tf32=True)):
            assert (convolution_settings().allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)
        assert conv.fp32_precision == "ieee"
        assert not convolution_settings().allow_tf32
    finally:
        conv.fp32_precision = before
    assert torch.backends.cudnn.allow_tf32


def test_a_warning_about_determinism_is_none() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert (convolution_settings().deterministic, is_deterministic()) == (True, False)
        with apply_settings(KernelSettings(deterministic=False)):
            assert not convolution_settings().deterministic
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 1, 64).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def attending(sdpa: Sdpa | None) -> Profile:
    with apply_settings(KernelSettings(sdpa=sdpa)):
        return analyze(Attends().to(torch.bfloat16), torch.ones(2, 128, 64, dtype=torch.bfloat16), target=H100).profile


@pytest.mark.parametrize(
    ("sdpa", "op"),
    [
        (None, "_scaled_dot_product_cudnn_attention"),
        ("auto", "_scaled_dot_product_cudnn_attention"),
        ("cudnn", "_scaled_dot_product_cudnn_attention"),
        ("flash", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("math", "_safe_softmax"),
    ],
)
def test_the_attention_backend_is_the_one_asked_for(sdpa: Sdpa | None, op: str) -> None:
    profile = attending(sdpa)
    assert f"aten.{op}.default" in {op.name for op in profile.ops}
    with apply_settings(KernelSettings(sdpa=sdpa)):
        said = next(card_emulation.assumptions(H100))
    expected = (
        "the first of cudnn_attention, flash_attention, efficient_attention, math"
        if sdpa in (None, "auto")
        else "nothing else"
    )
    assert expected in said.text


def test_a_backend_that_cannot_run_the_call_is_an_error_as_it_is_in_torch() -> None:
    with apply_settings(KernelSettings(sdpa="flash")), pytest.raises(AnalysisError, match="none of those enabled can"):
        analyze(Attends(), torch.ones(2, 128, 64), target=H100)  # float32


def test_what_remains_allowed_is_said() -> None:
    before = torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_math_sdp(False)
    try:
        said = next(card_emulation.assumptions(H100))
    finally:
        torch.backends.cuda.enable_math_sdp(before)
    assert "the first of cudnn_attention, flash_attention, efficient_attention that can run the call" in said.text
    assert said.text.endswith("; switched off: math")


# --- through the analysis and the command line ------------------------------------------------------------------------


def test_an_analysis_is_made_under_its_settings_and_made_again_under_them() -> None:
    settings = KernelSettings(sdpa="flash", cudnn_benchmark=True)
    analysis = analyze(
        Attends().to(torch.bfloat16), torch.ones(2, 128, 64, dtype=torch.bfloat16), target=H100, settings=settings
    )
    for made in (analysis, analysis.vary()):
        assert "aten._scaled_dot_product_flash_attention.default" in {op.name for op in made.profile.ops}
    assert "aten._safe_softmax.default" in {
        op.name for op in analysis.vary(settings=KernelSettings(sdpa="math")).profile.ops
    }


def test_what_benchmarking_chooses_is_unknown() -> None:
    settings = KernelSettings(cudnn_benchmark=True, allow_tf32=False)
    profile = analyze(nn.Conv2d(3, 8, 3), torch.ones(2, 3, 16, 16), target=H100, settings=settings).profile
    assert any("benchmark" in unknown.what for unknown in profile.unknowns)
    assert any(
        "TF32 not allowed" in assumption.text or "estimated" in assumption.text for assumption in profile.assumptions
    )


def test_the_command_line_sets_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "analyze",
        "torchvision:alexnet",
        "--input",
        "2x3x64x64",
        "--deterministic",
        "--no-allow-tf32",
        "--sdpa",
        "auto",
        "--width",
        "200",
        "--full",
    ]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "TF32 not allowed for float32, deterministic plans only" in said or "estimated" in said
    assert ":4096:8 is taken" in said


def test_another_release_of_torch_has_its_own_workspaces_rules_and_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    seen: list[Any] = []

    def answer(signatures: Any, target: Target, *, torch_version: str, library: Any, **_: Any) -> Any:
        asked.append((torch_version, library.version))
        nbytes = {"9.8.0": 64, "9.19.0": 8}[library.version] << 20
        seen.extend(each for each in signatures if each.op == "wgrad")
        return {each: Workspace(nbytes=nbytes, source=f"cudnn {library.version}") for each in signatures}

    stand = tuple(CudnnLibrary(version=version, cuda_major=12, libraries=()) for version in ("9.8.0", "9.19.0"))
    monkeypatch.setattr(collector, "conv_workspaces", answer)
    monkeypatch.setattr(kernel_settings, "conv_workspaces", answer)
    monkeypatch.setattr(kernel_settings, "list_cudnns", lambda version, target: stand if version == "9.1.0" else ())
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10))
    inputs = torch.empty(2, 3, 8, 8)
    analysis = analyze(model, inputs, mode="infer", target="rtx3060", torch="2.6")
    assert asked == [("2.6", "9.8.0"), ("2.6", "9.19.0")]
    assert analysis.profile.target.torch == "2.6"
    found = {each.name: each.nbytes for each in analysis.profile.storages if each.kind == "workspace"}
    assert found["cuBLASLt workspace"] == 1 << 20  # each product's own
    (plan,) = [each for each in analysis.profile.storages if each.other_bytes]
    assert (plan.nbytes, plan.other_bytes) == (64 << 20, (8 << 20, 64 << 20, 64 << 20, 0))
    names = ["9.8.0", "9.19.0", *(f"9.8.0 with {guess}" for guess in GUESSES)]
    assert [(each.cudnn, each.fits) for each in analysis.peak.by_cudnn] == [(name, True) for name in names]
    assert analysis.peak.by_cudnn[0].reserved_bytes == analysis.peak.reserved_bytes
    unknown = next(each.what for each in analysis.profile.unknowns if "which plans" in each.what)
    assert "which plans cuDNN 9.1.0 of torch 2.6 takes for convolutions: it is older than 9.8" in unknown
    assert "counted are those of 9.8.0, the nearest, and the range is that of 9.8.0, 9.19.0, 9.8.0 with" in unknown
    assert "fits with any of them" in " ".join(analysis.table().split())
    with fxmem.record("rtx3060", torch="2.6") as recorded:
        on_card, given = copy.deepcopy(model).cuda(), inputs.cuda()
        for _ in range(2):
            with torch.no_grad():
                on_card(given)
    assert [each.cudnn for each in recorded.peak.by_cudnn] == names
    assert recorded.peak.by_cudnn[0].reserved_bytes == recorded.peak.reserved_bytes
    assert [each.reserved_bytes for each in recorded.peak.by_cudnn] == [
        each.reserved_bytes for each in analysis.peak.by_cudnn
    ]
    assert "fits with any of them" in " ".join(recorded.table().split())
    point = torch.nn.Conv2d(320, 1280, 1)
    for card, held in (("rtx3060", True), ("rtx4060", False)):
        trained = analyze(point, torch.empty(64, 320, 3, 3), target=card, torch="2.6").profile
        assert (64 * 320 * 1280 * 4 in {each.nbytes for each in trained.storages if each.other_bytes}) == held
        assert any("an RTX 3060 was seen" in each.text for each in trained.assumptions) == held
        large = seen[-1]
        asked_of_it = kernel_settings.ask_workspaces([large], trained.target)[large]
        assert asked_of_it == (64 * 320 * 1280 * 4 if held else 64 << 20)
    plain = analyze(model, inputs, mode="infer", target="cpu")
    assert (plain.profile.cudnns, plain.profile.target.torch) == ((), "")


def convolve(*, inside: bool, **cudnn_flags: bool) -> fxmem.RecordedProgram:
    """Two steps of a program that sets cuDNN's flags itself, or that is recorded with them set."""

    def set_flags() -> None:
        for name, value in cudnn_flags.items():
            setattr(torch.backends.cudnn, name, value)

    before = {name: getattr(torch.backends.cudnn, name) for name in cudnn_flags}
    try:
        if not inside:
            set_flags()
        with fxmem.record("h100") as recorded:
            if inside:
                set_flags()
            layer = nn.Conv2d(64, 64, 3, padding=1).cuda()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            for _ in range(2):
                layer(torch.randn(32, 64, 56, 56).cuda()).sum().backward()
                optimizer.step()
        return recorded
    finally:
        for name, value in before.items():
            setattr(torch.backends.cudnn, name, value)


def test_flags_that_a_program_sets_count_from_there_on() -> None:
    """A seed function sets `deterministic`; the plan, its workspace and what the report says of it follow."""
    plain = convolve(inside=False)
    given, own = (convolve(inside=inside, deterministic=True, allow_tf32=False) for inside in (False, True))
    assert [each.requested_bytes for each in own.rounds] == [each.requested_bytes for each in given.rounds]
    assert own.rounds[0].requested_bytes > 1.5 * plain.rounds[0].requested_bytes
    assert any("deterministic plans only" in each.text for each in own.profile.assumptions)


def test_a_program_that_lets_cudnn_choose_by_timing_is_told_what_that_leaves_unknown() -> None:
    chosen, plain = (convolve(inside=True, benchmark=each).profile for each in (True, False))
    assert any("cudnn.benchmark" in each.what for each in chosen.unknowns)
    peak = liveness.timeline(chosen).peak
    (fact,) = plans_facts(chosen, peak)
    assert "may lift the peak of the first step" in fact.text
    assert plans_facts(plain, liveness.timeline(plain).peak) == []


def multiply(*, inside: bool) -> int:
    """What a product takes where a program asks for deterministic algorithms itself, or is recorded so."""
    try:
        if not inside:
            torch.use_deterministic_algorithms(True)
        with fxmem.record("a100") as recorded:
            torch.use_deterministic_algorithms(True)
            layer = nn.Linear(8, 8).cuda()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            layer(torch.randn(4, 8).cuda()).sum().backward()
            optimizer.step()
        return recorded.rounds[0].requested_bytes
    finally:
        torch.use_deterministic_algorithms(False)


def test_flags_count_where_no_convolution_asks_for_them() -> None:
    """cuBLAS has other workspaces for deterministic algorithms."""
    assert multiply(inside=True) == multiply(inside=False)
