"""Compare a prediction with a real run, or with a memory snapshot of a card.

The model handed in is not touched: the run is on a copy (`fxmem.simulation.step.fake_model`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.memory.allocator import complete_timeline
from fxmem.records.profile import Peak, Report, Round, Target
from fxmem.records.units import STEPS, MeasuredDevice
from fxmem.records.validation import (
    ComparedQuantity,
    ComparedRound,
    Machine,
    MeasuredRound,
    ProgramMeasurement,
    ProgramVerdict,
    Quantity,
    Verdict,
)
from fxmem.simulation.kernels.kernel_settings import apply_settings
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.program import IsolationSettings, Launch, RunSettings, check_program, find_started, launch_apart
from fxmem.simulation.step.analysis import analyze_step, build_module, read_request
from fxmem.simulation.step.fake_model import real_model, real_values
from fxmem.simulation.step.given import understand, view_source
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import set_training
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.measure_cuda import card_target, compile_real, found_card, measure_cuda, require_card
from fxmem.validation.measure_program import measure_program
from fxmem.validation.profiler_log import WORKSPACE_KERNELS, WRAPPER_PRODUCTS
from fxmem.validation.snapshot import measured_step, read_snapshot
from fxmem.validation.verdict import compare_quantities, verdict


def validate(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    snapshot: str | os.PathLike[str] | None = None,
    target: str | Target | None = None,
    tolerance: float = 0.01,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Verdict:
    """Predict a step, run it for real, and compare the two; or compare with a memory snapshot of a card.

    Args:
        model: real, on meta, or a function without arguments that builds it.
        inputs: a tensor, a tuple (positional) or a dict (keyword); real, meta or fake.
        device: where to run. With "cuda" the prediction is for the card that is found, and what is judged is the bytes
            allocated there.
        snapshot: a file that `torch.cuda.memory._dump_snapshot` wrote on any card after this step; nothing is run. The
            requested bytes are judged, which are exact in such a file.
        target: with `snapshot`, the card that it was made on: a name from the catalogue, or a `Target`.
        tolerance: largest absolute error allowed, as a fraction of the measured peak.
        progress: called with a few words before each stage.
        options: those of a step in `fxmem.analyze`, `mode` to `compile` but `accumulate` and `prefetch`, for the
            prediction and the run. A compiled step is measured on the CPU alone: inductor builds its kernels there, in
            no cache of yours.

    Raises:
        UsageError: the model or the inputs cannot be made real; no such device; no snapshot that torch wrote.
        EnvironmentLacksError: there is no card.
        AnalysisError: the model raised.
    """
    for name in options.keys() & {"accumulate", "prefetch", "ranks", "rank", "parallelize"}:
        raise UsageError(f"expected no {name}: what is run is one step, by itself")
    request = read_request(inputs, **options)
    tell = progress or (lambda _: None)
    if (snapshot is None) != (target is None):
        raise UsageError(
            "expected target, the card that the snapshot was made on (target='a100'), with one and with snapshot only: "
            "a real run is predicted for the device that it is on"
        )
    if snapshot is not None and target is not None:
        request = dataclasses.replace(request, target=target)
        return validate_snapshot(build_module(model, tell), request, Path(snapshot), tolerance=tolerance, progress=tell)
    return validate_step(model, build_module(model, tell), request, device=device, tolerance=tolerance, progress=tell)


def validate_step(
    source: nn.Module | Callable[[], nn.Module],
    model: nn.Module,
    request: StepRequest,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    tolerance: float = 0.01,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Predict a step of `model`, run it for real on `source`, and compare.

    Args:
        source: the model that is run: a module, of which a copy is made, or a function that builds it with values.
        model: the same model, which the prediction is made from; real or on meta.
        request: its target is replaced by the device's.
        device, tolerance, progress: as in `validate`.

    Raises:
        The errors of `validate`.
    """
    if request.compile is not None and device != "cpu":
        raise UsageError("expected device cpu with compile: a compiled step is measured on the CPU alone")
    _check_device(device)
    given, target = model, found_card() if device == "cuda" else device
    model, request = understand(given, dataclasses.replace(request, target=target))
    if model is not given:
        source = view_source(source)
    if request.values == "real":  # what is made up is to be the same in the prediction and in the run
        with process_unchanged():
            torch.manual_seed(0)
            source = model = real_model(source)
            args, kwargs = real_values((request.args, request.kwargs))
            request = dataclasses.replace(request, args=args, kwargs=kwargs)
    with apply_settings(request.settings):
        analysis = analyze_step(model, request, progress)
        progress(f"running the step on the {'card' if device == 'cuda' else 'CPU'}")
        with process_unchanged():
            torch.manual_seed(0)
            real = real_model(source)
            set_training(real, request.mode)
            args, kwargs = real_values((request.args, request.kwargs))
            request = dataclasses.replace(request, args=args, kwargs=kwargs)
            if device == "cuda":
                measurement = measure_cuda(real, request)
            else:
                products = () if request.compile is None else WRAPPER_PRODUCTS
                with compile_real(real, request.compile) as called:
                    measurement = measure_cpu(called, request, set_aside=(*WORKSPACE_KERNELS, *products))
    return verdict(analysis.profile, analysis.peak, measurement, tolerance)


