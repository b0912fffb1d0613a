"""A prediction beside a measurement: the differences, and which of them counts.

Pure functions of records. Which difference counts: on a card, the allocator's blocks, because that is what the card
reports. On the CPU, the requested bytes; and where the prediction holds no workspace of the kernels that the
measurement sets aside, as fxmem's for the CPU does not, those without the scratch of these kernels. The full figure
stands beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.memory.allocator import AllocatorSettings, read_settings, replay, trace_step
from fxmem.memory.log_diff import first_differences, predicted_events
from fxmem.records.profile import Kind, MeasuredPhase, Peak, Phase, ProcessBytes, Profile, Storage
from fxmem.records.validation import (
    ComparedPhase,
    ComparedQuantity,
    ComparedSegments,
    ComparedShare,
    Difference,
    LogSide,
    Measurement,
    Quantity,
    Verdict,
)

_KNOWN_BEFORE_THE_STEP = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE)
_OF_STEP = ("mode", "optimizer", "precision")
_RESIDENTS_SHOWN = 10


def verdict(
    prediction: Profile,
    peak: Peak,
    measurement: Measurement,
    tolerance: float,
    frames: Callable[[int], tuple[str, ...]] = lambda _: (),
) -> Verdict:
    """Compare a profile's peak with what was measured.

    Args:
        prediction: the profile that `peak` is of.
        tolerance: largest absolute error of the judged quantity, as a fraction.
        frames: the card's own stack at an event of the measured log.

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
        differences=_differences(prediction, measurement, frames),
        segments=_segments(prediction, measurement),
    )


def _settings(measurement: Measurement) -> AllocatorSettings:
    return read_settings({"PYTORCH_ALLOC_CONF": measurement.machine.allocator_settings})


def _phases(prediction: Profile, measurement: Measurement) -> tuple[ComparedPhase, ...]:
    if not measurement.phases:
        return ()
    predicted = {
        peak.phase: MeasuredPhase.model_validate(peak.model_dump())
        for peak in replay(prediction, settings=_settings(measurement)).phases
    }
    return tuple(
        ComparedPhase(predicted=predicted[found.phase], measured=found)
        for found in measurement.phases
        if found.phase in predicted
    )


def _differences(
    prediction: Profile, measurement: Measurement, frames: Callable[[int], tuple[str, ...]]
) -> tuple[Difference, ...]:
    if measurement.machine.device != "cuda" or not measurement.events:
        return ()
    found = first_differences(predicted_events(prediction), measurement.events, measurement.events_by_phase)
    return (
        *_resident_differences(prediction, measurement),
        *(
            each.model_copy(update={"frames": frames(each.position)})
            if each.side is LogSide.MEASURED and each.position is not None
            else each
            for each in found
        ),
    )


def _resident_differences(prediction: Profile, measurement: Measurement) -> Iterator[Difference]:
    """The blocks that only one side has before the step, the largest first."""
    if not measurement.resident_sizes:
        return
    names = {storage.nbytes: storage.name or storage.kind.value for storage in reversed(_residents(prediction))}
    mine = Counter(storage.nbytes for storage in _residents(prediction))
    theirs = Counter(measurement.resident_sizes)
    sides = ((LogSide.PREDICTED, mine - theirs), (LogSide.MEASURED, theirs - mine))
    ranked = sorted(((nbytes * count, nbytes, side) for side, left in sides for nbytes, count in left.items()))
    for total, nbytes, side in reversed(ranked[-_RESIDENTS_SHOWN:]):
        yield Difference(
            side=side,
            nbytes=nbytes,
            count=total // nbytes,
            phase=Phase.FORWARD,
            position=None,
            node=names[nbytes] if side is LogSide.PREDICTED else "",
        )


def _residents(prediction: Profile) -> list[Storage]:
    return [storage for storage in prediction.storages if storage.birth == 0 and storage.nbytes]


def _segments(prediction: Profile, measurement: Measurement) -> tuple[ComparedSegments, ...]:
    """How many segments of each size; empty where memory is mapped into segments, whose sizes are then one."""
    settings = _settings(measurement)
    if not measurement.segments or settings.expandable_segments:
        return ()
    mine = Counter(segment.size for segment in trace_step(prediction, settings).segments_after)
    theirs = Counter(measurement.segments)
    return tuple(
        ComparedSegments(nbytes=nbytes, predicted=mine[nbytes], measured=theirs[nbytes])
        for nbytes in sorted(mine | theirs, reverse=True)
    )


def _check_same(prediction: Profile, measurement: Measurement) -> None:
    steps = [(each, getattr(prediction.step, each), getattr(measurement.step, each)) for each in _OF_STEP]
    for what, predicted, measured in (("device", prediction.target.device, measurement.machine.device), *steps):
        if predicted != measured:
            raise UsageError(
                f"expected a prediction and a measurement of the same step, but {what} is {predicted} in one and "
                f"{measured} in the other"
            )


def compare_quantities(*pairs: tuple[Quantity, int | None, int | None]) -> tuple[ComparedQuantity, ...]:
    """Every quantity, predicted and measured, that both sides know."""
    return tuple(
        ComparedQuantity(
            quantity=quantity, predicted_bytes=predicted, measured_bytes=measured, error=predicted / measured - 1
        )
        for quantity, predicted, measured in pairs
        if predicted is not None and measured
    )


def _comparisons(prediction: Profile, peak: Peak, measurement: Measurement) -> tuple[ComparedQuantity, ...]:
    aside, observed = bool(measurement.set_aside), bool(measurement.set_aside or measurement.scratch)
    return compare_quantities(
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
        (Quantity.PROCESS, _nearest(peak.process_bytes, measurement.process_bytes), measurement.process_bytes),
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


def _nearest(predicted: ProcessBytes | None, measured: int | None) -> int | None:
    """The number of a predicted range that is nearest to what was measured."""
    return None if predicted is None or measured is None else predicted.nearest(measured)


def _shares(prediction: Profile, peak: Peak, measurement: Measurement, judged: Quantity) -> tuple[ComparedShare, ...]:
    scratchless = judged is Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    whole = measurement.peak_without_kernel_scratch_bytes if scratchless else measurement.peak_bytes
    resident = Counter[Kind]()
    for storage in _residents(prediction):
        resident[storage.kind] += storage.nbytes
    if measurement.resident_sizes:
        known = [(tuple(resident), resident.total(), measurement.resident_bytes)]
    else:
        by_kind = measurement.resident_by_kind
        known = [((kind,), resident[kind], by_kind.get(kind, 0)) for kind in _KNOWN_BEFORE_THE_STEP]
    rest = () if measurement.resident_sizes else tuple(kind for kind in Kind if kind not in _KNOWN_BEFORE_THE_STEP)
    mine, theirs = (sum(figures) for figures in list(zip(*known, strict=True))[1:])
    return tuple(
        ComparedShare(kinds=kinds, predicted_bytes=predicted, measured_bytes=measured)
        for kinds, predicted, measured in (*known, (rest, peak.requested_bytes - mine, whole - theirs))
    )
