"""A prediction beside a measurement, of a step or of a program, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from fxmem.records.units import exact_bytes, format_bytes, format_shape, printable, to_words
from fxmem.records.validation import (
    ComparedQuantity,
    Difference,
    LogSide,
    Machine,
    MeasuredOp,
    Measurement,
    ProgramMeasurement,
    ProgramVerdict,
    Quantity,
    Verdict,
)
from fxmem.show.sections import Fact
from fxmem.show.text.tables import facts, item_list, render, ruled

_SCRATCH_SHOWN = 5
_DIFFERENCES_SHOWN = 8
_SEGMENTS_SHOWN = 5
_KERNELS_SHOWN = 2
_LABELS = {quantity: quantity.value for quantity in Quantity} | {
    Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH: "requested, workspaces aside",
    Quantity.REQUESTED_WITHOUT_SCRATCH: "requested, all scratch aside",
}
"""What each quantity is called."""
_JUDGED_AS = {
    Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH: ": what kernels of this CPU's libraries (oneDNN, MKL) allocate and free "
    "within an operator depends on the machine, is measured here, and is in no prediction"
}


def table(verdict: Verdict | ProgramVerdict, *, width: int = 80, color: bool = False) -> str:
    """The verdict as text whose lines are at most `width` columns wide, at least 80."""
    parts = _parts(verdict) if isinstance(verdict, Verdict) else _program_parts(verdict)
    return render(parts, max(width, 80), color)


def _parts(verdict: Verdict) -> Iterator[RenderableType]:
    measured = verdict.measurement
    model = f"{printable(verdict.model)}, one {_step(measured)}, predicted for {verdict.target}"
    error = next(each.error for each in verdict.comparisons if each.quantity is verdict.judged)
    first = Fact("Verdict", _judge(abs(error), verdict.tolerance))
    yield facts([first, Fact("Model", model), Fact("Measured", f"on {_describe_machine(measured.machine)}")])
    yield _totals(verdict)
    running = "" if measured.machine.device == "cuda" else f" ({measured.peak_op or 'between two operators'})"
    yield facts([Fact("Peak", f"in {measured.peak_phase}{running}, predicted in {verdict.predicted.phase}")])
    if measured.scratch:
        at_peak = sum(op.at_peak_bytes for op in measured.scratch)
        whole = f"at the peak, of the kernels' own ({at_peak:,} bytes)"
        by_size = sorted(measured.scratch, key=lambda op: (-op.at_peak_bytes, -op.scratch_bytes))
        large = [op for op in by_size if op.scratch_bytes * 1000 >= measured.peak_bytes][:_SCRATCH_SHOWN]
        largest = [(format_bytes(op.scratch_bytes), _describe_scratch(op, measured)) for op in large]
        yield item_list("Scratch", [(format_bytes(at_peak), whole), *largest])
    if verdict.differences:
        items = [("", "blocks on which the two logs disagree, the first ones:")]
        for each in verdict.differences[:_DIFFERENCES_SHOWN]:
            items += describe_difference(each)
        more = len(verdict.differences) - _DIFFERENCES_SHOWN
        yield item_list("Logs", items + [("", f"and {more} more in the JSON")] * (more > 0))
    if verdict.segments:
        yield item_list("Segments", list(_segment_lines(verdict)))
    yield from _not_shown(measured)
    yield facts(_conclusion(verdict))


def _not_shown(measured: Measurement | ProgramMeasurement) -> Iterator[Table]:
    if measured.notes:
        yield item_list("Not shown", [("", printable(note)) for note in measured.notes])


def _totals(verdict: Verdict) -> Table:
    totals = ruled(("", 31), ("Predicted", 10), ("Measured", 10), ("Difference", 11), ("Error", 10))
    for each in verdict.comparisons:
        mark = "* " if each.quantity is verdict.judged else "  "
        _add_row(totals, mark + _LABELS[each.quantity], each.predicted_bytes, each.measured_bytes)
    totals.add_section()
    for share in verdict.shares:
        if share.predicted_bytes or share.measured_bytes:
            label = to_words(share.kinds[0]) if len(share.kinds) == 1 else "made during the step"
            if verdict.measurement.resident_sizes and share.kinds:
                label = "there before the step"
            _add_row(totals, f"  {label}", share.predicted_bytes, share.measured_bytes)
    if len(verdict.phases) > 1:
        totals.add_section()
        for phase in verdict.phases:
            predicted, measured = phase.predicted.allocated_bytes, phase.measured.allocated_bytes
            _add_row(totals, f"  allocated in {phase.measured.phase}", predicted, measured)
    return totals


def _segment_lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """How many segments both sides have, and the sizes of which they have different numbers."""
    predicted, measured = sum(s.predicted for s in verdict.segments), sum(s.measured for s in verdict.segments)
    yield "", f"{predicted:,} predicted, {measured:,} measured when the step is over"
    differing = [each for each in verdict.segments if each.predicted != each.measured]
    for each in differing[:_SEGMENTS_SHOWN]:
        yield format_bytes(each.nbytes), f"{each.predicted:,} predicted, {each.measured:,} measured"
    if len(differing) > _SEGMENTS_SHOWN:
        yield "", f"and {len(differing) - _SEGMENTS_SHOWN} more sizes in the JSON"


def _add_row(totals: Table, label: str, predicted: int, measured: int) -> None:
    error = f"{predicted / measured - 1:+.4%}" if measured > 0 else ""
    totals.add_row(label, format_bytes(predicted), format_bytes(measured), format_bytes(predicted - measured), error)


def _conclusion(verdict: Verdict) -> Iterator[Fact]:
    if verdict.measurement.retained_bytes:
        yield Fact("Left", f"{exact_bytes(verdict.measurement.retained_bytes)} alive when the step returned")
    yield Fact("Judged", f"{_LABELS[verdict.judged]} (*), because {verdict.reason}")


def _judge(error: float, tolerance: float) -> str:
    within, sign = ("within", "<=") if error <= tolerance else ("NOT within", ">")
    return f"{within} tolerance: {error:.4%} {sign} {tolerance:.4%}"


def _step(measurement: Measurement) -> str:
    step = measurement.step
    autocast = f" autocast {step.precision}" if step.precision else ""
    if step.mode != "train":
        return f"inference step{autocast}"
    return f"training step{autocast} {f'with {step.optimizer}' if step.optimizer else 'without an optimizer'}"


def _describe_machine(machine: Machine) -> str:
    """Where something was measured, and by which libraries."""
    versions = {"CUDA": machine.cuda_version, "cuDNN": machine.cudnn_version}
    parts = [
        printable(machine.name),
        *([f"torch {machine.torch_version}"] if machine.torch_version else []),
        *(f"{name} {version}" for name, version in versions.items() if version),
    ]
    if machine.onednn is not None:
        parts.append("oneDNN" if machine.onednn else "no oneDNN")
    if machine.threads is not None:
        parts.append(f"{machine.threads} thread{'s' * (machine.threads != 1)}")
    return ", ".join(parts)


def _describe_scratch(op: MeasuredOp, measurement: Measurement) -> str:
    shapes = ", ".join(format_shape(shape) for shape in op.input_shapes if shape is not None)
    where = "at the peak" if op.at_peak_bytes else op.phase
    kind = "workspace" if op.name in measurement.set_aside else "scratch"
    calls = f"{op.calls} call{'s' * (op.calls != 1)}"
    return f"{kind} in {op.kernel.removesuffix('.default')}, {where}, {calls}: {shapes}"


def describe_difference(difference: Difference) -> Iterator[tuple[str, str]]:
    """How large a block is, which log has it, and whose it is; where the card's stack is known, it and our line."""
    yield format_bytes(difference.nbytes), _describe_side(difference)
    own = next((frame for frame in difference.frames if ".py:" in frame and "torch/" not in frame), "")
    kernels = [frame for frame in difference.frames if "at::" in frame and "empty" not in frame][:_KERNELS_SHOWN]
    ours = "/".join(difference.line.replace("\\", "/").split("/")[-2:])  # the file and its folder
    places = (("ours", ours), ("the card's", ", ".join([*kernels, *([own] if own else [])])))
    if difference.frames:
        yield from (("", f"{whose}: {printable(place)}") for whose, place in places if place)


