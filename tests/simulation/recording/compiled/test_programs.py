"""Programs whose compiled parts run as inductor would run them: predicted, and real."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxmem
from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.records.profile import Kind
from fxmem.records.validation import ProgramMeasurement
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch
from fxmem.validation.measure_program import measure_program
from tests.simulation.recording.compiled.models import CASES
from tests.simulation.recording.compiled.real import predict_compiled
from tests.simulation.recording.compiled.test_surroundings import _state

pytestmark = [pytest.mark.truth, pytest.mark.usefixtures("compiler")]

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(file.stem for file in PROGRAMS.glob("[!_]*.py"))
SAMPLE = ("stepped",)
"""That in `make truth`; `FXMEM_ALL=1` takes all, as `make -C benchmarks compiled` does."""
WITHIN = 1e-4


def predict_program(name: str, target: str = "cpu", steps: int = 3) -> RecordedProgram:
    """Run a program as `fxmem run --compile as-is` does."""
    program = Launch(str(PROGRAMS / f"{name}.py"))
    with contextlib.redirect_stderr(io.StringIO()):
        result = launch(
            program,
            catalogue.target(target),
            RunSettings(steps, max_operators=100_000, compile="as-is"),
        )
    assert not result.raised, result.recorded.ending
    return result.recorded


def measure(name: str, steps: int = 3) -> ProgramMeasurement:
    """Run it for real, with inductor's own kernels unbuilt."""
    program, module = Launch(str(PROGRAMS / f"{name}.py")), "tests.simulation.recording.compiled.real_program"
    return measure_program(program, steps=steps, device="cpu", compile="as-is", module=module)


@pytest.mark.parametrize("name", NAMES if os.environ.get("FXMEM_ALL") else SAMPLE)
def test_predicted_rounds_are_those_of_a_real_compiled_program(name: str) -> None:
    mine, real = predict_program(name), measure(name)
    assert len(mine.rounds) == len(real.rounds)
    peaks = [
        (a.requested_bytes, b.peak_without_kernel_scratch_bytes) for a, b in zip(mine.rounds, real.rounds, strict=True)
    ]
    assert peaks[0][0] == pytest.approx(peaks[0][1], rel=WITHIN)
    assert [predicted for predicted, _ in peaks[1:]] == [measured for _, measured in peaks[1:]]
    made = mine.profile.step.compiled
    assert made is not None
    assert made.graphs
    assert made.kernels > 1


def build() -> nn.Module:
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)), nn.LayerNorm(64)
    return nn.Sequential(*layers)


def run_steps(model: nn.Module) -> None:
    """Train without end, as an analysed step does."""
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        x = torch.randn(16, 32, 64, device="cuda")
        out = compiled(x)
        loss = out.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_program_on_a_card_is_the_step_analysed_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("inductor", "triton")]
    for name, folder in zip(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folders, strict=True):
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    analysed = fxmem.analyze(build(), torch.zeros(16, 32, 64), target="h100", compile=True)
    state = _state(), nn.Module.__call__, torch.nn.functional.linear
    with fxmem.record("h100", steps=3, compile="as-is") as run:
        run_steps(build().cuda())
    assert (_state(), nn.Module.__call__, torch.nn.functional.linear) == state
    assert [*folders[0].iterdir(), *folders[1].iterdir()] == []
    made, theirs = run.profile.step.compiled, analysed.profile.step.compiled
    assert made is not None
    assert theirs is not None
    assert (made.graphs, made.kernels, made.breaks) == (theirs.graphs, theirs.kernels, theirs.breaks)
    assert run.peak.requested_bytes == analysed.peak.requested_bytes
    nodes = {node.name: node.module for node in run.profile.nodes}
    assert {module for name, module in nodes.items() if name.startswith("triton_")} >= {"compiled.1"}
    assert not any(node.name.startswith("empty_strided") for node in run.profile.nodes)


def test_numbers_that_dynamo_keeps_are_in_the_memory_of_a_program_on_the_cpu() -> None:
    make = CASES["floats, dynamic=True"]
    analysed = predict_compiled(make(), "train")
    with fxmem.record("cpu", steps=2, compile="as-is") as run:
        case = make()
        compiled = torch.compile(case.model, dynamic=True)
        optimizer = torch.optim.SGD(case.model.parameters())
        while True:
            out = compiled(case.inputs)
            loss = out.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del out, loss
    kept = [
        sorted((each.nbytes, each.kind) for each in profile.storages if each.name == "number in dynamo's graph")
        for profile in (run.profile, analysed.profile)
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) > 0
    assert run.peak.requested_bytes == analysed.peak.requested_bytes


