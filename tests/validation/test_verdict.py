"""Predictions held against measurements, both made by hand; no torch."""

from typing import Any

import pytest

from fxmem.errors import UsageError
from fxmem.records.profile import Kind, Peak, Phase, Profile, Step
from fxmem.records.validation import Machine, MeasuredOp, Measurement, Quantity, Verdict
from fxmem.show.text.verdict import table
from fxmem.validation.verdict import verdict
from tests.profiles import CPU, TINY_CARD, TRAINING, Log

MIB = 1 << 20
CONVOLUTION = "aten.convolution.default"
CPU_MACHINE = Machine(device="cpu", name="x86_64 AVX512", torch_version="2.11.0", onednn=True, threads=2)
CARD = Machine(device="cuda", name="Tiny card", torch_version="2.11.0", cuda_version="13.0", cudnn_version="9.19.0")


def prediction(*, workspace: bool = False, **fields: Any) -> Profile:
    log = Log(**{"target": CPU, **fields})
    log.resident(30 * MIB, Kind.PARAMETER)
    node = log.node("x")
    with log.phase(Phase.FORWARD), log.op(CONVOLUTION, node, Phase.FORWARD):
        log.allocate(70 * MIB, Kind.SAVED)
        if workspace:
            log.free(log.allocate(7 * MIB, Kind.WORKSPACE))
    return log.profile()


def predicted_peak(**fields: Any) -> Peak:
    defaults: dict[str, Any] = {
        "requested_bytes": 100 * MIB,
        "phase": Phase.BACKWARD,
        "tick": 1,
        "by_kind": {Kind.PARAMETER: 30 * MIB, Kind.SAVED: 60 * MIB, Kind.TEMPORARY: 10 * MIB},
    }
    return Peak(**{**defaults, **fields})


def measurement(**fields: Any) -> Measurement:
    scratch = MeasuredOp(
        name=CONVOLUTION,
        kernel="aten.mkldnn_convolution.default",
        phase=Phase.FORWARD,
        input_shapes=((2, 3, 5, 7), (11, 3, 1, 1), None),
        calls=2,
        allocations=6,
        scratch_bytes=30 * MIB,
        at_peak_bytes=24 * MIB,
    )
    defaults: dict[str, Any] = {
        "model": "Toy",
        "step": TRAINING,
        "machine": CPU_MACHINE,
        "resident_bytes": 30 * MIB,
        "resident_by_kind": {Kind.PARAMETER: 30 * MIB},
        "retained_bytes": 0,
        "peak_bytes": 125 * MIB,
        "peak_phase": Phase.FORWARD,
        "peak_op": CONVOLUTION,
        "peak_by_phase": {Phase.FORWARD: 125 * MIB},
        "set_aside": (CONVOLUTION,),
        "peak_without_kernel_scratch_bytes": 101 * MIB,
        "peak_without_scratch_bytes": 100 * MIB,
        "scratch": (scratch,),
    }
    return Measurement(**{**defaults, **fields})


def test_on_the_cpu_kernel_scratch_is_set_aside_and_the_full_figure_stands_beside_it() -> None:
    found = verdict(prediction(), predicted_peak(), measurement(), 0.02)
    errors = {c.quantity: c.error for c in found.comparisons}
    assert errors == {
        Quantity.REQUESTED: 100 / 125 - 1,
        Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH: 100 / 101 - 1,
        Quantity.REQUESTED_WITHOUT_SCRATCH: 0,
    }
    assert found.judged is Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    assert found.within_tolerance


def test_a_prediction_that_counts_workspaces_is_held_to_the_full_figure() -> None:
    found = verdict(prediction(workspace=True), predicted_peak(), measurement(), 0.02)
    assert found.judged is Quantity.REQUESTED
    assert not found.within_tolerance


def test_without_anything_set_aside_only_the_full_figure_is_compared() -> None:
    found = verdict(prediction(), predicted_peak(), measurement(set_aside=(), scratch=()), 0.2)
    assert [c.quantity for c in found.comparisons] == [found.judged] == [Quantity.REQUESTED]
    assert found.within_tolerance  # -20 % is not more than 20 %


def test_on_a_card_its_allocator_decides() -> None:
    predicted = predicted_peak(allocated_bytes=103 * MIB, reserved_bytes=120 * MIB)
    measured = measurement(machine=CARD, set_aside=(), scratch=(), allocated_bytes=104 * MIB, process_bytes=600 * MIB)
    found = verdict(prediction(target=TINY_CARD), predicted, measured, 0.01)
    assert [c.quantity for c in found.comparisons] == [Quantity.REQUESTED, Quantity.ALLOCATED]
    assert found.judged is Quantity.ALLOCATED
    assert found.within_tolerance
    assert sum(share.measured_bytes for share in found.shares) == measured.peak_bytes


@pytest.mark.parametrize(("requested", "within"), [(99, True), (101, True), (98, False), (102, False)])
def test_the_tolerance_holds_both_ways_and_includes_its_bound(requested: int, within: bool) -> None:
    measured = measurement(peak_without_kernel_scratch_bytes=100, peak_without_scratch_bytes=100)
    assert (
        verdict(prediction(), predicted_peak(requested_bytes=requested), measured, 0.010001).within_tolerance is within
    )