def _describe_side(difference: Difference) -> str:
    if difference.position is None:
        blocks = f"{difference.count} blocks" if difference.count > 1 else "a block"
        what = f": {printable(difference.node)}" if difference.node else ""
        return f"{blocks} there before the step, only {difference.side.value}{what}"
    where = f"{difference.op.removesuffix('.default')} of {difference.node}" if difference.op else "the step's begin"
    after = "after " if difference.side is LogSide.MEASURED and not difference.lives_longer else ""
    verb = "lives longer where" if difference.lives_longer else "only"
    return f"{verb} {difference.side.value}, {difference.phase}: {after}{printable(where)}"


# --- programs ---------------------------------------------------------------------------------------------------------


def _program_parts(verdict: ProgramVerdict) -> Iterator[RenderableType]:
    measured = verdict.measurement
    errors = [each.error for found in verdict.rounds for each in found.comparisons if each.quantity is verdict.judged]
    worst = max(map(abs, errors), default=0.0)
    counts = len(verdict.rounds), len(measured.rounds)
    missing = "" if counts[0] == counts[1] else f"; {counts[1]} steps were measured, {counts[0]} predicted"
    head = [
        Fact("Verdict", f"{_judge(worst, verdict.tolerance)}{missing}"),
        Fact("Program", f"{printable(verdict.program)}, predicted for {verdict.target}"),
        Fact("Measured", f"on {_describe_machine(measured.machine)}"),
        Fact("Runs", f"predicted: {printable(verdict.ending)}; measured: {printable(measured.ending)}"),
    ]
    yield facts(head)
    rows = ruled(("Step", 36), ("Predicted", 12), ("Measured", 12), ("Error", 12), left=("Step",))
    for found in verdict.rounds:
        for each in found.comparisons:
            mark = "*" if each.quantity is verdict.judged else " "
            error, sizes = f"{each.error:+.4%}", (each.predicted_bytes, each.measured_bytes)
            rows.add_row(f"{mark} {found.number} {_LABELS[each.quantity]}", *map(format_bytes, sizes), error)
    yield rows
    yield facts([Fact("Judged", f"{_LABELS[verdict.judged]} (*){_JUDGED_AS.get(verdict.judged, '')}")])
    yield from _not_shown(measured)


def round_line(number: int, comparisons: Sequence[ComparedQuantity]) -> str:
    """One line on a step that has just run: what a card's allocator held at most, and what was predicted."""
    parts = (
        f"{_LABELS[each.quantity]} {format_bytes(each.measured_bytes)}, predicted {format_bytes(each.predicted_bytes)} "
        f"({each.error:+.2%})"
        for each in comparisons
        if each.quantity in (Quantity.ALLOCATED, Quantity.RESERVED)
    )
    return f"fxmem: step {number}: {'; '.join(parts)}"