def test_a_model_compiled_before_the_recording_trains_on_the_cpu() -> None:
    model = nn.Linear(64, 64)
    compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), momentum=0.9)
    with fxmem.record("cpu", steps=2, compile="as-is") as run:
        while True:
            compiled(torch.zeros(16, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    made = run.profile.step.compiled
    assert made is not None
    assert made.graphs == 2
    assert len(run.rounds) == 2


PADDED = """
import torch
weight = torch.zeros(1024, 1023, device="cuda", dtype=torch.bfloat16)
product = torch.compile(lambda x: x @ weight)
with torch.inference_mode():
    out = product(torch.zeros(2048, 1024, device="cuda", dtype=torch.bfloat16))
"""


@torch.library.custom_op("fxmem_tests::scaled_twice", mutates_args=())
def scaled_twice(x: torch.Tensor) -> torch.Tensor:
    """An operator whose kernel is compiled."""

    @torch.compile
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0).cumsum(1) * x.new_tensor(0.5)

    return scale(x)


@scaled_twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_numbers_in_compiled_code_and_kernels_need_no_driver() -> None:
    scale = torch.compile(lambda x: x * x.new_tensor(0.5))
    with fxmem.record("h100", compile="as-is") as run:
        x = torch.zeros(256, 1024, device="cuda")
        out = scale(x)
        scaled_twice(out)
    assert run.profile.step.compiled is not None
    assert run.profile.step.compiled.graphs == 2
    assert Kind.WORKSPACE in {each.kind for each in run.profile.storages}  # of the kernel, between its two sums
    assert not [each for each in run.profile.unknowns if each.topic == "memory"]


def test_flex_attention_is_compiled_with_its_mask() -> None:
    def is_before(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query >= key

    with fxmem.record("h100", compile="as-is") as run:
        mask = torch.compile(create_block_mask)(is_before, None, None, 256, 256, device="cuda")
        x = torch.zeros(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            torch.compile(flex_attention)(x, x, x, block_mask=mask)
    assert run.profile.step.compiled is not None
    assert run.profile.step.compiled.graphs == 2
    assert any(node.name.startswith("triton_tem_fused_flex_attention") for node in run.profile.nodes)


def test_what_is_decided_by_timing_has_two_answers_in_a_program(tmp_path: Path) -> None:
    script, ran = tmp_path / "padded.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'a').write('x')\n{PADDED}")
    launched = launch(
        Launch(str(script)),
        catalogue.target("h100"),
        RunSettings(until="end", max_operators=1000, compile="as-is"),
    )
    recorded, made = launched.recorded, launched.recorded.profile.step.compiled
    assert ran.read_text() == "xx"
    assert made is not None
    assert "2048x1024 by 1024x1023" in made.timed[0].what
    assert made.lowest_peak_bytes is not None
    assert made.highest_peak_bytes is not None
    assert recorded.peak.counted_bytes == made.lowest_peak_bytes < made.highest_peak_bytes
    assert "Peak with either answer" in " ".join(recorded.table().split())


def test_recorded_code_runs_once_and_says_what_is_decided_by_timing() -> None:
    with fxmem.record("h100", compile="as-is") as run:
        exec(PADDED, {})
    made = run.profile.step.compiled
    assert made is not None
    assert (made.lowest_peak_bytes, made.highest_peak_bytes) == (None, None)
    assert "(not padded here). No other answer was tried" in " ".join(run.table().split())


def test_a_program_that_decides_nothing_by_timing_runs_once(tmp_path: Path) -> None:
    script, ran = tmp_path / "plain.py", tmp_path / "ran"
    plain = PADDED.replace("1023", "1024")
    script.write_text(f"open({str(ran)!r}, 'a').write('x')\n{plain}")
    launch(
        Launch(str(script)),
        catalogue.target("h100"),
        RunSettings(until="end", max_operators=1000, compile="as-is"),
    )
    assert ran.read_text() == "x"


def test_a_compiled_function_of_the_host_computes_its_values() -> None:
    @torch.compile
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    with fxmem.record("h100", compile="as-is") as run:
        assert shift(torch.arange(3.0)).tolist() == [1, 3, 5]
        shift(torch.zeros(1024, device="cuda"))
    made = run.profile.step.compiled
    assert made is not None
    assert made.graphs == 1
    assert run.peak.requested_bytes == 2 * 4096


def test_after_an_error_torch_is_as_it_was() -> None:
    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x * 2

    def run() -> None:
        with fxmem.record("cpu", compile="as-is"):
            double(torch.randn(2))
            double(torch.randn(3))

    state = _state(), nn.Module.__call__
    with pytest.raises(ValueError, match="three"):
        run()
    assert (_state(), nn.Module.__call__) == state
    assert torch.overrides._get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


def test_what_a_program_cannot_be_asked_for() -> None:
    with (
        pytest.raises(UsageError, match="expected compile 'as-is' or None, got 'default'"),
        fxmem.record(compile="default"),
    ):
        pass