def test_shares_add_up_to_both_peaks() -> None:
    found = verdict(prediction(), predicted_peak(), measurement(), 0.02)
    assert sum(share.predicted_bytes for share in found.shares) == 100 * MIB
    assert sum(share.measured_bytes for share in found.shares) == 101 * MIB
    assert found.shares[0].model_dump() == {
        "kinds": (Kind.PARAMETER,),
        "predicted_bytes": 30 * MIB,
        "measured_bytes": 30 * MIB,
    }
    assert (found.shares[-1].predicted_bytes, found.shares[-1].measured_bytes) == (70 * MIB, 71 * MIB)
    assert {kind for share in found.shares for kind in share.kinds} == set(Kind)


def test_what_is_let_go_before_the_peak_was_there_all_the_same() -> None:
    log = Log(target=CPU)
    kept = log.resident(30 * MIB, Kind.BUFFER)
    with log.phase(Phase.FORWARD):
        log.free(kept)
        with log.op(CONVOLUTION, log.node("x"), Phase.FORWARD):
            log.allocate(20 * MIB, Kind.SAVED)
    peak = predicted_peak(requested_bytes=20 * MIB, by_kind={Kind.SAVED: 20 * MIB})
    found = verdict(log.profile(), peak, measurement(resident_by_kind={Kind.BUFFER: 30 * MIB}), 1)
    by_kinds = {share.kinds: share.predicted_bytes for share in found.shares}
    assert (by_kinds[(Kind.BUFFER,)], found.shares[-1].predicted_bytes) == (30 * MIB, -10 * MIB)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"machine": CARD}, "device is cpu in one and cuda in the other"),
        ({"step": Step(mode="infer", optimizer=None, loss=None, precision=None)}, "mode is train in one and infer"),
        ({"step": TRAINING.model_copy(update={"optimizer": "SGD"})}, "optimizer is AdamW in one and SGD"),
        ({"step": TRAINING.model_copy(update={"precision": "bf16"})}, "precision is None in one and bf16"),
    ],
)
def test_only_the_same_step_is_compared(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verdict(prediction(), predicted_peak(), measurement(**fields), 0.01)


def test_how_the_loss_was_described_does_not_matter() -> None:
    assert verdict(
        prediction(), predicted_peak(), measurement(step=TRAINING.model_copy(update={"loss": "another text"})), 0.02
    ).within_tolerance


def test_a_negative_tolerance_is_refused() -> None:
    with pytest.raises(UsageError, match="tolerance of 0 or more"):
        verdict(prediction(), predicted_peak(), measurement(), -0.01)


def test_json_gives_the_same_verdict_back() -> None:
    found = verdict(prediction(), predicted_peak(), measurement(), 0.02)
    assert Verdict.model_validate_json(found.model_dump_json()) == found


REPORT = """\
Verdict     within tolerance: 0.9901% <= 2.0000%
Model       Toy, one training step with AdamW, predicted for cpu
Measured    on x86_64 AVX512, torch 2.11.0, oneDNN, 2 threads

                                  Predicted    Measured   Difference       Error
--------------------------------------------------------------------------------
  requested                       100.0 MiB   125.0 MiB    -25.0 MiB   -20.0000%
* requested, workspaces aside     100.0 MiB   101.0 MiB    -1.00 MiB    -0.9901%
  requested, all scratch aside    100.0 MiB   100.0 MiB          0 B    +0.0000%
--------------------------------------------------------------------------------
  parameter                        30.0 MiB    30.0 MiB          0 B    +0.0000%
  made during the step             70.0 MiB    71.0 MiB    -1.00 MiB    -1.4085%

Peak        in forward (aten.convolution.default), predicted in backward

Scratch     24.0 MiB  at the peak, of the kernels' own (25,165,824 bytes)
            30.0 MiB  workspace in aten.mkldnn_convolution, at the peak, 2
                      calls: 2x3x5x7, 11x3x1x1

Judged      requested, workspaces aside (*), because the prediction has no
            workspace of these kernels for this device
"""


def test_the_report() -> None:
    assert table(verdict(prediction(), predicted_peak(), measurement(), 0.02)) == REPORT


def test_the_report_says_what_is_wrong() -> None:
    measured = measurement(retained_bytes=4096, peak_op="")
    lines = table(verdict(prediction(), predicted_peak(), measured, 0.001)).splitlines()
    assert "Left        4.00 KiB (4,096 bytes) alive when the step returned" in lines
    assert "Peak        in forward (between two operators), predicted in backward" in lines
    assert lines[0] == "Verdict     NOT within tolerance: 0.9901% > 0.1000%"


def test_the_report_of_a_card_names_its_versions() -> None:
    measured = measurement(machine=CARD, set_aside=(), scratch=(), allocated_bytes=104 * MIB)
    text = table(verdict(prediction(target=TINY_CARD), predicted_peak(allocated_bytes=104 * MIB), measured, 0))
    assert "Measured    on Tiny card, torch 2.11.0, CUDA 13.0, cuDNN 9.19.0\n" in text
    assert "Scratch" not in text
    assert text.startswith("Verdict     within tolerance: 0.0000% <= 0.0000%\n")
    assert text.endswith("Judged      allocated (*), because it is what the card reports\n")


def test_names_from_a_model_cannot_drive_the_terminal() -> None:
    text = table(verdict(prediction(model="\x1b[2JToy"), predicted_peak(), measurement(), 0.02))
    assert "\x1b" not in text