def validate_snapshot(
    model: nn.Module,
    request: StepRequest,
    snapshot: Path,
    *,
    tolerance: float = 0.01,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Compare the prediction of a step with a memory snapshot of its card.

    Args:
        model: real or on meta; it is not run.
        request: its target is the card.
        snapshot: as in `validate`.
        tolerance: as in `validate`.
        progress: as in `validate`.

    Raises:
        The errors of `validate`.
    """
    if request.compile is not None:
        raise UsageError("expected snapshot without compile: the frames in a snapshot are those of eager code")
    if request.resolved_target.device != "cuda":
        raise UsageError("expected the card that the snapshot was made on, got the target cpu")
    progress("reading the snapshot")
    found = read_snapshot(snapshot)
    profile = analyze_step(model, request, progress).profile
    step = measured_step(profile, found)
    timeline = complete_timeline(profile, {"PYTORCH_ALLOC_CONF": found.allocator_settings})
    return verdict(profile, timeline.peak, step.measurement, tolerance, step.frames)


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise UsageError(f"expected device='cpu' or 'cuda' (where a step can be measured), got {device!r}")


# --- compare the prediction of a user's own program with a real run, by rounds ----------------------------------------


def validate_program(
    program: Sequence[str],
    *,
    is_module: bool = False,
    steps: int = STEPS,
    device: MeasuredDevice = "cpu",
    compile: str | None = None,
    tolerance: float = 0.01,
    progress: Callable[[str], None] | None = None,
) -> ProgramVerdict:
    """Run a program for real and on a pretended machine, and compare its rounds.

    The real run is in a process of its own, and its files are real: this is trusted code. The program also runs as
    `fxmem run` runs it, apart from them: before on the CPU, and afterwards on a card. Judged are, on a card, the bytes
    allocated; on the CPU, the bytes requested with the scratch of some kernels set aside, of which fxmem has none for
    the CPU.

    Args:
        program: as it is typed after `python`: the script, then its own arguments.
        is_module: whether the first word is a module's name, as after `python -m`.
        steps: optimizer steps, rounds, after which both runs end.
        device: where to run for real. With "cuda" the prediction is for the card that is found.
        compile: "as-is" compiles what the program compiles, in both runs; None runs that as it was written.
        tolerance: largest absolute error allowed in any round, as a fraction of the measured peak.
        progress: called with a few words before each stage.

    Raises:
        UsageError: an argument that cannot be understood; no such script.
        EnvironmentLacksError: there is no card.
        AnalysisError: the program ended before its first optimizer step.
    """
    if not program:
        raise UsageError("expected a program to run, its script first")
    if steps < 1:
        raise UsageError(f"expected steps of at least 1, got {steps}")
    if tolerance < 0:
        raise UsageError(f"expected a tolerance of 0 or more (0.03 is 3 %), got {tolerance}")
    _check_device(device)
    if device == "cuda":
        require_card()
    started = find_started(Launch(program[0], tuple(program[1:]), is_module))
    check_program(started)
    launched = dataclasses.replace(started, ranks=None)  # of a launcher's processes the first, alone, in both runs
    tell = progress or (lambda _: None)

    def predict(target: Target) -> Report:
        tell("predicting it")
        return launch_apart(launched, target, RunSettings(steps, compile=compile), IsolationSettings()).report()

    # It leaves no file that the real run would find; but the card is known only once that has run.
    predicted = predict(catalogue.target("cpu")) if device == "cpu" else None
    tell(f"running the program on the {'card' if device == 'cuda' else 'CPU'}")
    measured = measure_program(launched, steps=steps, device=device, compile=compile)
    return program_verdict(predicted or predict(_card(measured.machine)), measured, tolerance)


def _card(machine: Machine) -> Target:
    assert machine.capability is not None
    return card_target(machine.name, machine.capability, machine.memory_bytes)


def program_verdict(predicted: Report, measured: ProgramMeasurement, tolerance: float) -> ProgramVerdict:
    """Compare the report of a program with its measurement.

    Raises:
        AnalysisError: nothing of the program ran on the pretended machine.
    """
    recorded, target = predicted.step.program, predicted.target.name
    if recorded is None:
        raise AnalysisError("expected the report of a program, got that of a step of a model")
    found = recorded.steps or recorded.rounds  # of a program that only runs, all of it after its set-up
    rounds = tuple(
        ComparedRound(number=number, predicted=mine, measured=theirs, comparisons=compare_round(mine, theirs))
        for number, (mine, theirs) in enumerate(zip(found, measured.rounds, strict=False), 1)
    )
    if not rounds:
        raise AnalysisError(f"expected a program that runs on {target}; predicted, it {recorded.ending}")
    on_card = measured.machine.device == "cuda"
    judged = Quantity.ALLOCATED if on_card else Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    errors = [each.error for compared in rounds for each in compared.comparisons if each.quantity is judged]
    within = len(found) == len(measured.rounds) and all(abs(each) <= tolerance for each in errors)
    return ProgramVerdict(
        program=measured.program,
        target=target,
        ending=recorded.ending,
        measurement=measured,
        rounds=rounds,
        judged=judged,
        tolerance=tolerance,
        within_tolerance=within,
        made_up=recorded.made_up,
    )


def compare_round(mine: Round | Peak, theirs: MeasuredRound) -> tuple[ComparedQuantity, ...]:
    """Every quantity of a round that both sides know."""
    without_scratch = theirs.peak_without_kernel_scratch_bytes
    return compare_quantities(
        (Quantity.REQUESTED, mine.requested_bytes, theirs.peak_bytes),
        (Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH, mine.requested_bytes, without_scratch),
        (Quantity.ALLOCATED, mine.allocated_bytes, theirs.allocated_bytes),
        (Quantity.RESERVED, mine.reserved_bytes, theirs.reserved_bytes),
    )
