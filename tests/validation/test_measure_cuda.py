"""Measuring on a card, without one: its allocator is played by hand-made numbers; what is measured there is what fxmem
reads of it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.__main__ import main
from fxmem._torch import cuda as torch_cuda
from fxmem._torch.cuda import AllocatorLog
from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError
from fxmem.hardware.catalogue import target
from fxmem.memory.log_diff import predicted_events
from fxmem.records.profile import Kind, Phase, Step
from fxmem.records.units import format_bytes
from fxmem.records.validation import Machine, Measurement, Quantity
from fxmem.show.text.verdict import table
from fxmem.simulation.step.analysis import analyze
from fxmem.simulation.step.request import StepRequest
from fxmem.validation import measure_cuda as measuring_cuda
from fxmem.validation import validate as validation
from fxmem.validation.measure_cpu import resident_bytes
from fxmem.validation.measure_cuda import (
    CardReadings,
    card_target,
    cudnn_version,
    found_card,
    make_measurement,
    measure_cuda,
    require_card,
)
from fxmem.validation.validate import validate

pytestmark = pytest.mark.usefixtures("others_frozen")

H200 = target("h200")
MACHINE = Machine(
    device="cuda",
    name="NVIDIA H200",
    torch_version=torch.__version__,
    cuda_version="13.0",
    cudnn_version="9.19.0",
    capability=(9, 0),
)
NOTHING = {"requested": 0, "allocated": 0, "active": 0, "reserved": 0}

# --- the card ---------------------------------------------------------------------------------------------------------


def test_a_card_of_the_catalogue_keeps_its_own_memory() -> None:
    assert card_target("NVIDIA H200", (9, 0), 150_000_000_000) == H200.model_copy(
        update={"memory_bytes": 150_000_000_000}
    )
    assert card_target("NVIDIA H200", (9, 0), None) == H200


def test_any_other_card_is_a_target_of_its_properties() -> None:
    made = card_target("NVIDIA Unheard-of 9000 (Ti)", (9, 0), 1 << 34)
    assert made.model_dump() == {
        "name": "nvidia-unheard-of-9000-ti",
        "device": "cuda",
        "full_name": "NVIDIA Unheard-of 9000 (Ti)",
        "memory_bytes": 1 << 34,
        "capability": (9, 0),
    }
    assert card_target("NVIDIA H200", (8, 0), 1 << 34).name == "nvidia-h200"  # the name alone does not make it one
    assert card_target("…", (9, 0), None).name == "card"


def test_without_a_card_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = (
        r"expected an NVIDIA GPU to measure on, but torch .* sees none; run it on a machine that has one, or "
        r"measure with device='cpu'"
    )
    for call in (require_card, found_card, lambda: validate(nn.Linear(3, 2), torch.ones(1, 3), device="cuda")):
        with pytest.raises(EnvironmentLacksError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(EnvironmentLacksError, match="is built for the CPU only"):
        require_card()


def test_the_command_line_exits_with_3_before_it_builds_anything(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["validate", "no.such.module:model", "--device", "cuda"]) == 3
    said = capsys.readouterr()
    assert said.err.startswith("fxmem: expected an NVIDIA GPU to measure on")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_the_machine_is_described_by_what_moves_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 150_110_011_392

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_902)
    monkeypatch.setattr(measuring_cuda.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout="580.159.03\n580.159.03\n")
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    found = measuring_cuda.card_machine()
    assert (found.cudnn_version, found.driver_version, found.capability) == ("9.19.2", "580.159.03", (9, 0))
    assert (found.allocator_settings, found.memory_bytes, found.threads) == (
        "expandable_segments:True",
        150_110_011_392,
        None,
    )
    assert found_card() == H200


def test_a_driver_that_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_cuda.shutil, "which", lambda _: None)
    assert measuring_cuda.nvidia_smi("driver_version") is None

    def fails(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(measuring_cuda.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", fails)
    assert measuring_cuda.nvidia_smi("driver_version") is None
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert cudnn_version() is None


@pytest.mark.parametrize(("said", "used"), [("532\n0\n", "532"), ("[N/A]\n", "[N/A]"), ("", None)])
def test_what_everybody_uses_of_the_card(monkeypatch: pytest.MonkeyPatch, said: str, used: str | None) -> None:
    monkeypatch.setattr(measuring_cuda.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    assert measuring_cuda.nvidia_smi("memory.used") == used


# --- the log ----------------------------------------------------------------------------------------------------------


def entry(action: str, size: int) -> dict[str, Any]:
    return {"action": action, "size": size, "addr": 0, "stream": 0, "frames": []}


def test_the_log_is_read_in_parts_in_requested_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    other_card, entries = [entry("alloc", 99)], [entry("alloc", 1)]
    switched: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: switched.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [other_card, entries]})
    log = AllocatorLog(1)
    with log.record():
        entries += [
            entry("segment_alloc", 1 << 21),
            entry("alloc", 700),
            entry("free_requested", 1),
            entry("free_completed", 1),
        ]
        assert log.take() == [700, -1]
        assert log.take() == []
        entries += [
            entry("alloc", 0),
            entry("oom", 5),
            entry("snapshot", 0),
            entry("segment_free", 1 << 21),
            entry("free_requested", 700),
        ]
        assert log.take() == [-700]
    assert switched == ["all", None]
    assert AllocatorLog(2).take() == []


def test_recording_ends_when_the_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **_: switched.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": []})
    with pytest.raises(ValueError, match="no"), AllocatorLog(0).record():
        raise ValueError("no")
    assert switched == ["all", None]


# --- the run ----------------------------------------------------------------------------------------------------------


class Card:
    """Plays the allocator: each reading of the peaks is one phase's, each reading of the current values the next one
    given."""

    def __init__(self, currents: list[int], peaks: list[int], events: list[list[int]]) -> None:
        self.currents, self.peaks, self.events = iter(currents), iter(peaks), iter(events)
        self.calls: list[str] = []

    def current_bytes(self, what: str) -> dict[str, int]:
        self.calls.append(what)
        size = next(self.currents if what == "current" else self.peaks)
        return {"requested": size, "allocated": size + 12, "active": size + 13, "reserved": size + 2000}

    def take(self) -> list[int]:
        return next(self.events)


class Stays(nn.Linear):
    def to(self, *_: Any, **__: Any) -> Stays:
        return self


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(**parts: Any) -> Card:
        played = Card(**parts)
        monkeypatch.setattr(measuring_cuda, "require_card", lambda: None)
        monkeypatch.setattr(measuring_cuda, "drop_cublas_workspaces", lambda: played.calls.append("drop"))
        monkeypatch.setattr(measuring_cuda, "current_bytes", played.current_bytes)
        monkeypatch.setattr(measuring_cuda, "card_machine", lambda: MACHINE)
        monkeypatch.setattr(measuring_cuda, "_on_card", lambda tree: tree)
        monkeypatch.setattr(measuring_cuda, "resident_bytes", lambda *args, device_type: resident_bytes(*args))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: played.calls.append("empty"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: played.calls.append("reset"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50_000, 90_000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10_000)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
        monkeypatch.setattr(AllocatorLog, "_entries", lambda _: [])
        monkeypatch.setattr(AllocatorLog, "take", lambda _: played.take())
        return played

    return make


X = torch.ones(1, 3)
STEP: dict[str, Any] = {"args": (X,), "optimizer": "sgd", "keep_outputs": False}
WEIGHTS, INPUT = 4 * (3 * 2 + 2), 4 * 3


@pytest.mark.truth
def test_a_step_is_measured_phase_by_phase(card: Any) -> None:
    # 500 bytes were there before; the step's own rest with 1000 more than its tensors: a workspace.
    rest = 500 + WEIGHTS + INPUT + 1000
    played = card(
        currents=[500, rest, rest, rest + 3],
        peaks=[rest + 70, rest + 110, rest + 30],
        events=[[70, -20], [60], [-50, 3]],
    )
    found = measure_cuda(Stays(3, 2), StepRequest(**STEP))
    assert played.calls == [
        "drop",
        "empty",
        "current",
        "current",
        "current",
        "reset",
        *["peak", "reset"] * 3,
        "current",
    ]
    own = WEIGHTS + INPUT + 1000
    assert found.resident_bytes == own
    assert found.resident_by_kind == {Kind.PARAMETER: WEIGHTS, Kind.INPUT: INPUT, Kind.WORKSPACE: 1000}
    assert found.retained_bytes == 3
    assert (found.peak_bytes, found.peak_phase, found.allocated_bytes, found.reserved_bytes) == (
        own + 110,
        Phase.BACKWARD,
        own + 110,
        own + 110,
    )
    assert found.process_bytes == own + 110 + 30_000
    assert found.peak_by_phase == {Phase.FORWARD: own + 70, Phase.BACKWARD: own + 110, Phase.OPTIMIZER: own + 30}
    assert [(p.phase, p.active_bytes) for p in found.phases] == [
        (phase, size) for phase, size in found.peak_by_phase.items()
    ]
    assert found.events == (70, -20, 60, -50, 3)
    assert found.events_by_phase == {Phase.FORWARD: 2, Phase.BACKWARD: 1, Phase.OPTIMIZER: 2}
    assert (found.step.optimizer, found.machine) == ("SGD", MACHINE)
    assert Measurement.model_validate_json(found.model_dump_json()) == found


@pytest.mark.truth
def test_inference_is_all_forward_and_a_step_without_optimizer_has_two_phases(card: Any) -> None:
    card(currents=[0, 99, 99, 99], peaks=[120], events=[[21]])
    assert measure_cuda(Stays(3, 2), StepRequest(**{**STEP, "mode": "infer"})).events_by_phase == {Phase.FORWARD: 1}
    card(currents=[0, 99, 99, 131], peaks=[120, 131], events=[[21], [32]])
    model = Stays(3, 2)
    found = measure_cuda(model, StepRequest(**{**STEP, "optimizer": None}))
    assert (found.retained_bytes, found.step.optimizer) == (32, None)
    assert Kind.GRADIENT not in found.resident_by_kind


def test_what_cannot_be_measured_is_refused(card: Any) -> None:
    with pytest.raises(UsageError, match="at least 2 steps"):
        measure_cuda(Stays(3, 2), StepRequest(**STEP), steps=1)
    card(currents=[], peaks=[], events=[])
    with pytest.raises(UsageError, match="expected everything on the CPU"):
        measure_cuda(Stays(3, 2), StepRequest(args=(X.to("meta"),)))


def test_a_step_that_raises_names_the_line(card: Any) -> None:
    class Raises(Stays):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such luck")

    card(currents=[0], peaks=[], events=[])
    with pytest.raises(
        AnalysisError,
        match=r"a real step on the card raised at .*test_measure_cuda\.py:\d+: RuntimeError: no such luck",
    ):
        measure_cuda(Raises(3, 2), StepRequest(**STEP))


# --- beside a prediction ----------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 640), nn.Linear(640, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_a_prediction_is_for_the_card_that_is_found_and_its_blocks_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(128, 64)
    profile = analyze(Small(), x, target=H200).profile
    peak = analyze(Small(), x, target=H200).peak
    assert peak.allocated_bytes is not None
    assert peak.reserved_bytes is not None
    resident = sum(storage.nbytes for storage in profile.storages if storage.birth == 0)
    events: dict[Phase, list[int]] = {}
    for event in predicted_events(profile):
        events.setdefault(event.phase, []).append(event.nbytes)
    events[Phase.BACKWARD][:0] = [4321, -4321]  # a workspace nobody predicted

    def measured(model: nn.Module, request: StepRequest) -> Measurement:
        assert {tensor.device.type for tensor in (*model.parameters(), *request.args)} == {"cpu"}
        assert (request.mode, request.optimizer) == ("train", "adamw")
        step = Step(mode="train", optimizer="AdamW", loss=None, precision=None)
        sizes = {
            "requested": peak.requested_bytes,
            "allocated": peak.allocated_bytes,
            "active": peak.allocated_bytes,
            "reserved": peak.reserved_bytes,
        }
        peaks = dict.fromkeys(Phase, sizes)
        return make_measurement(
            "Small",
            step,
            MACHINE,
            CardReadings(
                resident={}, start=resident, end=resident, foreign=NOTHING, peaks=peaks, events=events, beside=None
            ),
        )

    monkeypatch.setattr(validation, "found_card", lambda: H200)
    monkeypatch.setattr(validation, "measure_cuda", measured)
    said: list[str] = []
    found = validate(Small(), x, device="cuda", progress=said.append)
    assert said[-1] == "running the step on the card"
    assert (found.target, found.judged, found.within_tolerance) == ("h200", Quantity.ALLOCATED, True)
    assert [c.quantity for c in found.comparisons] == [Quantity.REQUESTED, Quantity.ALLOCATED, Quantity.RESERVED]
    assert [phase.measured.phase for phase in found.phases] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    # Measured were the same peaks for every phase; predicted is each phase's own, and the largest is the step's.
    assert max(phase.predicted.allocated_bytes for phase in found.phases) == peak.allocated_bytes
    assert len({phase.predicted.requested_bytes for phase in found.phases}) > 1
    assert sum(line.startswith("  allocated in ") for line in table(found).splitlines()) == 3
    (difference,) = found.differences
    assert (difference.nbytes, difference.side.value, difference.phase) == (4321, "measured", Phase.BACKWARD)
    assert (
        f"{format_bytes(4321)}  only measured, backward: after {difference.op.removesuffix('.default')} of "
        f"{difference.node}"
    ) in table(found)


def test_nothing_is_negative_when_the_process_gave_something_back_meanwhile() -> None:
    step = Step(mode="infer", optimizer=None, loss=None, precision=None)
    peaks = {Phase.FORWARD: {"requested": 900, "allocated": 1024, "active": 1024, "reserved": 2000}}
    foreign = {**NOTHING, "requested": 100, "reserved": 4000}
    found = make_measurement(
        "M",
        step,
        MACHINE,
        CardReadings(resident={}, start=700, end=700, foreign=foreign, peaks=peaks, events={}, beside=None),
    )
    assert (found.peak_bytes, found.reserved_bytes, found.process_bytes) == (800, 0, None)


def test_private_names_are_there() -> None:
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._snapshot)
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or torch.version.cuda is None
    assert callable(torch_cuda.drop_cublas_workspaces)
