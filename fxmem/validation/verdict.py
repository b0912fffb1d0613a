"""A prediction beside a measurement: the differences, and which of them counts.

Pure functions of records. Which difference counts: on a card, the allocator's blocks, because that is what the card
reports. On the CPU, the requested bytes; and where the prediction holds no workspace of the kernels that the
measurement sets aside, as fxmem's for the CPU does not, those without the scratch of these kernels. The full figure
stands beside it.
"""

from __future__ import annotations

from collections import Counter

from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.memory.allocator import read_settings, replay
from fxmem.memory.log_diff import first_differences, predicted_events
from fxmem.records.profile import Kind, Peak, Profile
from fxmem.records.validation import (
    ComparedPhase,
    ComparedQuantity,
    ComparedShare,
    Difference,
    MeasuredPhase,
    Measurement,
    Quantity,
    Verdict,
)

_KNOWN_BEFORE_THE_STEP = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE)


def verdict(prediction: Profile, peak: Peak, measurement: Measurement, tolerance: float) -> Verdict:
    """Compare a profile's peak with what was measured.

    Args:
        prediction: the profile that `peak` is of.
        tolerance: largest absolute error of the judged quantity, as a fraction.

    Raises:
        UsageError: the two are not of the same device or step, or the tolerance is negative.
    """
    if tolerance < 0:
        raise UsageError(f"expected a tolerance of 0 or more (0.03 is 3 %), got {tolerance}")
    _check_same(prediction, measurement)
    comparisons = _comparisons(prediction, peak, measurement)
    judged, reason = _judge(prediction, measurement, {comparison.quantity for comparison in comparisons})
    error = next(comparison.error for comparison in comparisons if comparison.quantity is judged)
    return Verdict(
        model=prediction.model,
        target=prediction.target.name,
        predicted=peak,
        measurement=measurement,
        comparisons=comparisons,
        judged=judged,
        reason=reason,
        tolerance=tolerance,
        within_tolerance=abs(error) <= tolerance,
        shares=_shares(prediction, peak, measurement, judged),
        phases=_phases(prediction, measurement),
        differences=_differences(prediction, measurement),
    )


def _phases(prediction: Profile, measurement: Measurement) -> tuple[ComparedPhase, ...]:
    if measurement.machine.device != "cuda":
        return ()
    settings = read_settings({"PYTORCH_ALLOC_CONF": measurement.machine.allocator_settings})
    predicted = {
        peak.phase: MeasuredPhase.model_validate(peak.model_dump())
        for peak in replay(prediction, settings=settings).phases
    }
    return tuple(
        ComparedPhase(predicted=predicted[found.phase], measured=found)
        for found in measurement.phases
        if found.phase in predicted
    )


def _differences(prediction: Profile, measurement: Measurement) -> tuple[Difference, ...]:
    if measurement.machine.device != "cuda" or not measurement.events:
        return ()
    return first_differences(predicted_events(prediction), measurement.events, measurement.events_by_phase)


def _check_same(prediction: Profile, measurement: Measurement) -> None:
    mine, theirs = prediction.step, measurement.step
    pairs = {
        "device": (prediction.target.device, measurement.machine.device),
        "mode": (mine.mode, theirs.mode),
        "optimizer": (mine.optimizer, theirs.optimizer),
        "precision": (mine.precision, theirs.precision),
    }
    for what, (predicted, measured) in pairs.items():
        if predicted != measured:
            raise UsageError(
                f"expected a prediction and a measurement of the same step, but {what} is {predicted} in one and "
                f"{measured} in the other"
            )


def _comparisons(prediction: Profile, peak: Peak, measurement: Measurement) -> tuple[ComparedQuantity, ...]:
    aside, observed = bool(measurement.set_aside), bool(measurement.set_aside or measurement.scratch)
    pairs = (
        (Quantity.REQUESTED, peak.requested_bytes, measurement.peak_bytes),
        (
            Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH,
            peak.requested_bytes,
            measurement.peak_without_kernel_scratch_bytes if aside else None,
        ),
        (
            Quantity.REQUESTED_WITHOUT_SCRATCH,
            liveness.peak_without_scratch_bytes(prediction),
            measurement.peak_without_scratch_bytes if observed else None,
        ),
        (Quantity.ALLOCATED, peak.allocated_bytes, measurement.allocated_bytes),
        (Quantity.RESERVED, peak.reserved_bytes, measurement.reserved_bytes),
        (Quantity.PROCESS, peak.process_bytes, measurement.process_bytes),
    )
    return tuple(
        ComparedQuantity(
            quantity=quantity, predicted_bytes=predicted, measured_bytes=measured, error=predicted / measured - 1
        )
        for quantity, predicted, measured in pairs
        if predicted is not None and measured is not None
    )


def _judge(prediction: Profile, measurement: Measurement, known: set[Quantity]) -> tuple[Quantity, str]:
    if Quantity.ALLOCATED in known:
        return Quantity.ALLOCATED, "it is what the card reports"
    if Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH not in known:
        return Quantity.REQUESTED, "it is all that both sides know"
    holding = (
        prediction.ops[storage.op].name
        for storage in prediction.storages
        if storage.kind is Kind.WORKSPACE and storage.op is not None
    )
    if any(name in measurement.set_aside for name in holding):
        return Quantity.REQUESTED, "the prediction counts these kernels' workspaces"
    return Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH, "the prediction has no workspace of these kernels for this device"


def _shares(prediction: Profile, peak: Peak, measurement: Measurement, judged: Quantity) -> tuple[ComparedShare, ...]:
    scratchless = judged is Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    whole = measurement.peak_without_kernel_scratch_bytes if scratchless else measurement.peak_bytes
    resident = Counter[Kind]()
    for storage in prediction.storages:
        if storage.birth == 0:
            resident[storage.kind] += storage.nbytes
    shares = [
        ComparedShare(
            kinds=(kind,), predicted_bytes=resident[kind], measured_bytes=measurement.resident_by_kind.get(kind, 0)
        )
        for kind in _KNOWN_BEFORE_THE_STEP
    ]
    rest = tuple(kind for kind in Kind if kind not in _KNOWN_BEFORE_THE_STEP)
    predicted = peak.requested_bytes - sum(share.predicted_bytes for share in shares)
    shares.append(
        ComparedShare(
            kinds=rest, predicted_bytes=predicted, measured_bytes=whole - sum(share.measured_bytes for share in shares)
        )
    )
    return tuple(shares)
