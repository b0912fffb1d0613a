"""A prediction beside a measurement: the differences, which of them counts, and the same as text.

Pure functions of records. Which difference counts: on a card, the allocator's blocks, because that is what the card
reports. On the CPU, the requested bytes; and where the prediction holds no workspace of the kernels that the
measurement sets aside, as fxmem's for the CPU does not, those without the scratch of these kernels. The full figure
stands beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.memory.allocator import replay, settings_of
from fxmem.memory.log_diff import first_differences, predicted_events
from fxmem.records.profile import Kind, Peak, Profile
from fxmem.records.units import exact_bytes, format_bytes, format_shape, printable, to_words
from fxmem.records.validation import (
    ComparedPhase,
    ComparedQuantity,
    ComparedShare,
    Difference,
    LogSide,
    MeasuredOp,
    MeasuredPhase,
    Measurement,
    Quantity,
    Verdict,
)

__all__ = ["describe_difference", "report", "verdict"]

_KNOWN_BEFORE_THE_STEP = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE)
_SCRATCH_SHOWN = 5
_DIFFERENCES_SHOWN = 8


def verdict(prediction: Profile, peak: Peak, measurement: Measurement, tolerance: float) -> Verdict:
    """Hold a profile's peak against what was measured.

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
    judged, reason = _judged(prediction, measurement, {comparison.quantity for comparison in comparisons})
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
    settings = settings_of({"PYTORCH_ALLOC_CONF": measurement.machine.allocator_settings})
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


def _judged(prediction: Profile, measurement: Measurement, known: set[Quantity]) -> tuple[Quantity, str]:
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


# --- as text ----------------------------------------------------------------------------------------------------------

_LABELS = {
    Quantity.REQUESTED: "requested",
    Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH: "requested, workspaces aside",
    Quantity.REQUESTED_WITHOUT_SCRATCH: "requested, all scratch aside",
    Quantity.ALLOCATED: "allocated",
    Quantity.RESERVED: "reserved",
    Quantity.PROCESS: "process",
}


def report(verdict: Verdict) -> str:
    """The verdict as plain text of at most 80 columns, names of models, nodes and cards apart, without a newline at the
    end."""
    measured = verdict.measurement
    lines = [
        f"{printable(verdict.model)}, one {_step(measured)}, predicted for {verdict.target}",
        f"measured on {_machine(measured)}",
        "",
        f"{'':<32}{'predicted':>12}{'measured':>12}{'difference':>12}{'error':>11}",
        *(
            _row(_LABELS[c.quantity], c.predicted_bytes, c.measured_bytes, c.quantity is verdict.judged)
            for c in verdict.comparisons
        ),
        "",
        *(
            _row(_kinds(share), share.predicted_bytes, share.measured_bytes)
            for share in verdict.shares
            if share.predicted_bytes or share.measured_bytes
        ),
        "",
        *_by_phase(verdict.phases),
        f"peak in {measured.peak_phase}{_running(measured)}, predicted in {verdict.predicted.phase}",
        *_scratch(measured),
        *_parting(verdict.differences),
    ]
    if measured.retained_bytes:
        lines.append(f"left alive when the step returned: {exact_bytes(measured.retained_bytes)}")
    error = next(comparison.error for comparison in verdict.comparisons if comparison.quantity is verdict.judged)
    sign = "<=" if verdict.within_tolerance else ">"
    lines += [
        f"judged: {_LABELS[verdict.judged]}, because {verdict.reason}",
        (
            f"{'within' if verdict.within_tolerance else 'NOT within'} tolerance: {abs(error):.4%} {sign} "
            f"{verdict.tolerance:.4%}"
        ),
    ]
    return "\n".join(lines)


def _row(label: str, predicted: int, measured: int, judged: bool = False) -> str:
    error = f"{predicted / measured - 1:+.4%}" if measured > 0 else ""
    mark = "*" if judged else " "
    return (
        f"{mark} {label:<30}{format_bytes(predicted):>12}{format_bytes(measured):>12}"
        f"{format_bytes(predicted - measured):>12}{error:>11}"
    )


def _kinds(share: ComparedShare) -> str:
    return to_words(share.kinds[0]) if len(share.kinds) == 1 else "made during the step"


def _step(measurement: Measurement) -> str:
    step = measurement.step
    settings = [f"autocast {step.precision}"] if step.precision else []
    if step.mode == "train":
        settings.append(f"with {step.optimizer}" if step.optimizer else "without an optimizer")
    return " ".join(["training step" if step.mode == "train" else "inference step", *settings])


def _machine(measurement: Measurement) -> str:
    machine = measurement.machine
    versions = {"CUDA": machine.cuda_version, "cuDNN": machine.cudnn_version}
    parts = [
        printable(machine.name),
        f"torch {machine.torch_version}",
        *(f"{name} {version}" for name, version in versions.items() if version),
    ]
    if machine.onednn is not None:
        parts.append("oneDNN" if machine.onednn else "no oneDNN")
    if machine.threads is not None:
        parts.append(f"{machine.threads} thread{'s' * (machine.threads != 1)}")
    return ", ".join(parts)


def _by_phase(phases: Sequence[ComparedPhase]) -> list[str]:
    rows = [
        _row(f"allocated in {phase.measured.phase}", phase.predicted.allocated_bytes, phase.measured.allocated_bytes)
        for phase in phases
    ]
    return [*rows, ""] if len(rows) > 1 else []


def _running(measurement: Measurement) -> str:
    if measurement.machine.device == "cuda":
        return ""
    return f" ({measurement.peak_op or 'between two operators'})"


def describe_difference(difference: Difference) -> str:
    """One line for a person: which log has the block, how large it is, whose it is."""
    where = f"{difference.op.removesuffix('.default')} of {difference.node}" if difference.op else "the step's begin"
    after = "after " if difference.side is LogSide.MEASURED and not difference.lives_longer else ""
    verb = "lives longer where" if difference.lives_longer else "only"
    return (
        f"{format_bytes(difference.nbytes):>9} {verb} {difference.side.value}, {difference.phase}: "
        f"{after}{printable(where)}"
    )


def _parting(differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return []
    more = len(differences) - _DIFFERENCES_SHOWN
    shown = [f"  {describe_difference(difference)}" for difference in differences[:_DIFFERENCES_SHOWN]]
    return [
        "blocks on which the two logs disagree, the first ones:",
        *shown,
        *([f"  and {more} more in the JSON"] if more > 0 else []),
    ]


def _scratch(measurement: Measurement) -> list[str]:
    """What the kernels took for themselves: at the peak, and the largest of all."""
    if not measurement.scratch:
        return []
    at_peak = sum(op.at_peak_bytes for op in measurement.scratch)
    by_size: Sequence[MeasuredOp] = sorted(measurement.scratch, key=lambda op: (-op.at_peak_bytes, -op.scratch_bytes))
    shown = [op for op in by_size if op.scratch_bytes * 1000 >= measurement.peak_bytes][:_SCRATCH_SHOWN]
    lines = [f"kernels' own scratch at the peak: {exact_bytes(at_peak)}{'; the largest:' if shown else ''}"]
    for op in shown:
        shapes = ", ".join(format_shape(shape) for shape in op.input_shapes if shape is not None)
        where = "at the peak" if op.at_peak_bytes else op.phase
        kind = "workspace" if op.name in measurement.set_aside else "scratch"
        calls = f"{op.calls} call{'s' * (op.calls != 1)}"
        lines.append(
            f"  {format_bytes(op.scratch_bytes):>9} {kind} in {op.kernel.removesuffix('.default')}, {where}, "
            f"{calls}: {shapes}"
        )
    return lines
