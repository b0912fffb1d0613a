"""Compare the prediction of a user's own program with a real run, by rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.records.names import STEPS, MeasuredDevice
from fxmem.records.profile import Peak, Report, Round, Target
from fxmem.records.validation import (
    ComparedQuantity,
    ComparedRound,
    Machine,
    MeasuredRound,
    ProgramMeasurement,
    ProgramVerdict,
    Quantity,
)
from fxmem.simulation.program import IsolationSettings, Launch, RunSettings, check_program, find_started, launch_apart
from fxmem.validation.measure_cuda import card_target, require_card
from fxmem.validation.measure_program import measure_program
from fxmem.validation.verdict import compare_quantities


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
    if device not in ("cpu", "cuda"):
        raise UsageError(f"expected device='cpu' or 'cuda' (where a program can be measured), got {device!r}")
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
    rounds = tuple(
        ComparedRound(number=number, predicted=mine, measured=theirs, comparisons=compare_round(mine, theirs))
        for number, (mine, theirs) in enumerate(zip(recorded.steps, measured.rounds, strict=False), 1)
    )
    if not rounds:
        raise AnalysisError(f"expected a program that trains on {target}; predicted, it {recorded.ending}")
    on_card = measured.machine.device == "cuda"
    judged = Quantity.ALLOCATED if on_card else Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    errors = [each.error for found in rounds for each in found.comparisons if each.quantity is judged]
    within = len(recorded.steps) == len(measured.rounds) and all(abs(each) <= tolerance for each in errors)
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
